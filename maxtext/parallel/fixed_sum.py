"""Sums whose order, and so whose every bit, is the same on each mesh.

What is summed are V parts in a fixed order, V a power of two. They are added as one binary tree: neighbours first, then
pairs of neighbours, and so on. A device holds a run of V / n parts, which is a subtree; it adds these by itself
(`sum_of_parts`), and the devices exchange the rest (`sum_over`). Floating-point addition is commutative, so of two
devices that exchange their values both get the same bits. (Recursive halving: Thakur et al. 2005, "Optimization of
Collective Communication Operations in MPICH", section 4.)

The parts themselves are given the same bits everywhere by `parallel/isolated.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

NOTHING = -0.0  # what changes no bit of anything that it is added to; +0.0 changes a -0.0


def sum_of_parts(part: Callable[[jax.Array], Any], count: int) -> Any:
    """The sum of `part(0)` to `part(count - 1)`, trees of float arrays, as one binary tree.

    One loop for each of its levels, so that log2(count) partial sums exist at a time.

    Args:
      part: takes an int32 scalar.
      count: a power of two.
    """
    assert count & (count - 1) == 0, count

    def from_first(first: jax.Array, count: int) -> Any:
        if count == 1:
            return part(first)
        half = count // 2
        zero = jax.tree.map(lambda s: jnp.full(s.shape, NOTHING, s.dtype), jax.eval_shape(part, first))
        return jax.lax.fori_loop(
            0, 2, lambda i, total: jax.tree.map(jnp.add, total, from_first(first + i * half, half)), zero)

    return from_first(jnp.int32(0), count)


def sum_over(x: jax.Array, axes: Sequence[str], scattered: tuple[str, int] | None = None) -> jax.Array:
    """The sum of one array over devices, as a binary tree over their numbers; inside `shard_map`.

    Every device sends and receives as many bytes as in a ring.

    Args:
      axes: mesh axes of sizes that are powers of two, from the major to the minor.
      scattered: an axis and a dim; a device of that axis keeps its own part of that dim. None: all keep the whole.
    """
    for axis in reversed(axes):
        size = jax.lax.axis_size(axis)
        if scattered is not None and axis == scattered[0]:
            dim = scattered[1]
            split = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1:])
            x = _halved(jnp.moveaxis(split, dim, 0), axis)
        elif size > 1:
            flat = jnp.pad(x.ravel(), (0, -x.size % size))
            whole = jax.lax.all_gather(_halved(flat.reshape(size, -1), axis), axis, tiled=True)
            x = whole[: x.size].reshape(x.shape)
    return x


def _halved(x_n: jax.Array, axis: str) -> jax.Array:
    """Of chunks, one for each device of the axis, this device's own, summed: each exchange halves what is left.

    In exchange s partners differ in bit s of their number; of the chunks that are left, a device keeps those whose
    number has its own bit there.
    """
    size = x_n.shape[0]
    assert size & (size - 1) == 0, size
    me = jax.lax.axis_index(axis)
    for bit in range(size.bit_length() - 1):
        pairs = x_n.reshape(-1, 2, *x_n.shape[1:])
        mine = (me >> bit) & 1
        kept, sent = (jax.lax.dynamic_index_in_dim(pairs, which, 1, keepdims=False) for which in (mine, 1 - mine))
        x_n = kept + jax.lax.ppermute(sent, axis, [(i, i ^ (1 << bit)) for i in range(size)])
    return x_n[0]


def sum_of_vector(x_n: jax.Array) -> jax.Array:
    """The sum over the first dim, a power of two long, as one binary tree."""
    assert x_n.shape[0] & (x_n.shape[0] - 1) == 0, x_n.shape
    while x_n.shape[0] > 1:
        x_n = x_n[0::2] + x_n[1::2]
    return x_n[0]
