"""The table of families in README.md is what the tests prove now."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from maxtext.cli import train
from tests.convert import table

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_readme_has_the_table_of_now():
    assert table.page(README) == README, "run python -m tests.convert.table"


def test_a_test_that_runs_over_fewer_models_is_no_proof():
    good = "@pytest.mark.parametrize('name', NAMES)\ndef test_x(name): pass"
    assert table.proved(good, "test_x") == table.NAMES
    for wrong in (good.replace("NAMES", "NAMES[:3]"), good.replace("test_x", "test_y"), "def test_x(): pass"):
        with pytest.raises(ValueError, match="test_x"):
            table.proved(wrong, "test_x")


def test_a_dry_run_of_the_readme_describes_a_run(capsys: pytest.CaptureFixture[str]):
    lines = README.replace("\\\n", "").splitlines()
    dry = [line for line in lines if re.match(r" +\S+python train.py \S.*--dry-run", line)]
    commands = [shlex.split(line, comments=True)[2:] for line in dry]
    assert len(commands) == 2
    for command in commands:
        assert train(command) == 0
        assert "parameters" in capsys.readouterr().out
