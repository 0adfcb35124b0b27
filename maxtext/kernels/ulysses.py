"""Attention over a shared sequence by exchanging tokens for heads: each device gets all tokens of some heads, and back.

Source: Jacobs et al. (2023), "DeepSpeed Ulysses". Dims as in context_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def ulysses_copies(kv_heads: int, group: int, devices: int) -> int:
    """How many copies of each key/value head are made, so that the heads split evenly over the devices.

    Raises:
      ValueError: when they cannot be split: the query heads of a copy would not be whole.
    """
    copies = devices // math.gcd(kv_heads, devices)
    if group % copies:
        raise ValueError(f"{kv_heads} key/value heads with {group} query heads each cannot be split over {devices} "
                         "devices of the context axis; choose a smaller axis, or the strategy all_gather or ring")
    return copies


def ulysses_attention(arrays: tuple, inner: Callable[..., jax.Array], axis: str) -> jax.Array:
    """What `context_attention` does with its arguments, by `inner` on all tokens of a device's share of heads."""
    q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG = arrays
    batch, length, heads, group, width = q_BTKGH.shape
    devices = jax.lax.axis_size(axis)
    copies = ulysses_copies(heads, group, devices)
    shape = (heads * copies, group // copies)
    q_BTKGH = q_BTKGH.reshape(batch, length, *shape, width)
    if copies > 1:
        k_BTKH, v_BTKW = (jnp.repeat(x, copies, axis=2) for x in (k_BTKH, v_BTKW))
    whole = [_in_order(jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True), devices)
             for x in (q_BTKGH, k_BTKH, v_BTKW)]
    if segments_BT is not None:
        segments_BT = _in_order(jax.lax.all_gather(segments_BT, axis, axis=1, tiled=True), devices)
    if sinks_KG is not None:
        own = shape[0] // devices
        sinks_KG = jax.lax.dynamic_slice_in_dim(sinks_KG.reshape(shape), jax.lax.axis_index(axis) * own, own)
    y_BTKGW = _as_they_lie(inner(*whole, segments_BT, sinks_KG), devices)
    y_BTKGW = jax.lax.all_to_all(y_BTKGW, axis, split_axis=1, concat_axis=2, tiled=True)
    return y_BTKGW.reshape(batch, length, heads, group, -1)


def _in_order(x_BT: jax.Array, devices: int) -> jax.Array:
    """Whole sequences from the order in which they lie to the natural one."""
    batch, length, *rest = x_BT.shape
    x = x_BT.reshape(batch, devices, 2, length // (2 * devices), *rest)
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def _as_they_lie(x_BT: jax.Array, devices: int) -> jax.Array:
    """The inverse of `_in_order`."""
    batch, length, *rest = x_BT.shape
    x = x_BT.reshape(batch, 2, devices, length // (2 * devices), *rest)
    return jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2).reshape(x_BT.shape)
