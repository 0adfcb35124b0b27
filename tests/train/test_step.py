"""One update: the same loss, gradient norm and new weights however the batch is split over micro-batches and meshes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtext.config.schema import RematConfig
from maxtext.train.state import abstract_state, init_state
from maxtext.train.step import compile_train_step, make_train_step
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

ONE_PASS = pytest.mark.one_pass
COUNTS = [1, 3, 63, 63, 10, 20, 40, 5]  # real targets of each row


def config(accumulation=1, layers=3, **train):
    model = tiny_model(n_layers=layers, layer_pattern=("window", "full"))  # and a full one more where it is odd
    cfg = tiny_config(model, gradient_accumulation_steps=accumulation, **train)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=64))


@functools.cache
def first_state(layers):
    """Made once: that it does not depend on the mesh is tested with the model."""
    with jax.set_mesh(mesh_of((1, 1, 1))):
        return jax.tree.map(np.asarray, init_state(config(layers=layers)))


def update(cfg, shape, counts=COUNTS, updates=1):
    """Metrics and weights after some updates on the same batch."""
    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        state = jax.tree.map(lambda x, want: jax.device_put(x.copy(), want.sharding), first_state(cfg.model.n_layers),
                             abstract_state(cfg, mesh))
        step = compile_train_step(cfg)
        for _ in range(updates):
            state, metrics = step(state, place(random_batch(cfg, counts=counts), mesh))
        return {k: v.item() for k, v in metrics.items()}, jax.tree.map(np.asarray, state)


@functools.cache
def whole_batch_on_one_device(layers=3):
    return update(config(layers=layers), (1, 1, 1))


def check_same(got, expected):
    (metrics, state), (exact, exact_state) = got, expected
    for name in ("cross_entropy", "squared_log_z", "grad_norm"):
        np.testing.assert_allclose(metrics[name], exact[name], rtol=1e-5, err_msg=name)
    assert exact["grad_norm"] > 1.5  # well above optim.max_grad_norm: what is compared below is a clipped update
    assert metrics["targets"] == exact["targets"] == sum(COUNTS)
    assert metrics["fingerprint"] == exact["fingerprint"]
    # The first Adam update is close to lr * sign(gradient): an entry whose gradient is rounding noise may differ by
    # some of it, so weights are compared in units of one update (lr 5e-3) where the gradient is above the noise.
    def compare(a, b, mu):
        sure = np.abs(mu) > 1e-3 * np.abs(mu).max()
        np.testing.assert_allclose(a[sure], b[sure], atol=2e-5)
    jax.tree.map(compare, state.params, exact_state.params, exact_state.optimizer.mu)
    # Gradients array by array, relative to the array's size: an entry whose terms cancel (a gain's can be 1e-4 of its
    # neighbours) has no more correct digits than its terms have.
    for a, b in zip(jax.tree.leaves(state.optimizer.mu), jax.tree.leaves(exact_state.optimizer.mu), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("accumulation", [pytest.param(2, marks=ONE_PASS), 8])
def test_micro_batches(accumulation):
    check_same(update(config(accumulation), (1, 1, 1)), whole_batch_on_one_device())


@pytest.mark.parametrize("shape", [
    *(pytest.param(shape, marks=ONE_PASS) for shape in ((2, 1, 1), (1, 4, 1), (1, 2, 4))), (1, 8, 1), (2, 2, 2)])
def test_meshes(shape):
    check_same(update(config(), shape), whole_batch_on_one_device())


@pytest.mark.parametrize(("accumulation", "shape"), [(4, (1, 2, 1)), (2, (2, 1, 2))])
def test_micro_batches_on_meshes(accumulation, shape):
    check_same(update(config(accumulation), shape), whole_batch_on_one_device())


def test_scanned_layers_on_a_mesh_with_remat():
    cfg = config(2, layers=4, remat=RematConfig("names", ("qkv", "gate_up")))
    check_same(update(cfg, (2, 2, 2)), whole_batch_on_one_device(4))


def test_the_loss_is_the_mean_over_real_targets_of_the_global_batch():
    """Not a mean of per-row or per-micro-batch means: recomputed from each row alone."""
    cfg, mesh, total = config(), mesh_of((1, 1, 1)), 0.0
    with jax.set_mesh(mesh):
        step = jax.jit(make_train_step(cfg))
        state = init_state(cfg)
        for row, count in enumerate(COUNTS):
            alone = random_batch(cfg, counts=[0] * row + [count] + [0] * (7 - row))
            total += float(step(state, place(alone, mesh))[1]["cross_entropy"]) * count
    np.testing.assert_allclose(total / sum(COUNTS), whole_batch_on_one_device()[0]["cross_entropy"], rtol=1e-5)


def test_the_state_keeps_its_declared_shapes_and_shardings():
    cfg, mesh = config(), mesh_of((2, 2, 2))
    declared = abstract_state(cfg, mesh)
    with jax.set_mesh(mesh):
        state = init_state(cfg)
        after, _ = compile_train_step(cfg)(state, place(random_batch(cfg), mesh))
    for want, got in zip(jax.tree.leaves(declared), jax.tree.leaves(after), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, len(want.shape)), (want.sharding, got.sharding)


def test_training_learns_a_batch_by_heart():
    metrics, state = update(config(steps=60), (1, 1, 1), updates=60)
    assert metrics["cross_entropy"] < 0.5 * whole_batch_on_one_device()[0]["cross_entropy"]
    assert int(state.step) == int(state.optimizer.count) == 60


def test_a_batch_without_targets_changes_nothing_but_the_step():
    cfg = config()
    metrics, state = update(cfg, (1, 1, 1), [0] * 8)
    assert metrics["cross_entropy"] == 0
    assert metrics["grad_norm"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


