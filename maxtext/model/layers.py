"""Norm, rotary embedding and feed-forward.

Dims: B batch, T position, D model width, F feed-forward width, K key/value head, G query heads of one, H head width.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.schema import ModelConfig
from maxtext.parallel.sharding import Param, gather, spec


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, dims: int = 1) -> jax.Array:
    """Root-mean-square norm over the last `dims` dims, in float32; the gain is applied before rounding back.

    Source: Zhang and Sennrich 2019; order of rounding as in OLMo-core nn/layer_norm.py (unlike Llama's).
    """
    over = tuple(range(-dims, 0))
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, over, keepdims=True) + eps)
    return (normed * gain.astype(jnp.float32)).astype(x.dtype)


def rope_tables(length: int, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position * theta^(-2i/width), each (T, width/2) float32 (Su et al. 2021)."""
    inverse = theta ** -(jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * inverse
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates (B, T, ..., H): the first half of H pairs with the second. Computed in float32."""
    cos, sin = (table.reshape(table.shape[0], *(1,) * (x.ndim - 3), table.shape[1]) for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@flax.struct.dataclass
class Mlp:
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020). Gate and up are one matmul."""

    gate_up: jax.Array  # D 2 F
    down: jax.Array  # F D


def mlp_params(cfg: ModelConfig) -> Mlp:
    return Mlp(
        gate_up=Param((cfg.d_model, 2, cfg.d_ff), ("embed", None, "mlp")),
        down=Param((cfg.d_ff, cfg.d_model), ("mlp", "embed")),
    )


def mlp(p: Mlp, x_BTD: jax.Array) -> jax.Array:
    gate_up_BT2F = jnp.einsum("btd,dcf->btcf", x_BTD, gather(p.gate_up, "embed", None, "mlp"))
    gate_up_BT2F = checkpoint_name(gate_up_BT2F, "gate_up")
    hidden_BTF = jax.nn.silu(gate_up_BT2F[:, :, 0]) * gate_up_BT2F[:, :, 1]
    down = gather(p.down, "mlp", "embed")
    out_BTD = jnp.einsum("btf,fd->btd", hidden_BTF, down, out_sharding=spec("batch", None, None))
    return checkpoint_name(out_BTD, "mlp_out")
