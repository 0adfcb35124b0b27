"""The watchdog: a phase that hangs ends the run with all stacks and a code for schedulers, a slow one does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from maxtext.config.guards import WatchdogConfig
from maxtext.report.run_files import read_events
from maxtext.train import loop, watchdog
from maxtext.train.clock import Phases
from maxtext.train.ledger import Ledger
from maxtext.train.watchdog import Watchdog
from tests.runs import Runs, run_child, saved_steps, some_devices

OPTIONS = ("train.steps=4", "checkpoint.every=2", "eval.every=2", "checkpoint.asynchronous=false", "log.report=false")
PHASES = ("init", "compile", "data", "step", "save", "restore", "eval")


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes that the watchdog would have ended the process with."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    return codes


def limits(seconds: float) -> WatchdogConfig:
    return WatchdogConfig(**{f"{phase}_seconds": seconds for phase in PHASES})


@pytest.mark.parametrize("phase", ["data", "checkpoint", "samples"])
def test_a_phase_that_hangs_is_named_and_one_that_is_slow_is_not(tmp_path: Path, given_up: list[int], phase: str,
                                                                capsys: pytest.CaptureFixture[str]):
    phases = Phases(Ledger(None))
    with Watchdog(limits(0.4), str(tmp_path), phases, Ledger(None)):
        for update in range(1, 6):
            phases.progress(update)
            with phases(phase):
                time.sleep(0.2)  # half of the limit
        assert given_up == []
        with phases(phase):
            deadline = time.monotonic() + 5
            while not given_up and time.monotonic() < deadline:
                time.sleep(0.02)
    assert given_up[0] == 75
    setting = {"checkpoint": "save", "samples": "eval"}.get(phase, phase)
    assert (f"training stopped: stuck in phase {phase} after update 5, for more than 0.4 s "
            f"(watchdog.{setting}_seconds); the stacks of all threads are in "
            f"{tmp_path}/stuck_in_{phase}.txt") in capsys.readouterr().err
    text = (tmp_path / f"stuck_in_{phase}.txt").read_text()
    assert "test_a_phase_that_hangs" in text
    assert text.count("hread 0x") >= 2


def test_a_process_that_was_stopped_for_a_while_is_not_taken_for_stuck(tmp_path: Path, given_up: list[int],
                                                                      monkeypatch: pytest.MonkeyPatch):
    """Nor one whose monotonic clock jumps: an hour passes between two ticks."""
    ahead, clock = [0.0], time.monotonic
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + ahead[0])
    phases = Phases(Ledger(None))
    with Watchdog(limits(2.0), str(tmp_path), phases, Ledger(None)), phases("data"):
        time.sleep(0.3)
        ahead[0] = 3600.0
        time.sleep(0.5)
    assert given_up == []


@pytest.mark.one_pass
@pytest.mark.parametrize("phase", ["data"])
def test_a_run_that_hangs_exits_75_and_goes_on_when_started_again(runs: Runs, phase: str):
    arguments = runs.arguments("run", *OPTIONS, f"watchdog.{phase}_seconds=3")
    child = run_child(phase, "600", *arguments, script="tests/end_to_end/stuck.py", devices=1)
    assert child.returncode == 75, child.stderr
    assert f"training stopped: stuck in phase {phase} after update 2, for more than 3 s" in child.stderr
    directory = runs.directory()
    assert "dawdle_here" in (directory / f"stuck_in_{phase}.txt").read_text()
    assert [event["why"] for event in read_events(str(directory / "events.jsonl")) if event["event"] == "failure"] == [
        f"stuck in {phase}"]
    child = run_child(*arguments, devices=1)
    assert child.returncode == 0, child.stderr
    assert saved_steps(runs.config("run", *OPTIONS)) == [2, 4]


def test_every_phase_of_a_run_is_seen(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """By what is asked for its limit while the phase takes long."""
    asked: set[str] = set()
    monkeypatch.setattr(watchdog, "_TICK_SECONDS", 0.005)
    limit = Watchdog._limit

    def noted(self: Any, phase: str) -> float:
        asked.add(self._phases.name)
        return limit(self, phase)

    def slow(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            time.sleep(0.05)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, wrapped)

    monkeypatch.setattr(Watchdog, "_limit", noted)
    for owner, name in ((loop, "check_new_run"), (loop, "compile_train_step"), (loop.Attendance, "fetch"),
                        (loop.Checkpoints, "save"), (loop.Checkpoints, "restore"), (loop.Evaluations, "__call__")):
        slow(owner, name)
    monkeypatch.setattr("maxtext.data.pipeline.Batches._without_bad", lambda self, rows, ids: (
        time.sleep(0.05), (rows, None))[1])
    loop.train(runs.config("run", *OPTIONS), devices=some_devices(1))
    assert asked >= {"init", "compile", "data", "step", "checkpoint", "restore", "eval"}
