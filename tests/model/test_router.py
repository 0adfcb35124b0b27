"""Choice of experts, capacity and router losses against plain numpy, mostly split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.architecture import MoeConfig
from maxtext.model.router import (
    Assignments,
    RouterStats,
    TokenAxes,
    choose_experts,
    limit_capacity,
    router_logits,
    router_scores,
    router_stats,
    updated_bias,
)
from maxtext.parallel.sharding import RULES, per_device, sharding
from tests.tiny import mesh_of

TOKENS, EXPERTS, SEQUENCES = 48, 8, 8
AXES = TokenAxes(RULES["batch"], ())
PER_TOKEN, PER_EXPERT = ("batch", None), (None,)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def softmax(logits):
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


SCORES = {"softmax": softmax, "sigmoid": lambda logits: 1 / (1 + np.exp(-logits))}


def chosen_by_hand(scores, bias, moe):
    """Ids and weights of one token, by sorting."""
    ranked = scores + bias
    if moe.groups > 1:
        groups = ranked.reshape(moe.groups, -1)
        best = np.sort(groups, -1)[:, ::-1]
        of_group = best[:, 0] if moe.group_score == "max" else best[:, :2].sum(-1)
        allowed = np.argsort(-of_group, kind="stable")[: moe.group_top_k]
        keep = np.isin(np.arange(moe.groups), allowed)[:, None]
        ranked = np.where(keep, groups, -np.inf).reshape(-1)
    ids = np.argsort(-ranked, kind="stable")[: moe.top_k]
    weights = scores[ids]
    if moe.renormalise:
        weights = weights / weights.sum()
    return ids, weights * moe.scale


@pytest.mark.parametrize(("settings", "biased"), [
    ({}, False),
    ({"groups": 4, "group_top_k": 2}, False),
    ({"renormalise": True, "scale": 2.5}, True),
    ({"scores": "sigmoid", "renormalise": True}, True),
    ({"groups": 4, "group_top_k": 2, "group_score": "max"}, True),
    ({"groups": 4, "group_top_k": 2, "group_score": "top2_sum", "scores": "sigmoid"}, True),
    ({"groups": 2, "group_top_k": 1, "top_k": 4, "renormalise": True}, True),
], ids=str)
def test_experts_and_weights_of_each_token(settings, biased):
    moe = MoeConfig(experts=EXPERTS, d_expert=1, **settings)
    logits = draw(0, TOKENS, EXPERTS)
    bias = draw(1, EXPERTS) / 4 if biased else np.zeros(EXPERTS, np.float32)
    got = jax.jit(lambda logits: choose_experts(router_scores(logits, moe), bias if biased else None, moe))(logits)
    rows = [chosen_by_hand(scores, bias, moe) for scores in SCORES[moe.scores](logits)]
    np.testing.assert_array_equal(got.ids_NK, [ids for ids, _ in rows])
    np.testing.assert_allclose(got.weights_NK, [weights for _, weights in rows], rtol=1e-5)


def test_of_equal_scores_the_lowest_expert_comes_first():
    moe = MoeConfig(experts=EXPERTS, d_expert=1, top_k=3)
    scores = jnp.array([[0, 1, 0, 2, 1, 0, 0, 2], [1] * EXPERTS], jnp.float32)
    np.testing.assert_array_equal(choose_experts(scores, None, moe).ids_NK, [[3, 7, 1], [0, 1, 2]])


def test_top_k_then_softmax_is_softmax_renormalised():
    """The order in which gpt-oss takes them."""
    moe = MoeConfig(experts=EXPERTS, d_expert=1, top_k=3, renormalise=True)
    logits = draw(0, TOKENS, EXPERTS)
    got = choose_experts(router_scores(logits, moe), None, moe)
    np.testing.assert_allclose(got.weights_NK, softmax(np.sort(logits, -1)[:, ::-1][:, :3]), rtol=1e-5)


def test_weights_carry_a_gradient_and_the_selection_bias_none():
    moe = MoeConfig(experts=EXPERTS, d_expert=1, renormalise=True)
    logits, bias, c = draw(0, TOKENS, EXPERTS), draw(1, EXPERTS), draw(2, TOKENS, 2)

    def loss(logits, bias):
        return (c * choose_experts(router_scores(logits, moe), bias, moe).weights_NK).sum()

    dlogits, dbias = jax.jit(jax.grad(loss, argnums=(0, 1)))(logits, bias)
    assert (dbias == 0).all()
    ids = np.asarray(choose_experts(router_scores(logits, moe), bias, moe).ids_NK)
    rows = np.arange(TOKENS)[:, None]
    weights = softmax(logits[rows, ids])  # renormalised: a softmax over the two
    expected = np.zeros_like(logits)
    expected[rows, ids] = weights * (c - (c * weights).sum(-1, keepdims=True))
    np.testing.assert_allclose(dlogits, expected, rtol=1e-4, atol=1e-6)


def test_logits_are_float32_from_bfloat16_tokens():
    x, router = jnp.asarray(draw(0, 5, 64), jnp.bfloat16), draw(1, 64, EXPERTS)
    exact = np.asarray(x, np.float64) @ router.astype(np.float64) + 1
    got = router_logits(x, router, np.ones(EXPERTS, np.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


# Statistics and losses


def routed(moe):
    """Logits, ids (none's for padding), and which tokens are real: sequences of unlike lengths, one of them empty."""
    logits = 2 * draw(3, TOKENS, EXPERTS)
    real = (np.arange(TOKENS // SEQUENCES)[None] < np.arange(SEQUENCES)[:, None]).reshape(-1)
    ids = np.asarray(choose_experts(router_scores(logits, moe), None, moe).ids_NK)
    return logits, np.where(real[:, None], ids, EXPERTS), real


def stats_on(shape, moe, logits, ids, real, prior=None):
    """Stats, and the gradient of 0.3 load_balance + 0.1 z_loss in the logits."""

    def local(logits, ids, real, prior):
        chosen = Assignments(ids, jnp.zeros(ids.shape))
        sequences = SEQUENCES * logits.shape[0] // TOKENS
        return router_stats(logits, router_scores(logits, moe), chosen, jnp.float32(0), real, sequences, prior, moe,
                            AXES)

    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        dims = (PER_TOKEN, PER_TOKEN, ("batch",), None if prior is None else PER_EXPERT)
        run = per_device(local, dims, RouterStats(PER_EXPERT, (), (), (), (), ()))
        placed = [None if a is None else jax.device_put(a, sharding(mesh, *d))
                  for a, d in zip((logits, ids, real, prior), dims, strict=True)]

        def loss(logits, *rest):
            stats = run(logits, *rest)
            return 0.3 * stats.load_balance + 0.1 * stats.z_loss, stats

        (_, stats), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(*placed)
    return jax.tree.map(np.asarray, stats), np.asarray(grad)


def load_balance_by_hand(probs, ids, real, moe, prior):
    """From the formulas in docs/moe.md; counts are constants."""
    probs = probs / probs.sum(-1, keepdims=True)
    one_hot = np.eye(EXPERTS + 1)[ids].sum(1)[:, :EXPERTS]
    parts = [slice(None)]
    if moe.load_statistics == "sequence":
        parts = [slice(i, i + TOKENS // SEQUENCES) for i in range(0, TOKENS, TOKENS // SEQUENCES)]
    total = 0
    for part in parts:
        tokens = real[part].sum()
        if not tokens:
            continue
        counts = one_hot[part].sum(0) + (0 if prior is None else prior)
        counts = counts / counts.sum() * tokens * moe.top_k
        mean = (probs[part] * real[part, None]).sum(0) / tokens
        total += EXPERTS / moe.top_k * (mean * counts).sum()
    return total


@pytest.mark.parametrize(("statistics", "scores", "prior"), [
    ("micro_batch", "softmax", None),
    ("micro_batch", "sigmoid", None),
    ("batch", "softmax", np.arange(EXPERTS, dtype=np.float32)),
    ("sequence", "sigmoid", None),
])
def test_losses_and_counts(statistics, scores, prior):
    moe = MoeConfig(experts=EXPERTS, d_expert=1, scores=scores, load_statistics=statistics)
    logits, ids, real = routed(moe)
    stats, grad = stats_on((2, 2, 2), moe, logits, ids, real, prior)

    def losses(logits):
        exp = jnp.exp(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
        z = (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * real).sum()
        return load_balance_by_hand(exp, ids, real, moe, prior), z

    load_balance, z_loss = losses(logits)
    np.testing.assert_allclose(stats.load_balance, load_balance, rtol=1e-5)
    np.testing.assert_allclose(stats.z_loss, z_loss, rtol=1e-5)
    expected = jax.jit(jax.grad(lambda logits: 0.3 * losses(logits)[0] + 0.1 * losses(logits)[1]))(logits)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
    assert (grad[~real] == 0).all()
    np.testing.assert_array_equal(stats.counts_E, [(ids == expert).sum() for expert in range(EXPERTS)])
    assert stats.tokens == real.sum() < TOKENS
    probs = SCORES[scores](logits.astype(np.float64))
    probs = (probs / probs.sum(-1, keepdims=True))[real]
    np.testing.assert_allclose(stats.entropy, -(probs * np.log(probs)).sum(), rtol=1e-5)


def test_an_even_load_has_a_balance_of_one_a_token():
    """Whatever the statistics; so a multiplier means the same with all of them."""
    ids = np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 1) % EXPERTS], 1).astype(np.int32)
    real = np.ones(TOKENS, bool)
    for statistics, prior in (("micro_batch", None), ("batch", np.full(EXPERTS, 6, np.float32)), ("sequence", None)):
        moe = MoeConfig(experts=EXPERTS, d_expert=1, load_statistics=statistics)
        stats, _ = stats_on((1, 1, 1), moe, np.zeros((TOKENS, EXPERTS), np.float32), ids, real, prior)
        np.testing.assert_allclose(stats.load_balance, TOKENS, rtol=1e-6)


def test_no_real_token_gives_zeros():
    moe = MoeConfig(experts=EXPERTS, d_expert=1)
    nobody = np.zeros(TOKENS, bool)
    stats, grad = stats_on((1, 1, 1), moe, draw(3, TOKENS, EXPERTS), np.full((TOKENS, 2), EXPERTS, np.int32), nobody)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(stats))
    assert (grad == 0).all()


# Capacity


@pytest.mark.parametrize(("shape", "factor"), [((1, 1, 1), 1.0), ((2, 2, 2), 0.5), ((2, 2, 2), 1.3), ((2, 2, 2), 8.0)])
def test_capacity_keeps_the_first_tokens_of_the_whole_batch(shape, factor):
    moe = MoeConfig(experts=EXPERTS, d_expert=1, capacity_factor=factor)
    _, ids, real = routed(moe)

    def local(ids):
        kept, dropped = limit_capacity(Assignments(ids, jnp.zeros(ids.shape)), moe, AXES)
        return kept.ids_NK, dropped

    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        got, dropped = jax.jit(per_device(local, (PER_TOKEN,), (PER_TOKEN, ())))(
            jax.device_put(ids, sharding(mesh, *PER_TOKEN)))
    room = np.full(EXPERTS, np.ceil(factor * real.sum() * moe.top_k / EXPERTS))
    expected = ids.copy()
    for place, expert in np.ndenumerate(ids):
        if expert < EXPERTS:
            room[expert] -= 1
            if room[expert] < 0:
                expected[place] = EXPERTS
    np.testing.assert_array_equal(got, expected)
    assert dropped == (expected != ids).sum()
    assert (dropped > 0) == (factor < 2)


def test_the_bias_moves_towards_an_even_load():
    bias, counts = np.array([[0.5, 0, 0], [1, 2, 3]], np.float32), np.array([[3, 1, 2], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(updated_bias(bias, counts, 0.1), [[0.4, 0.1, 0], [1, 2, 3]], rtol=1e-6)
    np.testing.assert_allclose(updated_bias(bias[0], counts[0], 0.1), [0.4, 0.1, 0], rtol=1e-6)
