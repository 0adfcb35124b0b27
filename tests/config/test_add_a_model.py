"""docs/add_a_model.md: what it quotes stands in the files, its commands run, and three files are all it takes."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from maxtext.cli import train
from maxtext.convert.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_model.md").read_text()
QUOTES = re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
FILES = {"configs/models/qwen3_0b6.yml", "maxtext/convert/families.py", "tests/oracles/families/make.py"}
COMMANDS = re.sub(r"\\\n\s*", "", "\n".join(re.findall(r"(?m)^    (.*)", PAGE))).splitlines()


def test_the_page_quotes_three_files():
    assert {path for path, _ in QUOTES} == FILES
    assert PAGE.count("```") == 2 * len(QUOTES)


@pytest.mark.parametrize(("path", "quoted"), QUOTES)
def test_a_quotation_stands_in_its_file(path: str, quoted: str):
    lines, wanted = (ROOT / path).read_text().splitlines(), quoted.rstrip("\n").splitlines()
    starts = range(len(lines) - len(wanted) + 1)
    assert any(textwrap.dedent("\n".join(lines[i : i + len(wanted)])).splitlines() == wanted for i in starts)


def test_a_file_of_an_architecture_is_quoted_whole():
    [quoted] = [text for path, text in QUOTES if path.endswith(".yml")]
    assert quoted == (ROOT / "configs/models/qwen3_0b6.yml").read_text()


def test_nothing_else_of_the_program_names_the_family():
    files = [*(ROOT / "maxtext").rglob("*.py"), *(ROOT / "configs").rglob("*.yml")]
    named = {path.relative_to(ROOT).as_posix() for path in files if re.search(r"(?i)qwen.?3", path.read_text())}
    assert {path for path in named if not path.startswith("configs/models/qwen3_")} == FILES & {
        "maxtext/convert/families.py"}


def test_the_choices_of_the_family_are_those_that_the_page_says():
    [said] = re.findall(r"the family fixes, here (.*?)\.", PAGE)
    choices = dict(re.findall(r"`(\w+): (\w+)`", said))
    assert choices == FAMILIES["qwen3"].choices


def test_the_dry_run_prints_the_published_number(capsys: pytest.CaptureFixture[str]):
    [command] = [line for line in COMMANDS if line.startswith("python train.py ")]
    assert train([*shlex.split(command)[2:], "--devices", "1"]) == 0
    assert "parameters 596,049,920 (" in " ".join(capsys.readouterr().out.split())


def test_the_names_of_other_tools_lead_to_ours(capsys: pytest.CaptureFixture[str]):
    assert train(["models/qwen3_0b6", "model.hidden_size=1024"]) == 2
    assert "model.d_model" in capsys.readouterr().err


def test_what_the_page_names_exists():
    for path in re.findall(r"`((?:maxtext|tests|configs|docs)/[\w./]*)`", PAGE):
        assert (ROOT / path).exists(), path
    code = (ROOT / "maxtext/convert/families.py").read_text() + (ROOT / "maxtext/convert/config_json.py").read_text()
    for name in re.findall(r"(?m)^- `(\w+)`", PAGE):
        assert re.search(rf"\b{name}\b", code), name
