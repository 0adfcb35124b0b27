"""Grouped-query self-attention with QK-norm over the whole projection and rotary positions.

Query, key and value weights are one array, grouped by key/value head: each group holds G query heads, one key head and
one value head. So one matmul makes all three, and the heads split over the tensor axis by whole groups. Query head
k * G + g belongs to key/value head k, which is the usual order of heads.

Dims: B batch, T position, D model width, K key/value head, G query heads of one, H head width.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.schema import ModelConfig
from maxtext.kernels.attention import causal_attention
from maxtext.model.layers import Rope, apply_rope, rms_norm
from maxtext.parallel.sharding import Param, gather, per_device, spec


@flax.struct.dataclass
class Attention:
    qkv: jax.Array  # D K G+2 H
    out: jax.Array  # K G H D
    q_norm: jax.Array | None = None  # K G H
    k_norm: jax.Array | None = None  # K H


def attention_params(cfg: ModelConfig) -> Attention:
    heads, group, width = cfg.kv_heads, cfg.n_heads // cfg.kv_heads, cfg.head_width
    normed = cfg.qk_norm == "projection"
    return Attention(
        qkv=Param((cfg.d_model, heads, group + 2, width), ("embed", "heads", None, None)),
        out=Param((heads, group, width, cfg.d_model), ("heads", None, None, "embed")),
        q_norm=Param((heads, group, width), ("heads", None, None), init="ones") if normed else None,
        k_norm=Param((heads, width), ("heads", None), init="ones") if normed else None,
    )


def attention(p: Attention, x_BTD: jax.Array, segments_BT: jax.Array | None, rope: Rope, window: int | None,
              norm_eps: float) -> jax.Array:
    """Self-attention of (B, T, D) in its own dtype; `window` tokens are visible, or all earlier ones when None."""
    qkv = gather(p.qkv, "embed", "heads", None, None)
    qkv_BTKJH = checkpoint_name(jnp.einsum("btd,dkjh->btkjh", x_BTD, qkv), "qkv")
    q_BTKGH, k_BTKH, v_BTKH = qkv_BTKJH[..., :-2, :], qkv_BTKJH[..., -2, :], qkv_BTKJH[..., -1, :]
    if p.q_norm is not None and p.k_norm is not None:
        q_BTKGH = rms_norm(q_BTKGH, p.q_norm, norm_eps, dims=3)
        k_BTKH = rms_norm(k_BTKH, p.k_norm, norm_eps, dims=2)
    q_BTKGH, k_BTKH = apply_rope(q_BTKGH, rope), apply_rope(k_BTKH, rope)
    heads, keys = ("batch", None, "heads", None, None), ("batch", None, "heads", None)
    segments = None if segments_BT is None else ("batch", None)
    attend = per_device(functools.partial(causal_attention, window=window), (heads, keys, keys, segments), heads)
    attended_BTKGH = checkpoint_name(attend(q_BTKGH, k_BTKH, v_BTKH, segments_BT), "attention")
    out = gather(p.out, "heads", None, None, "embed")
    out_BTD = jnp.einsum("btkgh,kghd->btd", attended_BTKGH, out, out_sharding=spec("batch", None, None))
    return checkpoint_name(out_BTD, "attention_out")
