"""Causal attention, blocked over queries so that neither the T x T scores nor keys that no query sees are computed.

The backward pass is written out: XLA's transpose of the slices is a sum of padded arrays, which cost a CPU more than
the matmuls. It has the form of Dao et al. 2022, "FlashAttention", which needs no more of the forward pass than its
output and each softmax's peak and sum; whether scores are kept or computed again is the compiler's choice.

Dims: B batch, T query position, S key position, K key/value head, G query heads of one key/value head, H head width,
W width of a value, N = B K, Q = G T.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.parallel.collectives import vary, varying_axes

BLOCK = 64  # queries in one block at short lengths; measured best of 64, 128, 256 on CPU
MOST_BLOCKS = 16  # the loop over blocks is unrolled, so longer sequences take larger blocks
MASKED = -1e30  # finite: a row is never all masked, and exp of the difference is exactly 0


class _Plan(NamedTuple):
    """What is known when the program is made."""

    window: int | None
    scale: float
    block: int


class _Range(NamedTuple):
    """Queries [start, stop) and the keys [first, stop) that any of them sees; `first` is a multiple of the block."""

    start: int
    stop: int
    first: int


def causal_attention(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None = None,
                     sinks_KG: jax.Array | None = None, window: int | None = None, scale: float | None = None,
                     block: int | None = None) -> jax.Array:
    """Softmax attention of each position over itself and earlier ones.

    Args:
      q_BTKGH: queries; head k * G + g attends to key/value head k.
      k_BTKH, v_BTKH: keys and values; values may have a width of their own.
      segments_BT: int32 number of the document of each position; attention stays inside it. None: one document.
      sinks_KG: a score of each head that takes its share of the softmax and gives nothing (Xiao et al. 2023).
      window: how many positions each query sees, itself included; None for all earlier ones.
      scale: multiplies the scores; None: 1/sqrt(H).
      block: queries in a block; chosen from T by default. The result does not depend on it beyond rounding.

    Returns:
      (B, T, K, G, H) in the dtype of `v`. Scores and softmax are float32.
    """
    length = q_BTKGH.shape[1]
    scale = q_BTKGH.shape[-1] ** -0.5 if scale is None else scale
    block = min(length, max(BLOCK, -(-length // MOST_BLOCKS))) if block is None else block
    arrays = q_BTKGH, k_BTKH, v_BTKH, segments_BT, sinks_KG
    return _attention(_Plan(window, scale, block), *vary(arrays, varying_axes(*jax.tree.leaves(arrays))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None,
               sinks_KG: jax.Array | None) -> jax.Array:
    return _forward(plan, q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG)[0]


def _forward(plan: _Plan, q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None,
             sinks_KG: jax.Array | None) -> tuple[jax.Array, tuple]:
    q_BKGTH, k_NTH, v_NTW = _by_head(q_BTKGH), _folded(k_BTKH), _folded(v_BTKW)
    outputs, peaks, sums = [], [], []
    for at in _ranges(q_BTKGH.shape[1], plan):
        scores_BKGTS = _scores(plan, at, q_BKGTH, k_NTH, segments_BT)
        peak_BKGT1 = scores_BKGTS.max(-1, keepdims=True)
        if sinks_KG is not None:
            sinks_KG11 = sinks_KG.astype(jnp.float32)[:, :, None, None]
            peak_BKGT1 = jnp.maximum(peak_BKGT1, sinks_KG11)
        exp_BKGTS = jnp.exp(scores_BKGTS - peak_BKGT1)
        sum_BKGT1 = exp_BKGTS.sum(-1, keepdims=True)
        if sinks_KG is not None:
            sum_BKGT1 += jnp.exp(sinks_KG11 - peak_BKGT1)
        out_NQW = _matmul(_rows(exp_BKGTS).astype(v_NTW.dtype), v_NTW[:, at.first : at.stop], 2, 1)
        outputs.append(out_NQW.reshape(*exp_BKGTS.shape[:-1], -1) / sum_BKGT1)  # W wide, so fewer divisions than of exp
        peaks.append(peak_BKGT1)
        sums.append(sum_BKGT1)
    out_BTKGW = jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4).astype(v_BTKW.dtype)
    # Named as the model names the output: who keeps that keeps all that the backward pass needs besides q, k and v.
    out_BTKGW = checkpoint_name(out_BTKGW, "attention")
    norms = checkpoint_name((jnp.concatenate(peaks, axis=3), jnp.concatenate(sums, axis=3)), "attention")
    return out_BTKGW, (q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG, out_BTKGW, *norms)


def _backward(plan: _Plan, saved: tuple, dout_BTKGW: jax.Array) -> tuple:
    q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG, out_BTKGW, peak_BKGT1, sum_BKGT1 = saved
    q_BKGTH, k_NTH, v_NTW, dout_BKGTW = _by_head(q_BTKGH), _folded(k_BTKH), _folded(v_BTKW), _by_head(dout_BTKGW)
    # The sum over keys of p * dp, by way of the output.
    mean_BTKG1 = (dout_BTKGW.astype(jnp.float32) * out_BTKGW.astype(jnp.float32)).sum(-1, keepdims=True)
    mean_BKGT1 = _by_head(mean_BTKG1)
    ranges = _ranges(q_BTKGH.shape[1], plan)
    dq, dk, dv = [], [[] for _ in ranges], [[] for _ in ranges]
    for at in ranges:
        queries, keys = slice(at.start, at.stop), slice(at.first, at.stop)
        # Not exp(scores - log of the sum): the log's rounding would scale all of a row.
        exp_BKGTS = jnp.exp(_scores(plan, at, q_BKGTH, k_NTH, segments_BT) - peak_BKGT1[:, :, :, queries])
        probs_BKGTS = exp_BKGTS * (1 / sum_BKGT1[:, :, :, queries])
        dout_NQW, q_NQH = _rows(dout_BKGTW[:, :, :, queries]), _rows(q_BKGTH[:, :, :, queries])
        dprobs_BKGTS = _matmul(dout_NQW, v_NTW[:, keys], 2, 2).reshape(probs_BKGTS.shape)
        dscores_BKGTS = probs_BKGTS * (dprobs_BKGTS - mean_BKGT1[:, :, :, queries]) * plan.scale
        dscores_NQS = _rows(dscores_BKGTS).astype(q_BTKGH.dtype)
        dq.append(_matmul(dscores_NQS, k_NTH[:, keys], 2, 1).reshape(*probs_BKGTS.shape[:-1], -1))
        for sums, part in ((dk, _matmul(dscores_NQS, q_NQH, 1, 1)),
                           (dv, _matmul(_rows(probs_BKGTS).astype(v_BTKW.dtype), dout_NQW, 1, 1))):
            for first in range(at.first, at.stop, plan.block):  # in whole blocks, so that each sum is of equal shapes
                sums[first // plan.block].append(part[:, first - at.first : first - at.first + plan.block])
    dsinks_KG = None
    if sinks_KG is not None:
        share_BKGT1 = jnp.exp(sinks_KG.astype(jnp.float32)[:, :, None, None] - peak_BKGT1) / sum_BKGT1
        dsinks_KG = -(share_BKGT1 * mean_BKGT1).sum((0, 3, 4)).astype(sinks_KG.dtype)
    return (jnp.concatenate(dq, axis=3).transpose(0, 3, 1, 2, 4).astype(q_BTKGH.dtype),
            _unfolded(dk, k_BTKH), _unfolded(dv, v_BTKW), None, dsinks_KG)


_attention.defvjp(_forward, _backward)


def _ranges(length: int, plan: _Plan) -> list[_Range]:
    ranges = []
    for start in range(0, length, plan.block):
        first = 0 if plan.window is None else max(0, start - plan.window + 1) // plan.block * plan.block
        ranges.append(_Range(start, min(start + plan.block, length), first))
    return ranges


def _scores(plan: _Plan, at: _Range, q_BKGTH: jax.Array, k_NTH: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """Scaled scores of one block of queries, float32, MASKED where a key is not seen."""
    queries, keys = slice(at.start, at.stop), slice(at.first, at.stop)
    q_BKGTH = q_BKGTH[:, :, :, queries]
    scores_NQS = _matmul(_rows(q_BKGTH), k_NTH[:, keys], 2, 2)
    t, s = jnp.arange(at.start, at.stop)[:, None], jnp.arange(at.first, at.stop)[None]
    visible = (s <= t) if plan.window is None else (s <= t) & (s > t - plan.window)
    if segments_BT is not None:
        visible = visible & (segments_BT[:, queries, None] == segments_BT[:, None, keys])[:, None, None]
    return jnp.where(visible, scores_NQS.reshape(*q_BKGTH.shape[:-1], -1) * plan.scale, MASKED)


def _matmul(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """For each of N, the product over these dims. All matmuls have one batch dim: XLA's CPU compiler likes these."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _by_head(x_BTKGH: jax.Array) -> jax.Array:
    return x_BTKGH.transpose(0, 2, 3, 1, 4)


