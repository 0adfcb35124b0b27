"""Moments in bfloat16: rounded without bias, alike on every mesh, and small enough a change to train with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.train.moments import stored
from tests.tiny import mesh_of
from tests.train import test_optim
from tests.train.test_optim import config, gradients, make, weights

LEAF = 3


def test_rounding_has_the_mean_of_what_is_rounded_and_errs_by_less_than_a_step():
    value = np.array([1 + 1 / 1024, -3 - 3 / 4096, 1e-20, 0, 2.5, np.inf, np.nan], np.float32)
    x = np.tile(value, (4096, 1))
    rounded = np.asarray(stored(jnp.asarray(x), "bfloat16", jnp.int32(7), LEAF))
    assert rounded.dtype == jnp.bfloat16
    rounded = rounded.astype(np.float64)
    assert np.abs(rounded[:, :3] / value[:3] - 1).max() < 2 ** -7
    np.testing.assert_allclose(rounded[:, :3].mean(0), value[:3].astype(np.float64), rtol=3 * 2 ** -8 / 64)
    np.testing.assert_array_equal(rounded[:, 3:], x[:, 3:])  # held exactly
    assert len(np.unique(rounded[:, 0])) == 2


def test_each_step_leaf_and_position_draws_anew():
    x = jnp.full((64, 64), 1 + 1 / 256, jnp.float32)  # half-way
    base = np.asarray(stored(x, "bfloat16", jnp.int32(1), LEAF)) > 1.002
    for step, leaf in ((2, LEAF), (1, LEAF + 1)):
        other = np.asarray(stored(x, "bfloat16", jnp.int32(step), leaf)) > 1.002
        assert 0.45 < (base == other).mean() < 0.55
    for axis in (0, 1):
        assert 0.45 < (base == np.roll(base, 1, axis)).mean() < 0.55


def test_a_mesh_draws_the_same():
    x = np.random.default_rng(0).normal(size=(16, 8, 4)).astype(np.float32)
    expected = np.asarray(stored(jnp.asarray(x), "bfloat16", jnp.int32(5), LEAF))
    mesh = mesh_of((2, 2, 2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(None, "fsdp", "tensor")))
        got = jax.jit(lambda x: stored(x, "bfloat16", jnp.int32(5), LEAF))(placed)
    np.testing.assert_array_equal(np.asarray(got), expected)
    assert got.sharding == placed.sharding


def test_a_slow_second_moment_still_moves():
    """Rounded to the nearest it would stand still at a tenth of its end: a step is then less than half a unit."""
    cfg = config(kind="adamw", betas=(0.9, 0.999), moments_dtype="bfloat16", max_grad_norm=None)
    tx: Any = make(cfg)
    grads = {name: np.full((64, 64), 0.5, np.float32) for name in test_optim.SHAPES}
    params = jax.tree.map(jnp.asarray, grads)
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves((state.mu, state.nu))} == {jnp.dtype("bfloat16")}

    def step(state, _):
        return tx.update(grads, state, params, loss=jnp.float32(2), grad_norm=jnp.float32(1))[1], None

    state = jax.jit(lambda state: jax.lax.scan(step, state, None, 2000)[0])(state)
    mean = float(jnp.mean(state.nu["head"].astype(jnp.float32)))
    np.testing.assert_allclose(mean, 0.25 * (1 - 0.999 ** 2000), rtol=1e-2)


def test_training_stays_near_that_with_float32_moments():
    grads = gradients(40)
    narrow, _, _ = test_optim.run(config(moments_dtype="bfloat16"), grads)
    wide, _, _ = test_optim.run(config(), grads)
    for name, start in weights().items():
        moved = np.linalg.norm(wide[name] - start)
        assert 0 < np.linalg.norm(narrow[name] - wide[name]) < 0.02 * moved


def test_a_skipped_step_keeps_the_bits_of_narrow_moments():
    cfg = config(moments_dtype="bfloat16")
    params, state, _ = test_optim.run(cfg, gradients(5))
    bad = {name: np.full(x.shape, np.nan, np.float32) for name, x in weights().items()}
    after, new_state, skipped = test_optim.run(cfg, [bad], [float("nan")], params, state)
    assert skipped == [1]
    test_optim.assert_same_bits((after, new_state.mu, new_state.nu), (params, state.mu, state.nu))
