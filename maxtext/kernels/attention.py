"""Causal attention, blocked over queries so that neither the T x T scores nor keys that no query sees are computed.

Dims: B batch, T query position, S key position, K key/value head, G query heads of one key/value head, H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 64  # queries in one block at short lengths; measured best of 64, 128, 256 on CPU
MOST_BLOCKS = 16  # the loop over blocks is unrolled, so longer sequences take larger blocks
MASKED = -1e30  # finite: a row is never all masked, and exp of the difference is exactly 0


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
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 1, 3)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = 0 if window is None else max(0, start - window + 1)
        same_document = None
        if segments_BT is not None:
            same_document = segments_BT[:, start:stop, None] == segments_BT[:, None, first:stop]
        outputs.append(_attend(q_BKGTH[:, :, :, start:stop], k_BKTH[:, :, first:stop], v_BKTH[:, :, first:stop],
                               start - first, window, scale, same_document, sinks_KG))
    return jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4)


def _attend(q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, offset: int, window: int | None, scale: float,
            same_document_BTS: jax.Array | None, sinks_KG: jax.Array | None) -> jax.Array:
    """One block: query t stands at key position offset + t."""
    scores_BKGTS = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32) * scale
    t, s = jnp.arange(q_BKGTH.shape[3])[:, None] + offset, jnp.arange(k_BKSH.shape[2])[None]
    visible_TS = (s <= t) if window is None else (s <= t) & (s > t - window)
    visible = visible_TS if same_document_BTS is None else visible_TS & same_document_BTS[:, None, None]
    probs_BKGTS = softmax(jnp.where(visible, scores_BKGTS, MASKED), sinks_KG)
    return jnp.einsum("bkgts,bksh->bkgth", probs_BKGTS.astype(v_BKSH.dtype), v_BKSH)


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
