"""The fault campaign in short: its rows pass, and fail without the guard that they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

FAULTS = ROOT / "benchmarks" / "faults.py"


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FAULTS), *arguments], env=environment(4), cwd=ROOT, text=True,
                          capture_output=True, timeout=600)


@pytest.mark.one_pass
def test_the_short_campaign(tmp_path: Path):
    done = campaign("--trials", "1", "--seed", "3", "--only", "kill in save", "bit flip", "take-over", "bad stretch",
                    "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "4 of 4 trials passed, seed 3"
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:-1]] == [
        "kill in save", "bit flip", "take-over", "bad stretch"]
    assert (tmp_path / "results.json").read_text().count('"passed": 1') == 4


@pytest.mark.one_pass
def test_a_row_fails_without_its_guard():
    done = campaign("--trials", "1", "--without", "fingerprints")
    assert done.returncode == 1
    assert "bad memory" in done.stdout
    assert "0 of 1 trials passed, seed 0, without fingerprints" in done.stdout


def test_a_guard_that_does_not_exist_is_refused():
    done = campaign("--without", "nothing")
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr
