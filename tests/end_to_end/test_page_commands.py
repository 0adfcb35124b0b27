"""Every command of README.md, CONTRIBUTING.md and docs/ runs, on a small twin of the quickstart, or says why it cannot.

The pages are read as they are, and their commands run in the order of the pages, each once, in a folder that looks
like a checkout whose quickstart has been trained. Only numbers are made small, plans are made from shapes, and the
quickstart with experts is only described: other tests train such models.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page_commands import CANNOT_RUN, RUN_BY, commands, reason_not_to_run, run
from tests.runs import CONFIG, ROOT, TEXT

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text()
         for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))}
COMMANDS = list(dict.fromkeys(command for page, text in PAGES.items() if page not in RUN_BY
                              for command in commands(text)))
RUNNABLE = [command for command in COMMANDS if reason_not_to_run(command) is None]
TWIN = "configs/quickstart.yml"
# What stands on the pages for something of the reader's, and updates that are made small.
WORDS = {"$RUN": "runs/quickstart", "$CONFIG": "configs/quickstart.yml", "$OUT": "out", "PATH": str(TEXT / "prose"),
         "HF_DIR": "hf", "NAME": "quickstart"}
FINDS = {"diff", "--reference"}  # these steps differ, and the curve is not this run's: exit code 1
UPDATES = {"300": "2", "800": "22", "1200": "24"}
SMALL = {"data prepare": ["--vocab-size", "384"], "generate": ["--tokens", "8"], "watch": ["--once"]}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Iterator[Path]:
    """A folder with configs of small twins, prepared data, and the run that the quickstart leaves."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "configs").mkdir()
    (folder / "data").mkdir()
    (folder / "data" / "quickstart").symlink_to(prepared_text)
    text = CONFIG.format(prepared="data/quickstart", output_dir="runs").replace("steps: 40, g", "steps: 20, g")
    text = text.replace("sequence_length: 32", "sequence_length: 32, sources: {code: {repeat: 1}, prose: {repeat: 1}}")
    assert text.count("steps: 20") == text.count("sources:") == 1
    (folder / TWIN).write_text(text)
    with contextlib.chdir(folder):
        assert run(["python", "train.py", TWIN]) == 0
        with open("CURVE.csv", "w", newline="") as file:
            csv.writer(file).writerows([("step", "train/CE loss"), (1, 9.0), (2, 9.0)])
        yield folder


def here(command: str) -> list[str]:
    """The words of a command, with what stands for something of the reader's, and small numbers."""
    words = shlex.split(re.sub(r"\$\w+|\b(?:PATH|HF_DIR|NAME)\b", lambda found: WORDS[found[0]], command))
    for i, word in enumerate(words):
        if word.startswith("train.steps="):
            number = word.partition("=")[2]
            words[i] = f"train.steps={UPDATES.get(number, number)}"
        elif word.startswith("configs/") and word != TWIN:
            words[i] = str(ROOT / word)
    if words[:2] == ["maxtext", "plan"] and "cpu:8" not in words and "--estimate" not in words:
        words.append("--estimate")
    if "configs/quickstart_moe.yml" in command:
        words.append("--dry-run")
    for verb, more in SMALL.items():
        words += more if command.startswith(f"maxtext {verb} ") else []
    return words


@pytest.mark.parametrize("command", RUNNABLE)
def test_a_command_runs(command: str, checkout: Path, capsys: pytest.CaptureFixture[str]):
    words = here(command)
    code = run(words, devices=2 if any(word.startswith("mesh.") for word in words) else 1)
    said = capsys.readouterr()
    assert code == (1 if FINDS & set(words) else 0), said.err


def test_every_command_is_run_or_has_a_reason():
    assert len(RUNNABLE) > 40
    everything = [command for text in PAGES.values() for command in commands(text)]
    named = {start for start in CANNOT_RUN for one in everything if f"{one} ".startswith(f"{start} ")}
    mentioned = {start for start in CANNOT_RUN if any(f"`{start}" in text for text in PAGES.values())}
    assert set(CANNOT_RUN) - named - mentioned == set(), "no page has these commands any more"
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text()


def test_the_reader_of_commands():
    text = "    .venv/bin/python train.py a \\\n     b=c   # why\n\nmaxtext not here\n    not.a command\n    maxtext x"
    assert commands(text) == ["python train.py a b=c", "maxtext x"]
