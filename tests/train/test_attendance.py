"""The loop's one seam: what it does for an attendance that remembers states, and for one that sends it away."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Restored
from maxtext.train.attendance import Attendance, MembersChanged
from maxtext.train.loop import Outcome, train
from tests.runs import lines, reproducible, saved_bits, saved_steps, some_devices

SHORT = ("train.steps=8", "eval.every=null", "checkpoint.every=4", "checkpoint.asynchronous=false", "log.report=false",
         "log.tensorboard=false")


class Remembering(Attendance):
    """Keeps the state after one update, and gives it back."""

    def __init__(self, step: int) -> None:
        self.at, self.kept = step, None

    def snapshot_due(self, cfg: Any, step: int) -> bool:
        return step == self.at

    def snapshot(self, step: int, state: Any, extra: dict[str, Any], wait: bool) -> bool:
        self.kept = (step, jax.tree.map(np.array, state), extra)
        return True

    def restore(self, abstract_state: Any, newer_than: int) -> Restored | None:
        if self.kept is None or self.kept[0] < newer_than:
            return None
        step, state, extra = self.kept
        return Restored(step, jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, abstract_state), extra,
                        "")


@pytest.mark.parametrize("step", [4, 8])
def test_a_save_that_a_fault_kept_from_the_disk_is_made_up_for(runs, step):
    """The state is in memory, and its checkpoint is not there: after the last update nobody else would save it."""
    cfg, memory = runs.config("run", *SHORT), Remembering(step)
    train(cfg, devices=some_devices(2), attendance=memory)
    expected, record = saved_bits(cfg, step), reproducible(lines(cfg))
    shutil.rmtree(Path(cfg.run_dir) / "checkpoints")
    assert train(cfg, devices=some_devices(2), attendance=memory) == Outcome(8)
    assert saved_steps(cfg) == sorted({step, 8})
    assert saved_bits(cfg, step) == expected
    assert reproducible(lines(cfg)) == record


def test_what_memory_has_is_not_saved_twice(runs):
    cfg, memory = runs.config("run", *SHORT), Remembering(4)
    train(cfg, devices=some_devices(2), attendance=memory)
    shutil.rmtree(Path(cfg.run_dir) / "checkpoints" / "step_00000008")
    before = (Path(cfg.run_dir) / "checkpoints" / "step_00000004" / "manifest.json").stat().st_mtime_ns
    assert train(cfg, devices=some_devices(2), attendance=memory) == Outcome(8)
    assert (Path(cfg.run_dir) / "checkpoints" / "step_00000004" / "manifest.json").stat().st_mtime_ns == before


def test_an_attempt_that_is_sent_away_writes_nothing_more(runs):
    """At any of its looks, the first to the last."""

    class SentAway(Attendance):
        looks = 0

        def check(self) -> None:
            self.looks += 1
            if self.looks > 9:
                self.written = len(lines(cfg))
                raise MembersChanged

    cfg, away = runs.config("run", *SHORT), SentAway()
    with pytest.raises(MembersChanged):
        train(cfg, devices=some_devices(2), attendance=away)
    assert len(lines(cfg)) == away.written
    assert train(cfg, devices=some_devices(2)) == Outcome(8)
    assert [line["step"] for line in lines(cfg)] == list(range(9))
