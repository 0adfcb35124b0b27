"""Saves that fail: training goes on, they are tried again, and a run that cannot save for long stops."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

import pytest

from maxtext.checkpoint import arrays, manager
from maxtext.checkpoint.manager import CheckpointError
from maxtext.train.loop import Outcome, TrainingError, train
from tests.runs import Runs, lines, saved_steps, some_devices, when_written

ONE = some_devices(1)


def full(self: Any, path: str, arrays: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_failed_save_is_tried_again_before_the_next_is_due(runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(manager, "_RETRY_SECONDS", (0.0, 0.0))
    cfg = runs.config("run", "train.steps=12", "checkpoint.every=5", "eval.every=null")
    with monkeypatch.context() as patch:
        patch.setattr(arrays.Orbax, "start", full)
        when_written(monkeypatch, 6, patch.undo)
        assert train(cfg, devices=ONE) == Outcome(12)
    assert saved_steps(cfg) == [7, 10, 12]
    assert "step 5 was not saved to" in caplog.text
    assert "No space left on device" in caplog.text
    assert [line["step"] for line in lines(cfg)] == list(range(13))


def test_a_run_that_cannot_save_for_long_stops(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    cfg = runs.config("run", "train.steps=30", "checkpoint.every=2", "checkpoint.stale_seconds=1e-3", "eval.every=null")
    when_written(monkeypatch, 5, lambda: monkeypatch.setattr(arrays.Orbax, "start", full))
    with pytest.raises(TrainingError, match=r"nothing could be saved for \d+ s \(checkpoint.stale_seconds\); "
                       r"step 7 was not saved to .*No space left on device.*; earlier steps are as they were"):
        train(cfg, devices=ONE)
    assert saved_steps(cfg) == [2, 4]


def test_a_run_whose_checkpoints_are_gone_does_not_start_from_scratch(runs: Runs):
    cfg = runs.config("run", "train.steps=4", "checkpoint.every=2", "eval.every=null")
    train(cfg, devices=ONE)
    shutil.rmtree(f"{cfg.run_dir}/checkpoints")
    with pytest.raises(CheckpointError, match=r"it holds none at all, though step 4 was saved"):
        train(cfg, devices=ONE)
    fresh = runs.config("run", "train.steps=2", "eval.every=null", "checkpoint.allow_fresh=true")
    assert train(fresh, devices=ONE) == Outcome(2)
    assert saved_steps(cfg) == [2]
