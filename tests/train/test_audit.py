"""The audit: from the files alone, which updates trained on what they should not have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxtext.cli import main
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.pipeline import make_batches
from maxtext.data.reader import InstanceReader
from maxtext.data.tokens import resolve
from maxtext.train import loop
from maxtext.train.loop import train
from tests.runs import Runs, some_devices
from tests.train.test_guard import poison

pytestmark = pytest.mark.one_pass
OPTIONS = ("train.steps=12", "checkpoint.every=4", "eval.every=null", "log.report=false", "guard.skips_in_a_row=1")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Config:
    """A run of 12 updates whose checkpoints are good."""
    cfg = Runs(tmp_path_factory.mktemp("audit"), prepared_text).config("run", *OPTIONS)
    train(cfg, devices=some_devices(1))
    return cfg


def audit(folder: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["data", "audit", str(folder)])
    return code, capsys.readouterr().out.splitlines()


def relogged(cfg: Config, folder: Path, change: Callable[[dict[int, int]], dict[int, int]]) -> Path:
    """A copy of the run whose updates have logged other fingerprints."""
    shutil.copytree(cfg.run_dir, folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = change({r["step"]: r["data/fingerprint"] for r in records if "data/fingerprint" in r})
    for record in records:
        if record["step"] in found:
            record["data/fingerprint"] = found[record["step"]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_good_run(done: Config, capsys: pytest.CaptureFixture[str]):
    assert audit(done.run_dir, capsys) == (
        0, [f"{done.run_dir}: 12 updates, each trained on its own batch, and on nothing held out"])


@pytest.mark.parametrize(("change", "lines"), [
    # A resume that repeats a batch and shifts all later ones, as a loader that is one behind does.
    (lambda f: f | {step: f[step - 1] for step in range(9, 13)},
     ["updates 9 to 12 trained on the batch of updates 8 to 11: repeated",
      "the batch of update 12 was trained on by no update: skipped"]),
    (lambda f: f | {5: f[6], 6: f[5]},
     ["update 5 trained on the batch of update 6", "update 6 trained on the batch of update 5: repeated"]),
    (lambda f: f | {7: f[7] ^ 1}, [
        "update 7 trained on a batch that is none of this run's: its files, or how they are cut, have changed",
        "the batch of update 7 was trained on by no update: skipped"]),
])
def test_wrong_batches_are_named(done: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, lines):
    assert audit(relogged(done, tmp_path / "run", change), capsys) == (1, lines)


def test_a_loader_that_skips_in_the_real_loop(runs: Runs, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]):
    """After a resume the position is one batch too far."""
    cfg = runs.config("run", *OPTIONS, "train.steps=4")
    train(cfg, devices=some_devices(1))
    with monkeypatch.context() as patch:
        def ahead(*arguments):
            batches = make_batches(*arguments)
            set_state = batches.set_state
            batches.set_state = lambda state: set_state(state | {"step": state["step"] + 1})
            return batches

        patch.setattr(loop, "make_batches", ahead)
        train(runs.config("run", *OPTIONS, "train.steps=8"), devices=some_devices(1))
    code, lines = audit(cfg.run_dir, capsys)
    assert (code, lines) == (1, ["updates 5 to 8 trained on the batch of updates 6 to 9",
                                 "the batch of update 5 was trained on by no update: skipped"])


def test_batches_that_the_journal_passed_over_are_no_finding(runs: Runs, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]):
    cfg = runs.config("run", *OPTIONS)
    with monkeypatch.context() as patch:
        poison(patch, {6, 7})
        train(cfg, devices=some_devices(1))
    assert audit(cfg.run_dir, capsys)[0] == 0
    Path(cfg.run_dir, "journal.jsonl").unlink()
    code, lines = audit(cfg.run_dir, capsys)
    assert (code, lines[0]) == (1, "updates 6 to 12 trained on the batch of updates 8 to 14")


def test_instances_that_were_left_out_are_no_finding(runs: Runs, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]):
    """They could not be read then, and can be now."""
    cfg = runs.config("run", *OPTIONS, "data.bad_instances=0.1")
    batches = make_batches(cfg, resolve(cfg))
    bad = batches.instance_ids(5)[3]
    batches.close()
    read = InstanceReader.read

    def broken(self, ids):
        if bad in ids:
            raise DataError("the store is down")
        return read(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(InstanceReader, "read", broken)
        train(cfg, devices=some_devices(1))
    assert audit(cfg.run_dir, capsys)[0] == 0
    Path(cfg.run_dir, "journal.jsonl").unlink()
    code, lines = audit(cfg.run_dir, capsys)
    assert code == 1
    assert lines[0].startswith("update 5 trained on a batch that is none of this run's")


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_held_out_documents_that_were_trained_on(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 packing: str):
    """Two held-out documents stand in the training data; one of them only where no update has been yet."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(3, 384, rng.integers(20, 32)), 1) for _ in range(200)]
    train_file, held = tmp_path / "train.npy", tmp_path / "held.npy"
    np.concatenate(documents).astype(np.uint16).tofile(train_file)
    endless = tmp_path / "endless.npy"  # a piece of one text that is longer than a file
    rng.integers(3, 384, 100).astype(np.uint16).tofile(endless)
    files = f"{train_file},{endless}" if packing == "chunk" else f"{train_file}"  # it holds no whole document to pack
    cfg = runs.config("run", *OPTIONS, "train.steps=4", "data.prepared=null", "data.vocab_size=384", "data.eos_id=1",
                      "data.pad_id=2", f"data.sources.all.paths=[{files}]", f"data.packing={packing}",
                      f"eval.sets.held.paths=[{held}]")
    other = np.append(rng.integers(3, 384, 30), 1)
    np.concatenate([other, documents[0]]).astype(np.uint16).tofile(held)
    batches = make_batches(cfg, resolve(cfg))
    seen = {int(i) for step in range(1, 5) for i in batches.instance_ids(step)}
    starts = np.cumsum([0, *map(len, documents)])
    ranges = [(start, start + length) for i in seen for path, start, length in batches._reader.pieces(i)
              if path == str(train_file)]
    touched = [any(a < starts[d + 1] and starts[d] < b for a, b in ranges) for d in range(len(documents))]
    inside, outside = touched.index(True), touched.index(False)
    np.concatenate([other, documents[inside], documents[outside]]).astype(np.uint16).tofile(held)
    batches.close()
    train(cfg, devices=some_devices(1))
    assert audit(cfg.run_dir, capsys) == (1, [
        f"document 2 of the held-out set held was trained on: it stands in {train_file} at token {starts[inside]}"])


def test_what_cannot_be_audited_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path} holds no file config.yml; give the folder of a run")
