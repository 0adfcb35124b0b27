"""The loop itself: what it waits for, compiles, counts and refuses."""

from __future__ import annotations

import ctypes
import gc
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.config.load import load
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.train import clock as clock_module
from maxtext.train import loop, stop
from maxtext.train.clock import Clock
from maxtext.train.console import host_memory_gib
from maxtext.train.loop import Outcome, TrainingError, train
from tests.runs import Runs, lines, reproducible, saved_bits, saved_steps, some_devices, when_written

ONE = some_devices(1)


class Late:
    """A metric on the device that notes when its value is asked for."""

    def __init__(self, value: jax.Array, note: Any) -> None:
        self._value, self._note = value, note

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._note()
        return np.asarray(self._value)


def change_step(monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    """Replaces the compiled step by `changed(compiled)`."""
    compile_train_step = loop.compile_train_step

    def lower(step: Any, *arguments: Any) -> Any:
        return SimpleNamespace(compile=lambda: changed(step.lower(*arguments).compile()))

    monkeypatch.setattr(loop, "compile_train_step", lambda cfg: SimpleNamespace(
        lower=lambda *arguments: lower(compile_train_step(cfg), *arguments)))


def test_metrics_are_read_after_the_next_update_is_dispatched(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """But for updates that are followed by a save (10), an evaluation (5, 10) or the end (12)."""
    events: list[tuple[str, int]] = []

    def watched(step: Any) -> Any:
        def dispatch(state: Any, batch: Any) -> Any:
            number = 1 + sum(kind == "dispatched" for kind, _ in events)
            events.append(("dispatched", number))
            state, metrics = step(state, batch)
            read = lambda: events.append(("read", number))  # noqa: E731
            return state, {name: Late(value, read) for name, value in metrics.items()}
        return dispatch

    change_step(monkeypatch, watched)
    assert train(runs.config("run", "train.steps=12", "eval.every=5"), devices=ONE) == Outcome(12)
    order = list(dict.fromkeys(events))
    assert [number for kind, number in order if kind == "read"] == list(range(1, 13))
    early = {number for kind, number in order if kind == "read"
             and ("dispatched", number + 1) not in order[:order.index(("read", number))]}
    assert early == {5, 10, 12}


def test_each_update_has_its_own_seconds_where_a_dispatch_computes(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """As on CPUs; an update that is read at once, before an evaluation, had nearly none, and the one before it two."""
    def slow(step: Any) -> Any:
        def dispatch(*arguments: Any) -> Any:
            time.sleep(0.1)
            return jax.block_until_ready(step(*arguments))
        return dispatch

    change_step(monkeypatch, slow)
    cfg = runs.config("run", "train.steps=8", "eval.every=3", "checkpoint.every=4")
    assert train(cfg, devices=ONE) == Outcome(8)
    seconds = [line["time/step (s)"] for line in lines(cfg) if "time/step (s)" in line]
    assert len(seconds) == 8
    assert min(seconds) >= 0.1, seconds


def test_the_step_compiles_once_a_process(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over epochs, evaluations, saves, and from a resume on; after the first of each nothing compiles any more."""
    compiled: list[str] = []
    until_6: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    tokens, ids = tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 384, (4 * 8, 32), np.uint16)
    ids[:, -1] = 1
    ids.tofile(tokens)  # an epoch of 4 updates
    options = ("data.prepared=null", "data.vocab_size=384", "data.eos_id=1", "data.pad_id=2",
               f"data.sources.all.paths=[{tokens}]", f"eval.sets.same.paths=[{tokens}]", "eval.every=3",
               "checkpoint.every=3")
    when_written(monkeypatch, 6, lambda: until_6.extend(compiled))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for steps in (12, 15):
            compiled.clear()
            assert train(runs.config("run", *options, f"train.steps={steps}"), devices=ONE) == Outcome(steps)
            assert [name for name in compiled if "step" in name] == ["jit(step)"]
            assert steps == 15 or compiled.count("jit(_replicated)") == 1, "the scorer"
            assert steps == 15 or compiled == until_6
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.one_pass
def test_host_memory_does_not_grow(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """Over 2,000 updates of the real loop with saves; the first hundred fill caches and pools.

    What the compiler freed is given back to the system before each measurement: it would hide a leak.
    """
    found: list[float] = []

    def measure() -> None:
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        found.append(host_memory_gib())

    for step in (100, 2000):
        when_written(monkeypatch, step, measure)
    cfg = runs.config("run", "train.steps=2000", "train.global_batch=1", "data.sequence_length=8", "model.d_model=8",
                      "model.n_heads=1", "model.d_ff=8", "model.n_layers=1", "model.layer_pattern=[full]",
                      "model.window=null", "eval.every=null", "checkpoint.every=500", "log.every=1000",
                      "guard.skips_in_a_row=2000", "guard.skips_per_1000=1000")
    assert train(cfg, devices=ONE) == Outcome(2000)
    before, after = found
    assert after < 1.05 * before


def test_a_run_on_a_cpu_keeps_the_memory_of_its_steps(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    kept: list[bool] = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: kept.append(True))
    assert train(runs.config("run", "train.steps=1"), devices=ONE) == Outcome(1)
    assert kept == [True]


def test_a_time_budget_stops_cleanly(runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ahead = 0.0

    def pass_time() -> None:
        nonlocal ahead
        ahead = 2000.0

    when_written(monkeypatch, 4, pass_time)  # update 5 is dispatched by then
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    cfg = runs.config("run", "train.steps=8", "train.max_seconds=1000")
    assert train(cfg, devices=ONE) == Outcome(5, "time budget of 1000 s (train.max_seconds)")
    assert ("stopped by time budget of 1000 s (train.max_seconds) after update 5 of 8; all is saved, and the same "
            "command continues from there") in capsys.readouterr().out
    assert saved_steps(cfg) == [5]
    ahead = 0.0
    assert train(cfg, devices=ONE) == Outcome(8)
    assert [record["step"] for record in lines(cfg)] == list(range(9))


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_gradient_that_is_not_finite_ends_the_run_unless_its_update_is_skipped(
        runs: Runs, monkeypatch: pytest.MonkeyPatch, skipped: int):
    """Its weights may be spoilt although the loss, which is of the weights before, looks well: they are not saved."""
    def spoil(step: Any) -> Any:
        def spoilt(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            if int(state.step) == 3:
                metrics |= {"grad_norm": np.float32(np.nan), "skipped": np.int32(skipped)}
            return state, metrics
        return spoilt

    change_step(monkeypatch, spoil)
    cfg = runs.config("run", "train.steps=6", "checkpoint.every=1", "eval.every=null")
    if skipped:
        assert train(cfg, devices=ONE) == Outcome(6)
    else:
        with pytest.raises(TrainingError, match=r"update 3 is not finite: loss 5\.\d+, grad norm nan"):
            train(cfg, devices=ONE)
        assert saved_steps(cfg) == [1, 2]


def test_a_token_outside_the_vocabulary_ends_the_run_before_it_is_trained_on(runs: Runs, tmp_path: Path):
    """In a part of a large file that the first look at it does not sample."""
    tokens = np.random.default_rng(0).integers(3, 384, 1 << 19).astype(np.uint16)
    bad = slice(20_000, 60_000)
    tokens[bad] = 384
    path = tmp_path / "tokens.npy"
    tokens.tofile(path)
    cfg = runs.config("run", "data.prepared=null", "data.vocab_size=384", "data.eos_id=1", "data.pad_id=2",
                      f"data.sources.all.paths=[{path}]", "eval.every=null")
    with pytest.raises(DataError, match=r"id 384 at byte offset (\d+) is not below vocab_size 384") as error:
        train(cfg, devices=ONE)
    offset = int(str(error.value).split("byte offset ")[1].split()[0])
    assert str(path) in str(error.value)
    assert bad.start <= offset / 2 < bad.stop
    assert saved_steps(cfg) == []
    for record in lines(cfg)[1:]:
        assert record["train/CE loss"] > 0


def test_a_run_without_a_checkpoint_starts_all_over(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """Its config may have changed, so that not even the line of update 0 can stay."""
    with monkeypatch.context() as patch:
        when_written(patch, 3, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(runs.config("run", "checkpoint.every=null", "seed=1"), devices=ONE)
    cfg = runs.config("run", "train.steps=2")
    assert [record["step"] for record in lines(cfg)] == [0, 1, 2, 3]
    fresh = runs.config("fresh", "train.steps=2")
    assert train(cfg, devices=ONE) == train(fresh, devices=ONE) == Outcome(2)
    assert reproducible(lines(cfg)) == reproducible(lines(fresh))


def test_save_at_start_keeps_the_initial_weights(runs: Runs):
    cfg: Config = runs.config("run", "train.steps=2", "checkpoint.save_at_start=true", "eval.every=null")
    assert train(cfg, devices=ONE) == Outcome(2)
    assert saved_steps(cfg) == [0, 2]
    assert not any(saved_bits(cfg, 0)["optimizer.mu.embed"][2])


def test_the_signal_handlers_of_the_caller_come_back(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """On a mesh that is chosen, which the start summary explains and the run's config leaves open."""
    before = [signal.getsignal(number) for number in stop.SIGNALS]
    cfg = runs.config("run", "train.steps=1", "eval.every=null", "mesh=auto")
    train(cfg, devices=ONE)
    assert [signal.getsignal(number) for number in stop.SIGNALS] == before
    assert re.search(r"mesh: auto +one device: about", capsys.readouterr().out)
    assert load(f"{cfg.run_dir}/config.yml").mesh.auto


def test_clock_counts_what_is_apart_only_there(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = Clock()
    now = 11.0
    with clock.apart("eval"):
        now = 13.0
    with clock.apart("checkpoint"):
        now = 13.5
    with clock.apart("eval"):
        now = 14.0
    now = 14.25
    assert clock.lap() == 1.25
    now = 15.0
    assert clock.lap("start") == 0.75
    now = 15.5
    assert clock.lap() == 0.5
    assert clock.take_apart() == {"time/eval (s)": 2.5, "time/checkpoint (s)": 0.5, "time/start (s)": 0.75}
    assert clock.take_apart() == {}
