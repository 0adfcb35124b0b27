"""Grouped-query self-attention with rotary positions, and what all kinds of attention share.

Query, key and value weights are one array, grouped by key/value head: each group holds G query heads, one key head and
one value head. So one matmul makes all three, and the heads split over the tensor axis by whole groups. Query head
k * G + g belongs to key/value head k, which is the usual order of heads.

Dims: B batch, T position, D model width, K key/value head, G query heads of one, H head width.
"""

from __future__ import annotations

import functools
import math

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.schema import DEFAULT_EXECUTION, Execution, ModelConfig
from maxtext.kernels import attention as blocked
from maxtext.kernels import cudnn, splash
from maxtext.kernels.choice import Problem, choose_attention
from maxtext.kernels.context_attention import context_attention
from maxtext.model.layers import Rope, apply_rope, gathered_linear, norm_param, rms_norm
from maxtext.parallel.collectives import platform
from maxtext.parallel.positions import CONTEXT, positions_dim, unshare
from maxtext.parallel.sharding import Param, per_device, spec
from maxtext.parallel.show import tree_text

QUERIES, KEYS, SINKS = ("batch", None, "heads", None, None), ("batch", None, "heads", None), ("heads", None)

KERNELS = {"blocked": blocked.causal_attention, "splash": splash.causal_attention, "cudnn": cudnn.causal_attention}


@flax.struct.dataclass
class Attention:
    qkv: jax.Array  # D K G+2 H
    out: jax.Array  # K G H D
    q_norm: jax.Array | None = None  # K G H of the whole projection, H of each head
    k_norm: jax.Array | None = None  # K H, H
    qkv_bias: jax.Array | None = None  # K G+2 H
    out_bias: jax.Array | None = None  # D
    sinks: jax.Array | None = None  # K G

    __repr__ = tree_text


def attention_params(cfg: ModelConfig) -> Attention:
    heads, group, width = cfg.kv_heads, cfg.n_heads // cfg.kv_heads, cfg.head_width
    q_norm, k_norm = {
        "projection": (norm_param(cfg, (heads, group, width), ("heads", None, None)),
                       norm_param(cfg, (heads, width), ("heads", None))),
        "head": (norm_param(cfg, (width,), (None,)),) * 2,
        "none": (None, None),
    }[cfg.qk_norm]
    return Attention(
        qkv=Param((cfg.d_model, heads, group + 2, width), ("embed", "heads", None, None)),
        out=Param((heads, group, width, cfg.d_model), ("heads", None, None, "embed")),
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=None if cfg.attention_bias == "none" else Param((heads, group + 2, width), ("heads", None, None),
                                                                 init="zeros"),
        out_bias=Param((cfg.d_model,), (None,), init="zeros") if cfg.attention_bias == "all" else None,
        sinks=Param((heads, group), ("heads", None), init="zeros") if cfg.attention_sinks else None,
    )


def attention(p: Attention, x_BTD: jax.Array, segments_BT: jax.Array | None, rope: Rope, window: int | None,
              cfg: ModelConfig, how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """Self-attention of (B, T, D) in its own dtype; `window` tokens are visible, or all earlier ones when None."""
    q_BTKGH, k_BTKH, v_BTKH = project(p, unshare(x_BTD), rope, cfg, how)
    attended_BTKGH = attend(q_BTKGH, k_BTKH, v_BTKH, segments_BT, p.sinks, window, cfg, how)
    return project_out(p, attended_BTKGH, positions_dim(x_BTD), how)


def project(p: Attention, x_BTD: jax.Array, rope: Rope, cfg: ModelConfig, how: Execution = DEFAULT_EXECUTION
            ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (B, T, K, G, H), keys and values (B, T, K, H), normed and rotated."""
    dims = "embed", "heads", None, None
    qkv_BTKJH = checkpoint_name(gathered_linear(x_BTD, p.qkv, dims, how.quant.of("dense")), "qkv")
    if p.qkv_bias is not None:
        qkv_BTKJH += p.qkv_bias
    q_BTKGH, k_BTKH, v_BTKH = qkv_BTKJH[..., :-2, :], qkv_BTKJH[..., -2, :], qkv_BTKJH[..., -1, :]
    if p.q_norm is not None and p.k_norm is not None:
        q_BTKGH = rms_norm(q_BTKGH, p.q_norm, cfg, dims=p.q_norm.ndim)
        k_BTKH = rms_norm(k_BTKH, p.k_norm, cfg, dims=p.k_norm.ndim)
    return apply_rope(q_BTKGH, rope, cfg.rope_pairs), apply_rope(k_BTKH, rope, cfg.rope_pairs), v_BTKH


def attend(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None,
           sinks_KG: jax.Array | None, window: int | None, cfg: ModelConfig, how: Execution = DEFAULT_EXECUTION
           ) -> jax.Array:
    """What each query head reads, (B, T, K, G, H of the values), by the kernel that the platform has for it."""
    problem = Problem(q_BTKGH.dtype.name, q_BTKGH.shape[-1], v_BTKH.shape[-1], segments_BT is not None,
                      sinks_KG is not None)
    kind, rows = choose_attention(how.kernels.attention, platform(), problem).kind, ("batch", positions_dim(q_BTKGH))
    kernel, named = KERNELS[kind], kind != "cudnn"
    if rows[1] is not None:
        kernel = functools.partial(context_attention, axis=CONTEXT, strategy=how.context_strategy, inner=kernel,
                                   kernel="splash" if kind == "splash" else "blocked")
        named = named or how.context_strategy != "ulysses"
    kernel = functools.partial(kernel, window=window, scale=score_scale(cfg, window))
    queries, keys = (*rows, "heads", None, None), (*rows, "heads", None)
    dims = (queries, keys, keys, None if segments_BT is None else rows, None if sinks_KG is None else SINKS)
    out_BTKGH = per_device(kernel, dims, queries)(q_BTKGH, k_BTKH, v_BTKH, segments_BT, sinks_KG)
    # Some name by themselves what their backward pass needs: a second copy would be kept for nothing.
    return out_BTKGH if named else checkpoint_name(out_BTKGH, "attention")


def project_out(p: Attention, attended_BTKGH: jax.Array, positions: str | None = None,
                how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """What attention adds to the residual stream, (B, T, D), its T split over the mesh as `positions` says."""
    out_BTD = gathered_linear(attended_BTKGH, p.out, ("heads", None, None, "embed"), how.quant.of("dense"), 3,
                              spec("batch", positions, None))
    return checkpoint_name(out_BTD if p.out_bias is None else out_BTD + p.out_bias, "attention_out")


def score_scale(cfg: ModelConfig, window: int | None) -> float:
    """Multiplier of the attention scores; with `mscale_all_dim` it grows with the stretching, as DeepSeek's does."""
    scale, scaling = cfg.attention_scale or cfg.head_width ** -0.5, cfg.rope_scaling
    if scaling.kind == "yarn" and (window is None or scaling.window_layers):
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
    return scale