def _rows(x_BKGTH: jax.Array) -> jax.Array:
    """(N, Q, H): the query heads of one key/value head, one below another."""
    batch, heads, group, length, width = x_BKGTH.shape
    return x_BKGTH.reshape(batch * heads, group * length, width)


def _folded(x_BTKH: jax.Array) -> jax.Array:
    """(N, T, H)."""
    batch, length, heads, width = x_BTKH.shape
    return x_BTKH.transpose(0, 2, 1, 3).reshape(batch * heads, length, width)


def _unfolded(parts: list[list[jax.Array]], like_BTKH: jax.Array) -> jax.Array:
    """(B, T, K, H) from what was added to each block of keys."""
    batch, length, heads, width = like_BTKH.shape
    x_NTH = jnp.concatenate([functools.reduce(jnp.add, block) for block in parts], axis=1)
    return x_NTH.reshape(batch, heads, length, width).transpose(0, 2, 1, 3).astype(like_BTKH.dtype)


def softmax(scores_BKGTS: jax.Array, sinks_KG: jax.Array | None = None) -> jax.Array:
    """Softmax over the last dim in float32; a sink takes part in the sum alone."""
    peak_BKGT1 = jax.lax.stop_gradient(scores_BKGTS.max(-1, keepdims=True))
    if sinks_KG is None:
        exp_BKGTS = jnp.exp(scores_BKGTS - peak_BKGT1)
        return exp_BKGTS / exp_BKGTS.sum(-1, keepdims=True)
    sinks_KG11 = sinks_KG.astype(jnp.float32)[:, :, None, None]
    peak_BKGT1 = jnp.maximum(peak_BKGT1, jax.lax.stop_gradient(sinks_KG11))
    exp_BKGTS = jnp.exp(scores_BKGTS - peak_BKGT1)
    return exp_BKGTS / (exp_BKGTS.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - peak_BKGT1))
