"""Blocked attention against the plain formula, in value and gradient, over shapes that do not divide the block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import causal_attention


def plain_attention(q_BTKGH, k_BTKH, v_BTKH, window):
    """The whole score matrix in float64, one softmax."""
    length = q_BTKGH.shape[1]
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH) / np.sqrt(q_BTKGH.shape[-1])
    t, s = np.arange(length)[:, None], np.arange(length)[None]
    visible = (s <= t) & (s > t - (window or length))
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1), v_BTKH)


def random_qkv(length, heads, group, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, length, heads, group, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, length, heads, 8), dtype=np.float32)
    return q, k, v


@pytest.mark.parametrize(("length", "block", "window", "heads", "group"), [
    (24, 8, None, 3, 1), (24, 8, 5, 2, 3), (29, 8, None, 2, 3), (29, 8, 1, 3, 1), (29, 8, 8, 3, 1), (29, 8, 9, 3, 1),
    (29, 64, 5, 2, 3), (29, 8, 1000, 2, 1), (1, 8, None, 2, 1), (1, 8, 3, 1, 2), (300, None, None, 1, 2),
    (300, None, 140, 2, 1),
])
def test_equals_the_plain_formula(length, block, window, heads, group):
    q, k, v = random_qkv(length, heads, group)
    weight = np.random.default_rng(1).standard_normal(q.shape, dtype=np.float32)

    def value_and_gradients(attend, *args):
        return jax.jit(jax.value_and_grad(lambda *qkv: (attend(*qkv) * weight).sum(), argnums=(0, 1, 2)))(*args)

    with jax.enable_x64(True):
        exact, exact_grads = value_and_gradients(lambda *qkv: plain_attention(*qkv, window),
                                                 *(x.astype(np.float64) for x in (q, k, v)))
    got, grads = value_and_gradients(lambda *qkv: causal_attention(*qkv, window=window, block=block), q, k, v)
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-4)
    for a, b in zip(grads, exact_grads, strict=True):
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
