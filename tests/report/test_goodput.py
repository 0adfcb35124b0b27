"""Goodput: each second of a run is counted once, whatever happened to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from maxtext.report.goodput import goodput, section
from maxtext.report.page import render
from maxtext.report.run_files import RunFiles, read_events, read_run
from maxtext.train.loop import Outcome, train
from tests.runs import Runs, command, environment, lines, some_devices, when_written


def update(step: int, time: float, seconds: float, wait: float = 0.0, skipped: int = 0) -> dict:
    return {"step": step, "time/unix (s)": time, "time/step (s)": seconds, "optim/step skipped": skipped,
            "throughput/device/data loading (s)": wait}


def test_an_account_by_hand():
    """An attempt of 100 s that is killed, 50 s of nothing, and one of 60 s that ends well."""
    events = [
        {"time": 1000, "event": "begin"}, {"time": 1020, "event": "compile", "seconds": 10.0},
        {"time": 1020, "event": "init", "seconds": 10.0}, {"time": 1060, "event": "checkpoint", "seconds": 2.0},
        {"time": 1150, "event": "begin"}, {"time": 1155, "event": "restore", "seconds": 3.0},
        {"time": 1155, "event": "lost", "updates": 4, "seconds": 38.0, "step": 4, "until": 1100.0},
        {"time": 1160, "event": "compile", "seconds": 4.0}, {"time": 1160, "event": "init", "seconds": 3.0},
        {"time": 1200, "event": "eval", "seconds": 5.0},
        {"time": 1205, "event": "profile", "seconds": 7.0}, {"time": 1210, "event": "stop", "why": "complete"},
    ]
    records = [update(step, 1020 + 10 * step, 10.0, wait=1.0) for step in range(1, 5)]
    records += [update(5, 1180, 20.0), update(6, 1205, 25.0, skipped=1)]
    found = goodput(RunFiles("run", records, "", {}, events=events))
    assert found is not None
    assert found.seconds == {"productive": 56.0, "data": 4.0, "start-up": 13.0, "compile": 14.0, "restore": 3.0,
                             "save": 2.0, "evaluation": 5.0, "checks": 7.0, "lost": 63.0, "idle": 43.0}
    assert found.total == 210
    assert (found.attempts, found.lost_updates) == (2, 5)
    assert found.failures == ["ended without a word (killed, or the machine went down)"]
    assert found.recoveries == [60.0]


def test_a_run_without_a_ledger_has_no_account():
    assert goodput(RunFiles("run", [update(1, 10, 1.0)], "", {})) is None
    assert section(RunFiles("run", [update(1, 10, 1.0)], "", {})) == ""


@pytest.mark.one_pass
def test_the_account_of_a_killed_run(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """Killed after update 5 with a checkpoint of 4; then stopped by a signal; then complete."""
    options = ("train.steps=12", "checkpoint.every=4", "eval.every=6", "log.report=false")
    killed = subprocess.run(command("written", "5", *runs.arguments("run", *options),
                                    script="tests/end_to_end/killed.py"), env=environment(1), timeout=120)
    assert killed.returncode == -signal.SIGKILL
    cfg = runs.config("run", *options)
    with monkeypatch.context() as patch:
        when_written(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(cfg, devices=some_devices(1)).stopped_by == "SIGTERM"
    assert train(cfg, devices=some_devices(1)) == Outcome(12)
    run = read_run(cfg.run_dir)
    assert [event["event"] for event in run.events].count("begin") == 3
    found = goodput(run)
    assert found is not None
    assert (found.attempts, found.lost_updates, len(found.failures), len(found.recoveries)) == (3, 1, 1, 1)
    assert all(found.seconds[name] > 0 for name in ("productive", "compile", "restore", "save", "evaluation", "lost"))
    wall = run.events[-1]["time"] - run.events[0]["time"]
    assert found.total == pytest.approx(wall, rel=0.05)
    assert found.seconds["productive"] + found.seconds["data"] == pytest.approx(
        sum(line["time/step (s)"] for line in lines(cfg) if line["step"]), rel=1e-3)
    page = render(run)
    assert "<h2>Goodput</h2>" in page
    assert "3 attempts, 1 failures, 1 updates done again or skipped" in page


def test_a_ledger_with_torn_lines_is_read(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"time": 1.0, "event": "begin"}) + '\n{"time": 2.0, "ev\n{"time": 3, "event": "stop"}\n')
    assert [event["event"] for event in read_events(str(path))] == ["begin", "stop"]
