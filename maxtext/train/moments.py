"""Moments in half the bytes: bfloat16 with stochastic rounding.

A running mean moves by a small share of its distance from the new value, and bfloat16 keeps 8 bits: rounded to the
nearest, a second moment with a decay of 0.999 would not move at all. So each value is rounded up or down at random,
with the odds that make its mean the exact value. The random bits are a hash of the step, the leaf and the position, and
so neither a mesh nor a resume changes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxtext.config.optimizer import StateDtype
from maxtext.kernels.random_bits import GOLDEN, mixed


def stored(x: jax.Array, dtype: StateDtype, step: jax.Array, leaf: int) -> jax.Array:
    """A float32 moment as it is kept; a value that `dtype` holds exactly stays what it is.

    Args:
      step: int32 scalar, and `leaf`: they choose the random bits.
    """
    if dtype == "float32":
        return x
    low = jnp.uint32(0xFFFF)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    seed = mixed(mixed(step.astype(jnp.uint32)) + jnp.uint32(leaf * GOLDEN % 2**32))
    up = bits + (mixed(_position(x.shape) ^ seed) & low)  # a carry out of the low half rounds away from zero
    rounded = jax.lax.bitcast_convert_type(up & ~low, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _position(shape: tuple[int, ...]) -> jax.Array:
    """uint32 of `shape`: the row-major index, modulo 2^32."""
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return position
