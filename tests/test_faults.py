"""The fault campaign in short: its rows pass, and fail without the guard that they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fault_ground import Row, Trial
from benchmarks.fault_results import MARKS, Results, table
from benchmarks.measured_page import write_page
from tests.runs import ROOT, environment

FAULTS = ROOT / "benchmarks" / "faults.py"


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FAULTS), *arguments], env=environment(4), cwd=ROOT, text=True,
                          capture_output=True, timeout=600)


@pytest.mark.one_pass
def test_the_short_campaign(tmp_path: Path):
    done = campaign("--trials", "1", "--seed", "3", "--only", "kill in save", "bit flip", "bit flip in memory",
                    "take-over", "bad stretch", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "5 of 5 trials passed, seed 3"
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[1:-1]] == [
        "kill in save", "bit flip", "bit flip in memory", "take-over", "bad stretch"]
    assert (tmp_path / "results.json").read_text().count('"passed": 1') == 5


@pytest.mark.one_pass
def test_rows_fail_without_their_guards():
    done = campaign("--trials", "1", "--without", "fingerprints")
    assert done.returncode == 1
    assert "bad memory" in done.stdout
    assert "0 of 1 trials passed, seed 0, without fingerprints" in done.stdout
    done = campaign("--trials", "8", "--without", "block hashes", "--only", "bit flip in memory")
    assert done.returncode == 1
    assert "its bits WRONG" in done.stdout


def test_a_guard_that_does_not_exist_is_refused():
    done = campaign("--without", "nothing")
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


# ---- results


ONE_RUN = {"trials": 10, "passed": 9, "recoveries": [1.0, 3.0], "lost": 4, "seconds": 5.0, "failures": ["0: why"]}
ROWS = (Row("kill", "SIGKILL", (), lambda trial: None, 25, 10), Row("other", "never", (), lambda trial: None))


def test_a_campaign_goes_on_from_its_file(tmp_path: Path):
    path = tmp_path / "faults.json"
    results = Results(7, path)
    assert results.missing(ROWS[0], 25) == [(0, 10), (1, 10), (2, 5)]
    trial = Trial(None, "kill_1", "", 10, ["it did not"], [2.5], 3)  # type: ignore[arg-type]
    results.add("kill", 1, trial, 4.0)
    again = Results(7, path)
    assert again.missing(ROWS[0], 25) == [(0, 10), (2, 5)]
    assert again.runs("kill")["1"] == {"trials": 10, "passed": 9, "recoveries": [2.5], "lost": 3, "seconds": 4.0,
                                       "failures": ["it did not"]}
    with pytest.raises(ValueError, match="holds results of seed 7, not 8: give another --json FILE"):
        Results(8, path)


def test_the_table_adds_up_what_was_measured(tmp_path: Path):
    kept = {"seed": 7, "python": "3.11", "jax": "1", "date": "2026-01-02",
            "rows": {"kill": {"0": ONE_RUN, "1": ONE_RUN | {"passed": 10, "recoveries": [2.0], "lost": 2}}}}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_page(page, MARKS, table(kept, ROWS))
    lines = page.read_text().splitlines()
    assert lines[3] == "Seed 7, 2026-01-02, Python 3.11, jax 1: 19 of 20 trials passed."
    assert lines[7] == "| kill | SIGKILL | 20 | 19 | 2.0 | 3.0 | 4 |"
    assert (lines[0], lines[-1], "old" in lines, len(lines)) == ("before", "after", False, 11)
