"""Bad instances: left out of the loss, written down, the same on every mesh and in every continuation, in a budget."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.data import DataError
from maxtext.data.journal import Journal
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve
from tests.data.test_pipeline import mesh_sharding

T, N = 16, 40
BAD = {3, 17, 37, 38, 39}
PAD = 1


@pytest.fixture
def files(write_tokens):
    """Two files of 20 instances each."""
    rng = np.random.default_rng(0)
    return [write_tokens(name, rng.integers(2, 1000, T * 20)) for name in ("a.npy", "b.npy")]


def spoil(files: list[str]) -> None:
    """Ids outside the vocabulary in two instances of the first, and the end of the second is gone."""
    tokens = np.fromfile(files[0], np.uint16)
    tokens[3 * T + 5] = 1000
    tokens[17 * T] = 65535
    tokens.tofile(files[0])
    os.truncate(files[1], 2 * T * 17)  # instances 37 to 39


@pytest.fixture
def open_batches(make_config, files, tmp_path):
    """Returns f(sharding, run folder, budget, **data) -> batches of 8 of the spoilt files, journaled in the folder."""
    opened, resolved = [], []

    def make(sharding=None, run="run", bad=5, **data):
        cfg = make_config({"x": files}, batch=8, steps=100, bad_instances=bad / 800, **data)
        (tmp_path / run).mkdir(exist_ok=True)
        if not resolved:  # once: the look at all files before a run would refuse the spoilt ones
            resolved.append(resolve(cfg))
            spoil(files)
        opened.append(make_batches(cfg, resolved[0], sharding, Journal(str(tmp_path / run))))
        return opened[-1]

    yield make
    for batches in opened:
        batches.close()


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def epoch(batches) -> dict[int, tuple[list[int], float]]:
    """Tokens and sum of weights of each instance of an epoch of 5 batches."""
    seen = {}
    for step in range(1, 6):
        batch = next(batches)
        for row, instance in enumerate(batches.instance_ids(step).tolist()):
            seen[instance] = np.asarray(batch.tokens_BT)[row].tolist(), float(np.asarray(batch.weights_BT)[row].sum())
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_instances_are_left_out_and_written_down(open_batches, files, tmp_path, workers: int):
    seen = epoch(open_batches(workers=workers))
    assert {instance for instance, (_, weight) in seen.items() if weight == 0} == BAD
    assert all(seen[instance][0] == [PAD] * T for instance in BAD)
    good = np.fromfile(files[0], np.uint16).reshape(-1, T)
    assert all(seen[instance] == (good[instance].tolist(), T - 1) for instance in range(20) if instance not in BAD)
    found = {entry["instance"]: entry["why"] for entry in entries(tmp_path / "run")}
    assert found.keys() == BAD
    assert f"{files[0]}: id 1000 at byte offset {2 * (3 * T + 5)}" in found[3]
    assert files[1] in found[38]


def test_every_mesh_leaves_out_the_same(open_batches, tmp_path):
    plain = epoch(open_batches(run="one"))
    for number, shape in enumerate([(1, 8, 1), (2, 2, 2), (8, 1, 1)]):
        assert epoch(open_batches(mesh_sharding(*shape), run=f"mesh{number}")) == plain
        assert entries(tmp_path / f"mesh{number}") == entries(tmp_path / "one")


def test_a_decision_stands_when_the_file_is_mended(open_batches, files, tmp_path):
    """Else a run and its continuation would train on different data."""
    whole = epoch(open_batches())
    rng = np.random.default_rng(0)
    for path in files:
        rng.integers(2, 1000, T * 20).astype(np.uint16).tofile(path)
    assert epoch(open_batches()) == whole
    state = open_batches().get_state()
    assert set(state["masked"]) == {str(instance) for instance in BAD}
    (tmp_path / "run" / "journal.jsonl").unlink()
    batches = open_batches()
    assert batches.journal.masked == {}
    batches.set_state(state | {"step": 0})  # the checkpoint knows them too
    assert epoch(batches) == whole


def test_one_more_than_the_budget_ends_the_run(open_batches):
    batches = open_batches(bad=4)
    with pytest.raises(DataError, match=r"\.npy.* It would be the 5th bad instance, but only 4 may be left out "
                       r"\(data.bad_instances 0.005 of 800\); mend the file"):
        epoch(batches)


def test_packed_instances_and_documents(make_config, write_tokens, tmp_path):
    """A bad row has no effect through its segments or padding either."""
    tokens = np.random.default_rng(1).integers(2, 1000, 600)
    tokens[::11] = 0
    path = write_tokens("p.npy", tokens)
    cfg = make_config({"x": [path]}, batch=8, steps=100, bad_instances=1 / 800, packing="best_fit",
                      document_masking=True)
    resolved = resolve(cfg)
    batches = make_batches(cfg, resolved)
    ids = batches.instance_ids(1)
    batch = next(batches)
    batches.close()
    first = batch.tokens_BT[2, :3].tolist()
    where = next(i for i in range(len(tokens) - 2) if tokens[i:i + 3].tolist() == first)
    tokens[where] = 1000
    tokens.astype(np.uint16).tofile(path)
    again = make_batches(cfg, resolved)
    masked = next(again)
    again.close()
    assert list(again.journal.masked) == [int(ids[2])]
    assert (masked.weights_BT[2].sum(), masked.segments_BT[2].tolist(), masked.real_B[2]) == (0, [0] * T, 1)
    others = [row for row in range(8) if row != 2]
    for name in ("tokens_BT", "targets_BT", "weights_BT", "segments_BT", "real_B"):
        assert np.array_equal(getattr(masked, name)[others], getattr(batch, name)[others])
    assert jax.tree.structure(masked) == jax.tree.structure(batch)
