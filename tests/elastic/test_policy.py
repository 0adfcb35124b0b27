"""Who goes on, on which mesh, and when it has been enough."""

import dataclasses

import pytest

from maxtext.config.schema import MeshConfig
from maxtext.elastic.policy import Budget, back_off, choose_members, resized, survival
from tests.tiny import tiny_config


def run(batch=24, accumulation=1, **mesh):
    return dataclasses.replace(tiny_config(global_batch=batch, gradient_accumulation_steps=accumulation),
                               mesh=MeshConfig(**mesh))


@pytest.mark.parametrize(("cfg", "devices", "mesh", "micro_batches"), [
    (run(), 8, {"fsdp": -1}, 1),  # all devices: as it was asked for
    (run(), 4, {"fsdp": -1}, 2),  # half of the devices, twice the micro-batches
    (run(), 2, {"fsdp": -1}, 4),
    (run(), 1, {"fsdp": -1}, 8),
    (run(accumulation=3), 4, {"fsdp": -1}, 6),
    (run(data=8, fsdp=1), 6, {"data": -1, "fsdp": 1}, 2),  # 24 / 2 / 6 = 2 rows a device, where there were 3
    (run(data=2, fsdp=4), 4, {"data": -1, "fsdp": 4}, 2),  # a replica less
    (run(data=2, fsdp=4), 2, {"data": 2, "fsdp": -1}, 4),  # no whole replica is left: fewer shards
    (run(data=-1, fsdp=2), 6, {"data": -1, "fsdp": 2}, 2),
])
def test_the_same_batch_on_fewer_devices(cfg, devices, mesh, micro_batches):
    smaller = resized(cfg, devices, 8)
    assert smaller is not None
    assert {axis: getattr(smaller.mesh, axis) for axis in mesh} == mesh
    assert smaller.train.gradient_accumulation_steps == micro_batches
    assert smaller.train.global_batch == cfg.train.global_batch


def test_what_does_not_divide_is_no_mesh():
    assert resized(run(batch=8), 6, 8) is None, "8 sequences over 6 devices"
    assert resized(run(tensor=2), 3, 8) is None, "a tensor axis of 2 over 3 devices"
    assert resized(run(batch=8), 16, 16) is None, "more devices than sequences"


def test_members_are_as_many_as_fit_and_keep_their_order():
    cfg = run(batch=8)  # over 8, 4 or 2 devices, not over 6
    assert choose_members(cfg, {0, 1, 2, 3}, (), 4, 2) == (0, 1, 2, 3)
    assert choose_members(cfg, {1, 2, 3}, (0, 1, 2, 3), 4, 2) == (1, 2), "the third is a spare"
    assert choose_members(cfg, {0, 1, 2, 3}, (2, 1), 4, 2) == (2, 1, 0, 3), "what members hold stays where it is"
    assert choose_members(cfg, {3}, (0, 1, 2, 3), 4, 2) == (3,)
    assert choose_members(cfg, set(), (0, 1), 4, 2) == ()


def test_changes_are_counted_by_the_hour():
    budget = Budget(2)
    for now in (0.0, 10.0):
        assert not budget.exhausted(now)
        budget = budget.after(now)
    assert budget.exhausted(20.0)
    assert not budget.exhausted(3605.0), "the first is an hour ago"
    assert budget.after(3605.0).exhausted(3606.0)


def test_a_worker_that_keeps_dying_waits_longer_and_longer():
    assert [back_off(deaths) for deaths in (0, 1, 2, 3, 4, 30)] == [0, 0, 1, 2, 4, 60]


@pytest.mark.parametrize(("workers", "replicas", "peer", "said"), [
    (4, 1, False, "any or all processes, but not the loss of a host's memory"),
    (4, 4, False, "any or all processes, and the loss of the memory of any 3 of 4 hosts, thus of 75% of them"),
    (4, 2, False, "any or all processes, and the loss of the memory of any 1 of 4 hosts, fewer than 75% of them"),
    (4, 1, True, "any or all processes, and the loss of the memory of any 1 of 4 hosts, fewer than 75% of them"),
    (1, 1, True, "any or all processes, but not the loss of a host's memory"),
])
def test_what_the_memory_tier_survives(workers, replicas, peer, said):
    rows = dict(survival(workers, replicas, peer, 10, True))
    assert rows["memory"] == f"a snapshot every 10 updates; survives the death of {said}"
    logged = dict(survival(workers, replicas, peer, 10, True, gradient_log=True))
    assert logged["memory"] == rows["memory"].replace(" updates;", " updates and the gradient of each update since;")
