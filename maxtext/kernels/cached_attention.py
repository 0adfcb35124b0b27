"""Attention of one new position of each row over positions that are kept in a cache.

A cache of S slots holds position p of a row in slot p modulo S. So one that is as long as a row holds all of it, and a
shorter one holds the newest S positions.

Dims: B batch, S slot, K key/value head, G query heads of one key/value head, H head width, W width of a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxtext.kernels.attention import MASKED, softmax


def held_positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """The position in each slot once a row has `lengths_B` positions, (B, S); below 0: none yet."""
    newest_B1 = lengths_B[:, None] - 1
    return newest_B1 - (newest_B1 - jnp.arange(slots)[None]) % slots


def cached_attention(q_B1KGH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, k_B1KH: jax.Array, v_B1KW: jax.Array,
                     lengths_B: jax.Array, sinks_KG: jax.Array | None = None, window: int | None = None,
                     scale: float | None = None) -> jax.Array:
    """Softmax attention of the position after the cached ones, over these and itself.

    Args:
      q_B1KGH, k_B1KH, v_B1KW: query, key and value of the new position, which is not in the cache yet.
      k_BSKH, v_BSKW: the cache.
      lengths_B: positions of each row before the new one, int32.
      sinks_KG, window, scale: as of `causal_attention`.

    Returns:
      (B, 1, K, G, W) in the dtype of the values. Scores and softmax are float32.
    """
    scale = q_B1KGH.shape[-1] ** -0.5 if scale is None else scale
    held_BS = held_positions(lengths_B, k_BSKH.shape[1])
    seen_BS = held_BS >= 0
    if window is not None:
        seen_BS &= held_BS > lengths_B[:, None] - window
    old_BKG1S, new_BKG11 = (jnp.einsum("btkgh,bskh->bkgts", q_B1KGH, keys, preferred_element_type=jnp.float32) * scale
                            for keys in (k_BSKH, k_B1KH))
    old_BKG1S = jnp.where(seen_BS[:, None, None, None], old_BKG1S, MASKED)
    probs = softmax(jnp.concatenate([old_BKG1S, new_BKG11], axis=-1), sinks_KG).astype(v_BSKW.dtype)
    old, new = (jnp.einsum("bkgts,bskw->btkgw", part, values, preferred_element_type=jnp.float32)
                for part, values in ((probs[..., :-1], v_BSKW), (probs[..., -1:], v_B1KW)))
    return (old + new).astype(v_BSKW.dtype)
