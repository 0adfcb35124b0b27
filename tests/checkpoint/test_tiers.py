"""Snapshots in the hosts' memory: written, cut off, damaged, and read on another mesh."""

import contextlib
import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint import tiers
from maxtext.checkpoint.tiers import BadSnapshot, HostPart, SnapshotId, Snapshots, read_slot, slots_below, write_slot
from maxtext.checkpoint.tiers_vote import Source, restore
from tests.checkpoint.states import host_bits, make_mesh

AT = SnapshotId(0, 5, "run")


def state_on(mesh, step):
    """Bits of every kind: weights that differ with the step, bfloat16, a count, nothing at all."""
    rng = np.random.default_rng(step)

    def on(spec, values):
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return {"w": on(("fsdp", "tensor"), rng.standard_normal((16, 8), np.float32)),
            "half": on((None, "fsdp"), jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16)),
            "count": on((), np.int32(step)), "empty": on((), np.zeros((0, 2), np.float32))}


def abstract_on(mesh):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_on(mesh, 0))


def take(root, mesh, *steps, worker=0, generation=0, peer=None, run="run"):
    heard = []
    snapshots = Snapshots(str(root), worker, run, generation, peer, heard.append)
    for step in steps:
        snapshots.take(step, state_on(mesh, step), {"step": step})
        assert snapshots.wait(), heard
    return snapshots


def restored(root, mesh, told=None, newer_than=-1, run="run"):
    told = [] if told is None else told
    slots = list(slots_below(str(root), run, told.append))
    return restore(abstract_on(mesh), slots, lambda topic, words: [words], newer_than, told.append)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 1), (1, 1), (1, 8)])
def test_the_newest_comes_back_bit_for_bit_on_any_mesh(tmp_path, shape):
    take(tmp_path, make_mesh(4, 2), 10, 20, 30)
    found = restored(tmp_path, make_mesh(*shape))
    assert (found.id.step, found.extra) == (30, {"step": 30})
    assert host_bits(found.state) == host_bits(state_on(make_mesh(1), 30))
    assert found.state["w"].sharding == abstract_on(make_mesh(*shape))["w"].sharding


def test_two_slots_take_turns(tmp_path):
    take(tmp_path, make_mesh(2), 10, 20, 30)
    assert sorted(slot.id.step for slot in slots_below(str(tmp_path), "run", print)) == [20, 30]


def test_the_arrays_may_be_donated_at_once(tmp_path, monkeypatch):
    mesh, donated, write = make_mesh(2), threading.Event(), tiers.write_slot

    def late(*arguments):
        assert donated.wait(10)
        write(*arguments)

    monkeypatch.setattr(tiers, "write_slot", late)
    snapshots, state = Snapshots(str(tmp_path), 0, "run", 0, None, print), state_on(mesh, 10)
    expected = host_bits(state)
    snapshots.take(10, state, {})
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state))
    donated.set()
    assert snapshots.wait()
    assert host_bits(restored(tmp_path, mesh).state) == expected


