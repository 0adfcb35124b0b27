"""The commands of docs/reproduce_olmo3.md: how tests read them off the page, and run them in this process."""

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


def shown(text: str = PAGE) -> list[str]:
    """The indented lines that are commands, in order."""
    return [line.strip() for line in text.splitlines()
            if line.startswith("    ") and line.split()[0] in PROGRAMS]


def mentioned(text: str = PAGE) -> list[str]:
    """The commands in the running text, between backquotes."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text) if found.split()[0] in PROGRAMS]


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
