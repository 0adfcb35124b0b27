"""The log of gradients between two snapshots: what leads on from what, what is dropped, and what is damaged."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint import tiers
from maxtext.checkpoint.tiers import SnapshotId, Snapshots
from maxtext.checkpoint.tiers_log import Entries, GradientLog
from tests.checkpoint.states import host_bits, make_mesh
from tests.checkpoint.test_tiers import flip, state_on


def gradient_on(mesh, step):
    values = np.random.default_rng(step).standard_normal((16, 8)).astype(jax.numpy.bfloat16)
    return {"w": jax.device_put(values, NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))),
            "norm": jax.device_put(np.float32(step), NamedSharding(mesh, PartitionSpec()))}


def abstract_on(mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), gradient_on(mesh, 0))


class Worker:
    """One that takes snapshots and keeps gradients."""

    def __init__(self, root, generation=0, worker=0, peer=None, update="same", mesh=None):
        self.mesh, self.said, self.folder = mesh or make_mesh(2), [], root / f"worker_{worker}"
        self.snapshots = Snapshots(str(root), worker, "run", generation, peer, self.said.append)
        self.log = GradientLog(self.snapshots, update)

    def snapshot(self, step):
        self.snapshots.take(step, state_on(self.mesh, step), {})
        assert self.snapshots.wait(), self.said

    def keep(self, *steps):
        for step in steps:
            self.log.keep(step, gradient_on(self.mesh, step), {"record": step})
            self.log.wait()
        return self

    def goes_on_from(self, generation, step):
        self.log.stands_on = SnapshotId(generation, step, "run")
        return self

    def files(self):
        return sorted(path.name for path in self.folder.glob("*.gradient"))


def entries(root, told=None, update="same", mesh=None):
    told, abstract = [] if told is None else told, abstract_on(mesh or make_mesh(2))
    return Entries(str(root), "run", update, abstract, lambda topic, words: [words], told.append)


def led_to(root, generation=0, step=0, **how):
    return [(at.generation, at.step) for at, _, _ in entries(root, **how).read(SnapshotId(generation, step, "run"))]


@pytest.mark.parametrize("shape", [(4, 2), (1, 1)])
def test_entries_come_back_bit_for_bit_in_order_on_any_mesh(tmp_path, shape):
    Worker(tmp_path).keep(11, 12, 13)
    found = list(entries(tmp_path, mesh=make_mesh(*shape)).read(SnapshotId(0, 10, "run")))
    assert [(at.step, extra) for at, _, extra in found] == [(step, {"record": step}) for step in (11, 12, 13)]
    for at, gradient, _ in found:
        assert host_bits(gradient) == host_bits(gradient_on(make_mesh(1), at.step))
        assert gradient["w"].sharding.mesh.size == shape[0] * shape[1]
    assert entries(tmp_path).reach(SnapshotId(0, 10, "run")) == 13
    assert entries(tmp_path).reach(SnapshotId(0, 9, "run")) == 9


def test_only_what_follows_without_a_gap_is_done_again(tmp_path):
    Worker(tmp_path).keep(11, 12, 14)
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12)]
    assert led_to(tmp_path, step=9) == []
    assert led_to(tmp_path, generation=1, step=10) == [], "the state of another attempt is another one"


def test_an_attempt_goes_on_from_what_it_restored_and_the_newest_counts(tmp_path):
    """The first came to 13; the second restored 12 of it, since 13 was damaged then, and came to 13 itself."""
    Worker(tmp_path, generation=0).keep(11, 12, 13, 14)
    Worker(tmp_path, generation=1).goes_on_from(0, 12).keep(13)
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12), (1, 13)], "14 was made of the other 13"
    Worker(tmp_path, generation=2).goes_on_from(0, 11).keep(20, 21)
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12), (1, 13)], "20 follows from no update that is here"


def test_a_state_from_elsewhere_leads_on_from_nothing_in_memory(tmp_path):
    Worker(tmp_path, generation=0).keep(11, 12)
    worker = Worker(tmp_path, generation=1).goes_on_from(0, 12)
    worker.log.stands_on = None  # the run took a checkpoint of update 12, of another branch
    worker.keep(13)
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12)]


def test_a_changed_bit_anywhere_ends_it_and_is_named(tmp_path):
    worker = Worker(tmp_path).keep(11, 12, 13)
    path = worker.folder / worker.files()[1]
    size, used = path.stat().st_size, np.random.default_rng(0)
    for offset in (0, 9, 20, tiers._SPACE, size - 1, *used.integers(tiers._SPACE, size, 10)):
        flip(path, int(offset))
        told = []
        assert led_to(tmp_path, step=10, told=told) == [(0, 11)], offset
        assert any(str(path) in line for line in told)
        flip(path, int(offset))
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12), (0, 13)], "as it was"


def test_a_damaged_entry_is_read_from_its_copy_and_a_lost_folder_too(tmp_path):
    worker, told = Worker(tmp_path, peer=1).keep(11, 12), []
    assert len(list((tmp_path / "worker_1").glob("of_0_*.gradient"))) == 2
    flip(worker.folder / worker.files()[0], tiers._SPACE)
    assert led_to(tmp_path, step=10, told=told) == [(0, 11), (0, 12)]
    assert len(told) == 1, "named all the same"
    for path in worker.folder.iterdir():
        path.unlink()
    assert led_to(tmp_path, step=10) == [(0, 11), (0, 12)]


def test_an_entry_of_which_a_part_is_missing_is_none(tmp_path):
    """A worker that died had not written its own yet."""
    worker = Worker(tmp_path).keep(11, 12)
    whole = tiers.host_parts(gradient_on(worker.mesh, 12))
    half = [part for part in whole if part.leaf != "w" or part.box[0][0] == 0]
    assert len(half) < len(whole)
    tiers.write_slot(str(worker.folder / worker.files()[1]), SnapshotId(0, 12, "run"), half, {
        "follows": [0, 11], "update": "same", "extra": {}}, {"w": (16, 8), "norm": ()})
    told = []
    assert led_to(tmp_path, step=10, told=told) == [(0, 11)]
    assert told == ["the log of gradients ends before update 12, whose entry is not whole"]


def test_other_settings_of_the_update_end_it(tmp_path):
    Worker(tmp_path, update="before").keep(11)
    told = []
    assert led_to(tmp_path, step=10, told=told, update="now") == []
    assert "update 11 was made for another optimizer or schedule" in told[0]
    assert entries(tmp_path, update="now").reach(SnapshotId(0, 10, "run")) == 10


def test_entries_are_dropped_once_the_next_snapshot_is_complete(tmp_path):
    worker = Worker(tmp_path, peer=1)
    worker.snapshot(10)
    worker.keep(11, 12, 13)
    worker.snapshot(13)
    assert len(worker.files()) == 3, "with the next entry, in its thread"
    worker.keep(14)
    assert worker.files() == ["own_0_14.gradient"]
    assert [path.name for path in (tmp_path / "worker_1").glob("*.gradient")] == ["of_0_0_14.gradient"]
    assert led_to(tmp_path, step=13) == [(0, 14)]
    later = Worker(tmp_path, generation=1, peer=2).goes_on_from(0, 14).keep(15)
    assert len(later.files()) == 2
    later.snapshot(15)
    later.keep(16)
    assert later.files() == ["own_1_16.gradient"], "those of the process before too, and copies wherever they lie"
    assert not list((tmp_path / "worker_1").glob("*.gradient"))


def test_they_stay_while_a_part_of_the_snapshot_is_missing(tmp_path, monkeypatch):
    """Other workers may not have written theirs yet: a restore needs the snapshot before, and what follows it."""
    worker, whole = Worker(tmp_path), tiers.host_parts

    def half(state):
        return [part for part in whole(state) if part.leaf != "w" or part.box[0][0] == 0]

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "host_parts", half)
        for step in (10, 12, 14):
            worker.snapshot(step)
            worker.keep(step + 1, step + 2)
    assert worker.files() == [f"own_0_{step}.gradient" for step in (13, 14, 15, 16)], "since the one before the newest"


def test_a_run_that_goes_back_keeps_none(tmp_path):
    worker = Worker(tmp_path, peer=1).goes_on_from(0, 10)
    worker.keep(11).goes_on_from(0, 11)
    worker.log.forget()
    assert not list(tmp_path.rglob("*.gradient"))
    assert worker.log.stands_on is None
