"""Random bits that are a hash of what they are for: the same in a repeated step, after a resume and on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: multiples of it are spread out evenly


def mixed(bits: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer (Appleby 2011, public domain) of uint32: every bit out depends on every bit in."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
