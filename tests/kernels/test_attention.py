"""Blocked attention against the plain formula, in value and gradient, over shapes that do not divide the block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import causal_attention


def plain_attention(q_BTKGH, k_BTKH, v_BTKH, segments_BT, sinks_KG, window):
    """The whole score matrix in float64, one softmax."""
    length = q_BTKGH.shape[1]
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH) / np.sqrt(q_BTKGH.shape[-1])
    t, s = np.arange(length)[:, None], np.arange(length)[None]
    visible = (s <= t) & (s > t - (window or length))
    if segments_BT is not None:
        visible = visible & (segments_BT[:, :, None] == segments_BT[:, None])[:, None, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks_KG is not None:
        sinks = jnp.broadcast_to(sinks_KG[:, :, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], -1)
    probs = jax.nn.softmax(scores, -1)[..., :length]
    return jnp.einsum("bkgts,bskw->btkgw", probs, v_BTKH)


def random_qkv(length, heads, group, seed=0, value_width=8):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, length, heads, group, 8), dtype=np.float32)
    k = rng.standard_normal((2, length, heads, 8), dtype=np.float32)
    return q, k, rng.standard_normal((2, length, heads, value_width), dtype=np.float32)


@pytest.mark.parametrize(("length", "block", "window", "heads", "group", "more"), [
    (24, 8, None, 3, 1, ""), (24, 8, 5, 2, 3, ""), (29, 8, None, 2, 3, ""), (29, 8, 1, 3, 1, ""), (29, 8, 8, 3, 1, ""),
    (29, 8, 9, 3, 1, ""), (29, 64, 5, 2, 3, ""), (29, 8, 1000, 2, 1, ""), (1, 8, None, 2, 1, ""), (1, 8, 3, 1, 2, ""),
    (300, None, None, 1, 2, ""), (300, None, 140, 2, 1, ""),
    (29, 8, None, 2, 3, "documents and sinks"), (29, 8, 9, 2, 2, "documents and sinks"),
    (24, 8, None, 2, 1, "narrow values"),
])
def test_equals_the_plain_formula(length, block, window, heads, group, more):
    q, k, v = random_qkv(length, heads, group, value_width=5 if "narrow" in more else 8)
    segments = sinks = None
    if "documents" in more:
        segments = np.sort(np.arange(2 * length).reshape(2, length) * 7 % 4).astype(np.int32)
        sinks = np.linspace(-1, 3, heads * group, dtype=np.float32).reshape(heads, group)
    weight = np.random.default_rng(1).standard_normal((*q.shape[:-1], v.shape[-1]), dtype=np.float32)

    def value_and_gradients(attend, q, k, v, sinks):
        def loss(arrays):
            q, k, v, sinks = arrays
            return (attend(q, k, v, segments, sinks, window=window) * weight).sum()
        return jax.jit(jax.value_and_grad(loss))((q, k, v, sinks))

    with jax.enable_x64(True):
        exact, exact_grads = value_and_gradients(plain_attention, *(None if x is None else x.astype(np.float64)
                                                                    for x in (q, k, v, sinks)))
    got, grads = value_and_gradients(functools.partial(causal_attention, block=block), q, k, v, sinks)
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-4)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_window_layer_sees_exactly_its_window():
    """Query i sees keys i - window + 1 ... i: changing key i - window changes nothing, changing i - window + 1 does."""
    q, k, v = random_qkv(20, 1, 1)
    base = causal_attention(q, k, v, window=6, block=4)
    outside, inside = v.copy(), v.copy()
    outside[:, 15 - 6] += 1
    inside[:, 15 - 5] += 1
    np.testing.assert_array_equal(causal_attention(q, k, outside, window=6, block=4)[:, 15], base[:, 15])
    assert not np.allclose(causal_attention(q, k, inside, window=6, block=4)[:, 15], base[:, 15])


def test_masked_blocks_are_not_computed():
    """The matmul work of a window layer grows with T * window, not T * T."""
    def flops(window):
        shapes = (1, 2048, 1, 1, 64), (1, 2048, 1, 64), (1, 2048, 1, 64)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(lambda *qkv: causal_attention(*qkv, window=window)).lower(*args).compile()
        return compiled.cost_analysis()["flops"]

    every_pair = 4 * 2048 * 2048 * 64  # two matmuls over the whole square
    assert flops(None) < 0.65 * every_pair
    assert flops(128) < 0.2 * every_pair
