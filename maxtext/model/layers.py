"""Norm, rotary embedding and feed-forward.

Dims: B batch, T position, N = B T, D model width, F feed-forward width, K key/value head, G query heads of one, H head
width.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxtext.config.architecture import Activation, ModelConfig, RopePairs, RopeScalingConfig
from maxtext.config.schema import QuantConfig
from maxtext.kernels.quantized import matmul
from maxtext.parallel.collectives import platform
from maxtext.parallel.positions import positions_dim, unshare
from maxtext.parallel.sharding import Param, gather, spec
from maxtext.parallel.show import tree_text

CLAMP, CLAMPED_SLOPE = 7.0, 1.702  # of clamped_swish: gpt-oss, 2025


def rms_norm(x: jax.Array, gain: jax.Array, cfg: ModelConfig, dims: int = 1) -> jax.Array:
    """Root-mean-square norm over the last `dims` dims, in float32; the gain is applied before rounding back.

    The gain is the weight, or 1 plus the weight (`cfg.norm_gain`).

    Source: Zhang and Sennrich 2019; order of rounding as in OLMo-core nn/layer_norm.py (unlike Llama's).
    """
    over = tuple(range(-dims, 0))
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, over, keepdims=True) + cfg.norm_eps)
    gain32 = gain.astype(jnp.float32)
    return (normed * (1 + gain32 if cfg.norm_gain == "one_plus_weight" else gain32)).astype(x.dtype)


def norm_param(cfg: ModelConfig, shape: tuple[int, ...], dims: tuple[str | None, ...]) -> Param:
    """The weight of a norm, drawn so that it starts as the identity."""
    return Param(shape, dims, init="ones" if cfg.norm_gain == "weight" else "zeros")


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


def stretched(frequencies: np.ndarray, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Frequencies for a longer context, float32.

    A frequency that turns often within the old context stays, one that turns rarely is divided by the factor, and those
    between are mixed. yarn mixes linearly in the index (Peng et al. 2023), llama3 linearly in the number of turns
    (Llama 3, 2024), linear divides all.
    """
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        slow = np.ones_like(frequencies)
    elif scaling.kind == "llama3":
        turns = scaling.original_length * frequencies / np.float32(2 * math.pi)
        slow = 1 - (turns - scaling.beta_slow) / (scaling.beta_fast - scaling.beta_slow)
    else:
        slow = _yarn_ramp(len(frequencies), theta, scaling)
    slow = np.clip(slow, 0, 1).astype(np.float32)
    return (frequencies / np.float32(scaling.factor) * slow + frequencies * (1 - slow)).astype(np.float32)


def _yarn_ramp(count: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Not yet clipped share of the slow frequency, for each index."""
    width = 2 * count

    def index_of(turns: float) -> float:
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, count - 1)
    return (np.arange(count, dtype=np.float32) - low) / max(high - low, 1e-3)


def table_factor(scaling: RopeScalingConfig) -> float:
    """What yarn multiplies cosine and sine by (Peng et al. 2023, section 3.4); with `mscale_all_dim`, as DeepSeek."""
    if scaling.kind != "yarn":
        return 1.0
    slope = 0.1 * math.log(scaling.factor)
    return (slope * scaling.mscale + 1) / (slope * scaling.mscale_all_dim + 1)


def rope_tables(cfg: ModelConfig, positions: jax.Array, window: bool) -> Rope:
    """Tables of window or of full layers, for int32 positions, (T,) or (B, T)."""
    theta = cfg.window_rope_theta if window and cfg.window_rope_theta is not None else cfg.rope_theta
    frequencies, factor = rope_frequencies(cfg.rope_width, theta), 1.0
    if not window or cfg.rope_scaling.window_layers:
        frequencies, factor = stretched(frequencies, theta, cfg.rope_scaling), table_factor(cfg.rope_scaling)
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return Rope(jnp.cos(angle) * factor, jnp.sin(angle) * factor)


def document_positions(segments_BT: jax.Array) -> jax.Array:
    """Position of each token in its own document: it restarts at 0 wherever the document number changes."""
    index_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    first_B1 = jnp.ones_like(segments_BT[:, :1], bool)
    starts_BT = jnp.concatenate([first_B1, segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    return index_BT - jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)


def apply_rope(x: jax.Array, rope: Rope, pairs: RopePairs = "halves") -> jax.Array:
    """Rotates (B, T, ..., H) in float32: dim i turns with dim i + H/2, or with its neighbour i + 1.

    A TPU's vectors are 128 wide and not easily cut, so there a matmul with a matrix of 0, 1 and -1 brings each dim its
    partner; the result is the same to the bit.
    """
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.ndim - 3), table.shape[-1]) for table in rope)
    if platform() == "tpu":
        return _turn(pairs, x, _both(cos, pairs), _both(sin, pairs))
    x32 = x.astype(jnp.float32)
    if pairs == "halves":  # one sum, which XLA compiles in three quarters of the time of two halves
        first, second = jnp.split(x32, 2, axis=-1)
        partner = jnp.concatenate([-second, first], axis=-1)
        return (x32 * _both(cos, pairs) + partner * _both(sin, pairs)).astype(x.dtype)
    first, second = x32[..., 0::2], x32[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _both(table: jax.Array, pairs: RopePairs) -> jax.Array:
    """The table of H/2 angles for both dims of each pair."""
    return jnp.concatenate([table, table], axis=-1) if pairs == "halves" else jnp.repeat(table, 2, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turn(pairs: RopePairs, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x * cos + partner(x) * sin, where the partner of (a, b) is (-b, a)."""
    partner = jnp.einsum("...h,hj->...j", x, jnp.asarray(_partners(x.shape[-1], pairs), x.dtype),
                         precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
    return (x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(x.dtype)


_turn.defvjp(lambda pairs, x, cos, sin: (_turn(pairs, x, cos, sin), (cos, sin)),
             lambda pairs, tables, dy: (_turn(pairs, dy, tables[0], -tables[1]), None, None))


@functools.cache
def _partners(width: int, pairs: RopePairs) -> np.ndarray:
    first, second = ((np.arange(width // 2), np.arange(width // 2, width)) if pairs == "halves" else
                     (np.arange(0, width, 2), np.arange(1, width, 2)))
    matrix = np.zeros((width, width), np.float32)
    matrix[second, first], matrix[first, second] = -1, 1
    return matrix


@flax.struct.dataclass
class Mlp:
    """Gated feed-forward: down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    gate_up: jax.Array  # D 2 F
    down: jax.Array  # F D

    __repr__ = tree_text


def mlp_params(cfg: ModelConfig, width: int) -> Mlp:
    """A feed-forward of hidden width `width`."""
    return Mlp(
        gate_up=Param((cfg.d_model, 2, width), ("embed", None, "mlp")),
        down=Param((width, cfg.d_model), ("mlp", "embed")),
    )


def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """The gated hidden values."""
    if activation == "silu":
        return jax.nn.silu(gate) * up
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)


def linear(x: jax.Array, w: jax.Array, quant: QuantConfig | None = None, contract: int = 1,
           out_sharding: PartitionSpec | None = None) -> jax.Array:
    """The last `contract` dims of x times the first ones of w, in eight bits where `quant` says so."""
    if quant is not None:
        return matmul(x, w, quant, contract, out_sharding)
    return jax.lax.dot_general(x, w, ((tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))), ((), ())),
                               out_sharding=out_sharding)


def gathered_linear(x: jax.Array, weight: jax.Array, dims: tuple[str | None, ...], quant: QuantConfig | None = None,
                    contract: int = 1, out_sharding: PartitionSpec | None = None) -> jax.Array:
    """`linear` with a weight of these logical dims, whose width is gathered."""
    return linear(x, gather(weight, *dims, quantized=quant is not None), quant, contract, out_sharding)


def mlp(p: Mlp, x_BTD: jax.Array, activation: Activation, quant: QuantConfig | None = None) -> jax.Array:
    positions, shape = positions_dim(x_BTD), x_BTD.shape
    if positions is None:  # tokens in one dim: XLA's CPU compiler runs these matmuls a third faster, others the same
        x_BTD = jax.lax.reshape(x_BTD, (shape[0] * shape[1], shape[2]), out_sharding=spec("batch", None))
    rows = ("batch",) if positions is None else ("batch", positions)
    weights = gather(p.gate_up, "embed", None, "mlp", quantized=quant is not None)
    x = x_BTD if positions is None else unshare(x_BTD)
    gate, up = (checkpoint_name(linear(x, weights[:, i], quant), "gate_up") for i in range(2))
    out = gathered_linear(activate(gate, up, activation), p.down, ("mlp", "embed"), quant,
                          out_sharding=spec(*rows, None))
    out_BTD = out if positions else jax.lax.reshape(out, shape, out_sharding=spec("batch", None, None))
    return checkpoint_name(out_BTD, "mlp_out")
