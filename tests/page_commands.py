"""The commands of README.md and docs/: how tests read them off a page and run them, and which cannot run, and why."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from maxtext import cli
from tests.runs import ROOT, some_devices

PAGE = (ROOT / "docs" / "reproduce_olmo3.md").read_text()
TINY_HEADING = "## The same in seconds"
PROGRAMS = ("python", "maxtext", "pip", "cd")
# Pages whose commands are run by a test of their own; those of all others by tests/end_to_end/test_page_commands.py.
RUN_BY = {"docs/data.md": "tests/data/test_data_page.py", "docs/launch.md": "tests/launch/test_page.py",
          "docs/reproduce_olmo3.md": "tests/end_to_end/test_reproduce_page.py"}
# Commands that no test runs as they stand, each with the reason; a prefix stands for all that begin with it.
_INDEX, _VERB = "needs a package index", "names the verb"
_WRITES = "writes into docs/; a test holds the pages to what it writes"
_TORCH = "needs torch; tests/convert/test_transformers.py runs it"
CANNOT_RUN = {
    "cd $BUCKET/data": "the tests do it",
    "pip install": _INDEX,
    "maxtext data prepare": _VERB,
    "maxtext eval": _VERB,
    "maxtext convert import": _VERB,
    "scripts/quickstart.sh": "makes an environment; tests/test_scripts.py and test_quickstart.py run its parts",
    "scripts/test.sh": "is the tests",
    "source .venv/bin/activate": "is for a person's shell",
    "python -m pytest": "is the tests",
    "python benchmarks/peers.py": "needs two other environments; tests/benchmarks/test_peers.py runs its parts",
    "python -m maxtext.config.page": _WRITES,
    "python -m maxtext.plan.page": _WRITES,
    "python -m maxtext.report.metric_names": _WRITES,
    "python scripts/draw_parallelism.py": _WRITES,
    "python benchmarks/measured_page.py": _WRITES,
    "python benchmarks/gates.py": "takes minutes; tests/compare/test_gates.py runs its parts",
    "python tests/oracles/families/make.py": "needs torch and transformers, and rewrites what the tests compare with",
    "maxtext convert trace": _TORCH,
    "maxtext convert verify": _TORCH,
    "maxtext compare quickstart": "takes minutes; tests/compare/test_compare.py runs it on a tiny config",
    "maxtext plan configs/olmo3_7b.yml --topology tpu7x:4x4x4 --search": "compiles for a TPU; tests/plan do so",
    "maxtext report runs/quickstart --compare": "needs a second run; tests/report/test_full_report.py has three",
    "maxtext launch local CONFIG": "shows the options; tests/elastic runs it",
}


def shown(text: str = PAGE) -> list[str]:
    """The indented lines that are commands, in order."""
    return [line.strip() for line in text.splitlines()
            if line.startswith("    ") and line.split()[0] in PROGRAMS]


def mentioned(text: str = PAGE) -> list[str]:
    """The commands in the running text, between backquotes."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text) if found.split()[0] in PROGRAMS]


def commands(text: str) -> list[str]:
    """Every command of a page's indented blocks: continued lines joined, without `.venv/bin/` and trailing comments."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line.strip().removeprefix(".venv/bin/") for line in joined.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+# .*$", "", line) for line in lines
            if re.match(r"(python|maxtext|pip|cd|source|mkdocs|scripts/\w+\.sh)( |$)", line)]


def reason_not_to_run(command: str) -> str | None:
    """Why no test runs a command as it stands; None when one does."""
    for start, reason in CANNOT_RUN.items():
        if command == start or (command.startswith(f"{start} ") and reason not in (_VERB, "the tests do it")):
            return reason
    return None


def at_full_size() -> list[str]:
    return shown(PAGE.split(TINY_HEADING)[0])


def in_small() -> list[str]:
    return shown(PAGE.split(TINY_HEADING)[1])


def words(line: str, bucket: str = "/mnt/bucket") -> list[str]:
    return shlex.split(line.replace("$BUCKET", bucket).replace("$REPO", str(ROOT)))


def run(line: Sequence[str], devices: int = 1) -> int:
    """Runs the words of a command; training sees some of the devices. Returns the exit code."""
    from maxtext.train import loop  # it imports jax, which the commands that are only read do not need

    program, *arguments = line
    if program == "maxtext":
        return cli.main(arguments)
    assert program == "python"
    script = ROOT / arguments[0]  # an absolute path stays as it is
    assert "from maxtext.cli import train" in script.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", functools.partial(loop.train, devices=some_devices(devices)))
        return cli.train(arguments[1:])


def path_of(config: str) -> str:
    """`configs/tiny/x.yml`, as seen from the project's folder, from anywhere."""
    return str(ROOT / config) if Path(config).parts[0] == "configs" else config
