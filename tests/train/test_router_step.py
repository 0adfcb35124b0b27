"""One update of a model with experts: router losses, statistics and the selection bias, however the batch is split."""

import dataclasses

import jax
import numpy as np
import pytest

from maxtext.config.architecture import LatentConfig, ModelConfig, MoeConfig
from maxtext.model.loss import mean_loss
from maxtext.train.state import init_state
from maxtext.train.step import compile_train_step
from tests.tiny import mesh_of, place, random_batch, tiny_config

EXPERTS = MoeConfig(experts=8, top_k=2, d_expert=16, load_balance_loss=0.1, z_loss=0.01, scores="sigmoid",
                    selection_bias=True, bias_update_rate=0.01, shared_experts=1, dense_layers=1)
MODEL = ModelConfig(vocab_size=96, d_model=32, n_layers=3, n_heads=4, d_ff=48, norm_placement="pre", qk_norm="none",
                    latent=LatentConfig(kv_rank=16, q_rank=24, nope_dim=8, rope_dim=4, value_dim=8),
                    rope_pairs="neighbours", moe=EXPERTS)


def update(statistics="micro_batch", accumulation=2, shape=(1, 1, 1), expert=1, updates=1):
    """Metrics and weights after some updates on one batch."""
    moe = dataclasses.replace(EXPERTS, load_statistics=statistics)
    cfg = tiny_config(dataclasses.replace(MODEL, moe=moe), gradient_accumulation_steps=accumulation, global_batch=16)
    mesh = mesh_of(shape, expert)
    with jax.set_mesh(mesh):
        state, step = init_state(cfg), compile_train_step(cfg)
        for _ in range(updates):
            state, metrics = step(state, place(random_batch(cfg), mesh))
        return jax.device_get(metrics), jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def one_device():
    return update()


def test_on_a_mesh_with_experts_split_over_devices(one_device):
    """Micro-batches hold the same rows on every mesh, so that what routers count over them is the same."""
    (exact, exact_state), (got, state) = one_device, update(shape=(1, 2, 2), expert=2)
    for name in ("cross_entropy", "grad_norm"):
        np.testing.assert_allclose(got[name], exact[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got["router"], exact["router"])
    for a, b in zip(jax.tree.leaves(state.optimizer.mu), jax.tree.leaves(exact_state.optimizer.mu), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    np.testing.assert_array_equal(bias(state), bias(exact_state))


def bias(state):
    return state.params.segments[1][0].mlp.selection_bias


def test_the_selection_bias_moves_against_the_load_and_no_other_way(one_device):
    metrics, state = one_device
    loads = metrics["router"]["load"]
    assert loads.shape == (2, 8)
    np.testing.assert_allclose(loads.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(bias(state), 0.01 * np.sign(1 / 8 - loads), atol=1e-8)
    for moment in (state.optimizer.mu, state.optimizer.nu):
        assert (moment.segments[1][0].mlp.selection_bias == 0).all()


@pytest.mark.one_pass  # three programs more
def test_statistics_of_the_batch_take_in_the_micro_batches_before(one_device):
    """The last micro-batch's loss is the whole batch's; so with one micro-batch both kinds are the same."""
    by_batch, whole = update("batch")[0], update("batch", accumulation=1)[0]
    np.testing.assert_allclose(by_batch["router"]["load"], whole["router"]["load"], rtol=1e-6)
    np.testing.assert_allclose(whole["router"]["load_balance"],
                               update(accumulation=1)[0]["router"]["load_balance"], rtol=1e-6)
    assert (by_batch["router"]["load_balance"] != one_device[0]["router"]["load_balance"]).all()
    # Counts over more tokens are more even, so the loss lies between the micro-batches' own and the whole batch's.
    gaps = [np.abs(x["router"]["load_balance"] - whole["router"]["load_balance"]) for x in (by_batch, one_device[0])]
    assert (gaps[0] < gaps[1]).all()


def test_padding_is_not_counted():
    cfg = tiny_config(MODEL)
    real_B, mesh = np.array([16, 3, 1, 16, 7, 16, 2, 16], np.int32), mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        b = place(random_batch(cfg).replace(real_B=real_B), mesh)
        loss = jax.jit(lambda p, b: mean_loss(p, b.tokens_BT, b.targets_BT, b.weights_BT, 1.0, cfg, real_B=b.real_B))
        _, (_, stats) = loss(init_state(cfg).params, b)
    np.testing.assert_array_equal(stats.tokens, real_B.sum())
    np.testing.assert_array_equal(stats.counts_E.sum(-1), 2 * real_B.sum())
