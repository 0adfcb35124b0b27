"""Norm, rotary embedding and feed-forward.

Dims: B batch, T position, N = B T, D model width, F feed-forward width, K key/value head, G query heads of one, H head
width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.architecture import Activation, ModelConfig, RopeScalingConfig
from maxtext.parallel.sharding import Param, gather, spec

CLIP, SLOPE = 7.0, 1.702  # of clamped_swish (gpt-oss, 2025)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, dims: int = 1) -> jax.Array:
    """Root-mean-square norm over the last `dims` dims, in float32; the gain is applied before rounding back.

    Source: Zhang and Sennrich 2019; order of rounding as in OLMo-core nn/layer_norm.py (unlike Llama's).
    """
    over = tuple(range(-dims, 0))
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, over, keepdims=True) + eps)
    return (normed * gain.astype(jnp.float32)).astype(x.dtype)


class Rope(NamedTuple):
    """Cosine and sine of each position's angles, (T, H/2) or (B, T, H/2) float32."""

    cos: jax.Array
    sin: jax.Array


def rope_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2i/H) for i < H/2, float32 (Su et al. 2021)."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # The power is rounded once, from float64: as torch's own float32 power, and unlike numpy's, whose last bit is off
    # in every sixth entry. At position 500 that bit moves the angle by 2e-5.
    powers = (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


def yarn(frequencies: np.ndarray, theta: float, scaling: RopeScalingConfig) -> tuple[np.ndarray, float]:
    """Stretches frequencies to a longer context (Peng et al. 2023).

    Those that turn more than beta_fast times within the old context stay, those below beta_slow turns are divided by
    the factor, those between are mixed linearly; the borders are rounded outwards to whole indices.

    Returns:
      (frequencies float32, attention factor that multiplies cosine and sine).
    """
    width = 2 * len(frequencies)

    def index_of(turns: float) -> float:
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), width // 2 - 1)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    stretched = frequencies / np.float32(scaling.factor) * ramp + frequencies * (1 - ramp)
    return stretched.astype(np.float32), 0.1 * math.log(scaling.factor) + 1.0


def rope_tables(cfg: ModelConfig, positions: jax.Array, scaled: bool) -> Rope:
    """Tables for int32 positions, (T,) or (B, T); `scaled` applies the model's stretching."""
    frequencies, factor = rope_frequencies(cfg.head_width, cfg.rope_theta), 1.0
    if scaled and cfg.rope_scaling.kind == "yarn":
        frequencies, factor = yarn(frequencies, cfg.rope_theta, cfg.rope_scaling)
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return Rope(jnp.cos(angle) * factor, jnp.sin(angle) * factor)


def document_positions(segments_BT: jax.Array) -> jax.Array:
    """Position of each token in its own document: it restarts at 0 wherever the document number changes."""
    index_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    first_B1 = jnp.ones_like(segments_BT[:, :1], bool)
    starts_BT = jnp.concatenate([first_B1, segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    return index_BT - jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates (B, T, ..., H): the first half of H pairs with the second. Computed in float32."""
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.ndim - 3), table.shape[-1]) for table in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def activate(gate: jax.Array, up: jax.Array, kind: Activation) -> jax.Array:
    """The gated hidden state of a feed-forward: SwiGLU, GeGLU (Shazeer 2020), or gpt-oss's clipped form of SwiGLU."""
    if kind == "silu":
        return jax.nn.silu(gate) * up
    if kind == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate, up = jnp.minimum(gate, CLIP), jnp.clip(up, -CLIP, CLIP)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)


@flax.struct.dataclass
class Mlp:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    gate_up: jax.Array  # D 2 F
    down: jax.Array  # F D


def mlp_params(cfg: ModelConfig) -> Mlp:
    return Mlp(
        gate_up=Param((cfg.d_model, 2, cfg.d_ff), ("embed", None, "mlp")),
        down=Param((cfg.d_ff, cfg.d_model), ("mlp", "embed")),
    )


def mlp(p: Mlp, x_BTD: jax.Array) -> jax.Array:
    # Tokens in one dim and two plain matmuls: XLA's CPU compiler runs these a third faster, and others the same.
    x_ND = jax.lax.reshape(x_BTD, (x_BTD.shape[0] * x_BTD.shape[1], x_BTD.shape[2]), out_sharding=spec("batch", None))
    weights = gather(p.gate_up, "embed", None, "mlp")
    gate_NF, up_NF = (checkpoint_name(x_ND @ weights[:, i], "gate_up") for i in range(2))
    hidden_NF = jax.nn.silu(gate_NF) * up_NF
    out_ND = jnp.einsum("nf,fd->nd", hidden_NF, gather(p.down, "mlp", "embed"), out_sharding=spec("batch", None))
    out_BTD = jax.lax.reshape(out_ND, x_BTD.shape, out_sharding=spec("batch", None, None))
    return checkpoint_name(out_BTD, "mlp_out")
