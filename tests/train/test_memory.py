"""A plain run that keeps snapshots in memory goes on from them when its process died, if they are its own and whole."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import jax
import pytest

from benchmarks.fault_injection import flip_bit
from maxtext.checkpoint import tiers
from maxtext.checkpoint.tiers import memory_folder, memory_prefix
from maxtext.train.loop import train
from maxtext.train.metrics import MetricsWriter
from maxtext.train.resume import ResumeError
from tests.runs import Runs, lines, saved_bits

COMMON = ("eval.every=null", "log.tensorboard=false", "log.report=false", "schedule.total_steps=40", "mesh.fsdp=2",
          "checkpoint.every=4", "checkpoint.snapshot_every=3", "train.steps=12")
DEVICES = jax.devices()[:2]


class Died(BaseException):
    """In place of a death of the process: nothing is saved, and what is in memory stays."""


def die(runs: Runs, monkeypatch: pytest.MonkeyPatch, at: int, *overrides: str) -> Path:
    """A run that dies when the metrics of an update are to be written; its folder in memory."""
    cfg = runs.config("run", *COMMON, "checkpoint.snapshots=true", *overrides)
    with monkeypatch.context() as patch:
        write = MetricsWriter.write

        def fatal(self, step, scalars):
            if step == at:
                raise Died
            write(self, step, scalars)

        patch.setattr(MetricsWriter, "write", fatal)
        with pytest.raises(Died):
            train(cfg, devices=DEVICES)
    [root] = Path(memory_folder()).glob(f"{memory_prefix(cfg.run_dir)}*")
    return root


def went_on(runs: Runs, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Starts the run again and returns what it says; its bits are those of a run that nothing befell."""
    capsys.readouterr()
    cfg = runs.config("run", *COMMON, "checkpoint.snapshots=true", *overrides)
    train(cfg, devices=DEVICES)
    said = capsys.readouterr()
    straight = runs.config("straight", *COMMON)
    train(straight, devices=DEVICES)
    assert saved_bits(cfg, 12) == saved_bits(straight, 12)
    assert [line["step"] for line in lines(cfg)] == list(range(13))
    assert [line.get("train/CE loss") for line in lines(cfg)] == [line.get("train/CE loss") for line in lines(straight)]
    assert not list(Path(memory_folder()).glob(f"{memory_prefix(cfg.run_dir)}*")), "they go with a run that has ended"
    return said.out + said.err


def test_the_newest_of_memory_and_disk_is_taken(runs: Runs, monkeypatch, capsys):
    die(runs, monkeypatch, 7)
    assert "from update 6 of 12" in went_on(runs, capsys), "the snapshot of 6, not the checkpoint of 4"


def test_a_damaged_snapshot_is_named_and_the_disk_taken(runs: Runs, monkeypatch, capsys):
    root = die(runs, monkeypatch, 7)
    for slot in root.glob("*/*.slot"):
        flip_bit(str(slot), 0.5, 3)
    said = went_on(runs, capsys)
    assert "from update 4 of 12" in said
    assert "are not those that were written" in said


def test_a_snapshot_under_way_does_not_outlive_the_run(runs: Runs, monkeypatch, capsys):
    write = tiers.write_slot

    def slow(*given):
        time.sleep(1.5)
        write(*given)

    monkeypatch.setattr(tiers, "write_slot", slow)
    cfg = runs.config("run", *COMMON, "checkpoint.snapshots=true", "checkpoint.snapshot_every=11")
    train(cfg, devices=DEVICES)
    for thread in threading.enumerate():
        if thread.name.startswith("snapshot "):
            thread.join()
    assert not list(Path(memory_folder()).glob(f"{memory_prefix(cfg.run_dir)}*"))
    assert "no snapshot" not in capsys.readouterr().err


def test_a_run_that_was_removed_and_begun_anew_finds_none(runs: Runs, monkeypatch, capsys):
    die(runs, monkeypatch, 7)
    shutil.rmtree(runs.directory("run"))
    said = went_on(runs, capsys)
    assert "resuming" not in said
    assert "is of another run" in said


def test_another_config_is_refused_by_what_the_snapshot_was_made_with(runs: Runs, monkeypatch):
    root = die(runs, monkeypatch, 4, "checkpoint.every=null")  # before anything is on the disk
    with pytest.raises(ResumeError, match=r"data\.seed: .* when update 3 was saved"):
        train(runs.config("run", *COMMON, "checkpoint.snapshots=true", "data.seed=5"), devices=DEVICES)
    shutil.rmtree(root)
