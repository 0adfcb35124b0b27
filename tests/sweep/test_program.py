"""One program for several members: each gets the losses and weights of its own step, whatever number differs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtext.sweep.grid import without_numbers
from maxtext.sweep.program import Program
from maxtext.train.state import abstract_state, init_state
from maxtext.train.step import compile_train_step
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

UPDATES = 4
METRICS, WEIGHTS = 1e-5, 1e-3  # see `differences`: rounding, as a program with inputs is not one with constants


def member(kind="skip_step_adamw", seed=0, z_loss=1e-5, schedule=(), muon=(), **optim):
    cfg = tiny_config(tiny_model(n_layers=1, layer_pattern=("window",)), z_loss=z_loss)
    optim = {"eps": 1e-3} | optim  # above the gradients' rounding noise, of which Adam would make whole steps
    return dataclasses.replace(cfg, seed=seed, schedule=dataclasses.replace(cfg.schedule, **dict(schedule)),
                               optim=dataclasses.replace(cfg.optim, kind=kind, **optim, muon=dataclasses.replace(
                                   cfg.optim.muon, **dict(muon))))


# Between them, every number of a config that may differ within a program.
MEMBERS = (
    member(),
    member(seed=1, lr=2e-3, betas=(0.0, 0.99), eps=1e-2, weight_decay=0.0, max_grad_norm=None, z_loss=1e-2,
           schedule=(("warmup_steps", 0), ("min_ratio", 0.5))),
    member(seed=1, max_grad_norm=0.1, skip=dataclasses.replace(member().optim.skip, sigma=1.0), z_loss=0.0,
           schedule=(("total_steps", 4), ("warmup_steps", 3))),
)


def batches(cfg, mesh):
    return [place(random_batch(cfg, seed=i), mesh) for i in range(UPDATES)]


@functools.cache
def own(number, shape=(1, 1, 1)):
    """Metrics of each update, and the last state, of one of MEMBERS by itself."""
    cfg, mesh, seen = MEMBERS[number], mesh_of(shape), []
    with jax.set_mesh(mesh):
        state, step = init_state(cfg), compile_train_step(cfg)
        for batch in batches(cfg, mesh):
            state, metrics = step(state, batch)
            seen.append(jax.device_get(metrics))
    return seen, jax.tree.map(np.asarray, state)


def together(cfgs, shape=(1, 1, 1), devices=(), width=None):
    """The same of all members: a list with a pair for each."""
    mesh = mesh_of(shape)
    program = Program(cfgs, mesh, devices, width)
    with jax.set_mesh(mesh):
        states = program.stacked([init_state(cfg) for cfg in cfgs])
        like = abstract_state(cfgs[0], mesh)
    given = [jax.tree.map(lambda x: jax.device_put(np.asarray(x), program.batch_sharding()), batch)
             for batch in batches(cfgs[0], mesh)]
    step, seen = program.compile(states, given[0]), []
    for batch in given:
        states, metrics = step(states, batch)
        seen.append(jax.device_get(metrics))
    found = program.apart(states, like)
    assert len(found) == len(cfgs)
    return [([jax.tree.map(lambda x, i=i: x[i], each) for each in seen], jax.tree.map(np.asarray, state))
            for i, state in enumerate(found)]


def differences(got, expected):
    """Largest relative difference of any loss, gradient norm and rate; largest of any weight, in units of the rate."""
    (metrics, state), (own_metrics, own_state) = got, expected
    for update, exact in zip(metrics, own_metrics, strict=True):
        for name in ("skipped", "targets", "fingerprint"):
            assert update[name] == exact[name], name
    of_metrics = max(abs(float(update[name]) / float(exact[name]) - 1)
                     for update, exact in zip(metrics, own_metrics, strict=True)
                     for name in ("cross_entropy", "squared_log_z", "grad_norm", "learning_rate") if exact[name])
    rate = max(float(update["learning_rate"]) for update in own_metrics)
    of_weights = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(state.params),
                                                         jax.tree.leaves(own_state.params), strict=True))
    return of_metrics, float(of_weights / rate)


def test_the_members_of_these_tests_differ_in_all_numbers_and_share_a_program():
    assert all(without_numbers(cfg) == without_numbers(MEMBERS[0]) for cfg in MEMBERS)
    assert len({float(own(i)[0][-1]["cross_entropy"]) for i in range(len(MEMBERS))}) == len(MEMBERS)


@pytest.mark.parametrize("how", [{"width": 1}, {"width": 3}, {"devices": 2}], ids=str)
def test_each_member_is_its_own_run(how):
    if "devices" in how:
        how = how | {"devices": jax.devices()[: how["devices"]]}
    for i, got in enumerate(together(MEMBERS, **how)):
        of_metrics, of_weights = differences(got, own(i))
        assert of_metrics < METRICS
        assert of_weights < WEIGHTS


def test_each_member_is_its_own_run_on_a_mesh():
    """Each laid out over four devices, as its own run is."""
    for i, got in enumerate(together(MEMBERS[:2], shape=(1, 2, 2), width=2)):
        of_metrics, of_weights = differences(got, own(i, (1, 2, 2)))
        assert of_metrics < METRICS
        assert of_weights < WEIGHTS
