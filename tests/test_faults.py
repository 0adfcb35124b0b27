"""The fault campaign in short: its rows pass, and fail without the guard that they name."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.fault_ground import Failed, Ground, Row, Trial
from benchmarks.fault_results import KEPT, MARK, Results, table
from benchmarks.measured_page import RELIABILITY, write_page
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


def test_what_is_changed_in_a_process_is_there_to_be_changed():
    """A name that was given up would be set without a word, and its row prove less than it says."""
    done = subprocess.run([sys.executable, "-c", """if True:
        from benchmarks import fault_injection as here
        from benchmarks.faults import ROWS
        here.other_machine("other", 1.5)
        assert here.lease.this_machine() == "other"
        assert {guard for row in ROWS for guard in row.guards} == set(here.GUARDS)
        for switch_off in here.GUARDS.values():
            switch_off()
        try:
            here.instead(here.lease, "nothing", 1)
        except AttributeError:
            print("refused")
        """], env=environment(4), cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr


class Waiting:
    """A process as the ground starts them."""

    def __init__(self, *arguments: str) -> None:
        self._popen = subprocess.Popen([sys.executable, "-c", *arguments])
        self.pid, self.kill, self.exitcode = self._popen.pid, self._popen.kill, None

    def join(self, seconds: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.exitcode = self._popen.wait(seconds)


def test_a_process_hangs_by_its_own_seconds(tmp_path: Path):
    """One that sleeps hangs; one that computes does not, however long it takes, but not for ever."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").touch()
    ground, spin = Ground(tmp_path), "import time\nwhile time.process_time() < {}: pass"
    assert ground.end(Waiting(spin.format(1.5)), "run", 0.8).code == 0
    for program, why in (("import time; time.sleep(60)", "run hung for 0.8 s"),
                         (spin.format(60), "run came to no end in [34] s of CPU time")):
        process = Waiting(program)
        with pytest.raises(Failed, match=why):
            ground.end(process, "run", 0.8)
        assert process.exitcode == -signal.SIGKILL


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
    page.write_text(f"before\n<!-- {MARK} -->\nold\n<!-- faults: end -->\nafter\n")
    write_page(page, MARK, table(kept, ROWS))
    lines = page.read_text().splitlines()
    assert lines[3] == "Seed 7, 2026-01-02, Python 3.11, jax 1: 19 of 20 trials passed."
    assert lines[7] == "| kill | SIGKILL | 20 | 19 | 2.0 | 3.0 | 4 |"
    assert (lines[0], lines[-1], "old" in lines, len(lines)) == ("before", "after", False, 11)


def test_the_page_holds_what_the_file_holds(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(RELIABILITY.read_text())
    write_page(page, MARK, table(json.loads(KEPT.read_text()), faults.ROWS))
    assert page.read_text() == RELIABILITY.read_text(), "nothing is written there by hand"