def test_a_writer_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch):
    """At every one of its writes."""
    mesh, cut, write = make_mesh(2), 0, os.pwrite
    while True:
        folder, left = tmp_path / str(cut), [cut]
        take(folder, mesh, 10, 20)

        def dying(*arguments, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return write(*arguments)

        monkeypatch.setattr(tiers.os, "pwrite", dying)
        parts, oldest = tiers.host_parts(state_on(mesh, 30)), folder / "worker_0" / "own_0.slot"
        try:
            write_slot(str(oldest), SnapshotId(0, 30, "run"), parts, {"step": 30}, {"w": (16, 8), "half": (3, 8),
                                                                                     "count": (), "empty": (0, 2)})
        except KeyboardInterrupt:
            whole = 20
            with pytest.raises(BadSnapshot, match="has no seal") if cut else contextlib.nullcontext():
                read_slot(str(oldest))
        else:
            whole = 30
        monkeypatch.setattr(tiers.os, "pwrite", write)
        assert read_slot(str(folder / "worker_0" / "own_1.slot")).id.step == 20, "which was not the oldest"
        assert restored(folder, mesh).id.step == whole
        cut += 1
        if whole == 30:
            break
    assert cut > 6, "header, blocks, index and seal are writes of their own"


def test_a_changed_bit_anywhere_is_found_and_named(tmp_path):
    """Each bit flip either hits nothing that is read, or the snapshot before is taken; never a wrong state."""
    mesh = make_mesh(2)
    take(tmp_path, mesh, 10, 20)
    newest = next(slot for slot in slots_below(str(tmp_path), "run", print) if slot.id.step == 20)
    size, chance = os.path.getsize(newest.path), np.random.default_rng(0)
    used = [0, 9, 15, 17, 22, 25, tiers._SPACE, size - 1, *chance.integers(tiers._SPACE, size, 40)]
    for offset in used:
        flip(newest.path, int(offset))
        told = []
        found = restored(tmp_path, mesh, told)
        assert found.id.step == 10, offset
        assert host_bits(found.state) == host_bits(state_on(mesh, 10))
        assert any(newest.path in line for line in told), "named"
        flip(newest.path, int(offset))
    assert restored(tmp_path, mesh).id.step == 20, "as it was"


def test_a_damaged_copy_is_replaced_by_the_one_of_another_worker(tmp_path):
    mesh, told = make_mesh(2), []
    for worker in (0, 1):  # replicas: each holds everything
        take(tmp_path, mesh, 10, worker=worker)
    flip(tmp_path / "worker_0" / "own_0.slot", tiers._SPACE + 3)
    found = restored(tmp_path, mesh, told)
    assert (found.id.step, len(told)) == (10, 1)
    assert host_bits(found.state) == host_bits(state_on(mesh, 10))


def test_another_run_is_passed_over_and_named(tmp_path):
    take(tmp_path, make_mesh(2), 90, run="earlier", worker=1)
    take(tmp_path, make_mesh(2), 10)
    told = []
    assert restored(tmp_path, make_mesh(2), told).id.step == 10
    assert [line for line in told if "of another run (earlier, not run)" in line]


def test_a_checkpoint_that_is_newer_is_preferred(tmp_path):
    take(tmp_path, make_mesh(2), 10)
    assert restored(tmp_path, make_mesh(2), newer_than=11) is None
    assert restored(tmp_path, make_mesh(2), newer_than=10).id.step == 10


def test_a_lost_folder_is_made_good_by_the_peer(tmp_path):
    take(tmp_path, make_mesh(2), 10, 20, worker=0, peer=1)
    for path in (tmp_path / "worker_0").iterdir():
        path.unlink()
    found = restored(tmp_path, make_mesh(4))
    assert found.id.step == 20
    assert host_bits(found.state) == host_bits(state_on(make_mesh(1), 20))


def test_a_full_memory_is_told_and_leaves_what_was(tmp_path, monkeypatch):
    take(tmp_path, make_mesh(2), 10, 20)
    heard = []
    snapshots = Snapshots(str(tmp_path), 0, "run", 0, None, heard.append)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tiers.os, "pwrite", full)
        snapshots.take(30, state_on(make_mesh(2), 30), {})
        assert not snapshots.wait()
    assert heard == ["no snapshot of update 30 was kept in memory: No space left on device"]
    assert restored(tmp_path, make_mesh(2)).id.step == 20
    snapshots.take(40, state_on(make_mesh(2), 40), {})
    assert snapshots.wait(), "once there is room again"


def test_parts_that_cross_are_cut_together(tmp_path):
    whole = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    for number, rows in enumerate(((0, 2), (2, 6))):
        write_slot(str(tmp_path / f"{number}.slot"), AT, [HostPart("w", (rows, (0, 4)), whole[slice(*rows)])], {},
                   {"w": (6, 4)})
    source = Source(AT, [read_slot(str(tmp_path / f"{number}.slot")) for number in (0, 1)])
    np.testing.assert_array_equal(source.values("w", ((1, 5), (1, 3)), np.dtype("float32")), whole[1:5, 1:3])
    half = Source(AT, [read_slot(str(tmp_path / "0.slot"))])
    assert half.values("w", ((0, 2), (0, 4)), np.dtype("float32")).tolist() == whole[:2].tolist()
    with pytest.raises(BadSnapshot, match="cannot be read here in full"):
        half.values("w", ((1, 5), (1, 3)), np.dtype("float32"))
    with pytest.raises(BadSnapshot, match="float32, not int32"):
        Source(AT, [read_slot(str(tmp_path / "0.slot"))]).values("w", ((0, 2), (0, 4)), np.dtype("int32"))


def test_typed_keys_are_refused(tmp_path):
    with pytest.raises(TypeError, match="key_data"):
        tiers.host_parts({"key": jax.random.key(0)})


def test_newer_is_greater():
    assert SnapshotId(1, 5, "a") > SnapshotId(0, 9, "b")
    assert dataclasses.replace(AT, step=6) > AT
