"""Arithmetic that is compiled alike in every program, so that a mesh does not change its bits.

A compiler is free to compute one expression differently in two programs: it fuses a product into a sum (one rounding
instead of two) or not, replaces a division by a multiplication, or runs the end of a row outside of vectors, depending
on what stands around it and on the shapes that the mesh leaves to a device. So what must not change is put into code of
its own (`isolated`), on shapes of its own (`in_blocks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext.parallel.sharding import RULES

AXIS = "fsdp"  # that shares weights, where only `data` and this one have more than one device
assert AXIS in RULES["embed"]


def isolated(function: Callable[..., Any], runs: jax.Array, *args: Any) -> Any:
    """`function(*args)`, compiled by itself: as the branch of a conditional that is always taken.

    Nothing is fused across the border of a branch, so that its code depends on its own shapes alone. (A loop would not
    do: XLA hoists what does not change out of its body, and rewrites it there. An optimization barrier alone would not
    either: it is gone before operations are fused.) Arrays cross the border flat: of more dims they would bring the
    order in memory that suits their surroundings, and a sum would follow it.

    Args:
      runs: bool scalar that is true, as only we know: the compiler must not be able to compute it.
      args: trees of arrays.
    """
    shapes, result = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
                      for tree in (args, jax.eval_shape(function, *args)))

    def flat(tree: Any) -> Any:
        return jax.tree.map(jnp.ravel, tree)

    def shaped(tree: Any, like: Any) -> Any:
        return jax.tree.map(lambda x, s: x.reshape(s.shape), tree, like)

    def always(*flat_args: Any) -> Any:
        return flat(function(*shaped(flat_args, shapes)))

    def never(*_: Any) -> Any:
        return flat(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), result))

    # Barriers, so that flattening stays outside: XLA moves it into branches else.
    flat_args = jax.lax.optimization_barrier(flat(args))
    return shaped(jax.lax.optimization_barrier(jax.lax.cond(runs, always, never, *flat_args)), result)


def make_alike(function: Callable[..., Any], runs: jax.Array, *args: Any) -> Any:
    """`function(*args)` of replicated arguments, made whole by each device of the current mesh."""
    run = functools.partial(isolated, function)
    if jax.sharding.get_abstract_mesh().empty:
        return run(runs, *args)
    return jax.shard_map(run, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(runs, *args)


def in_blocks(function: Callable[..., Any], runs: jax.Array, most: int, shared: Any, *arrays: jax.Array) -> Any:
    """`function(shared, *arrays)`, which works element by element, on blocks of a size that is the same on every mesh.

    Args:
      runs: see `isolated`.
      most: see `blocks_of`.
      shared: a tree of scalars.
      arrays: of one shape and layout on the current mesh, and so is each array of the result.
    """
    layout = jax.typeof(arrays[0]).sharding.spec
    cut = shared_dim(layout)

    def local(runs: jax.Array, shared: Any, *arrays: jax.Array) -> Any:
        if cut is None:
            return isolated(function, runs, shared, *arrays)
        size = arrays[0].shape[cut]
        width = size // blocks_of(size, most)

        def block(index: jax.Array, done: Any) -> Any:
            start = index * width
            parts = (jax.lax.dynamic_slice_in_dim(x, start, width, cut) for x in arrays)
            found = isolated(function, runs, shared, *parts)
            return jax.tree.map(lambda whole, x: jax.lax.dynamic_update_slice_in_dim(whole, x, start, cut), done, found)

        shapes = jax.eval_shape(function, shared, *arrays)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.fori_loop(0, size // width, block, empty)

    specs = (PartitionSpec(), PartitionSpec(), *(layout for _ in arrays))
    return jax.shard_map(local, in_specs=specs, out_specs=layout, check_vma=False)(runs, shared, *arrays)


def blocks_of(size: int, most: int) -> int:
    """Blocks that one device cuts its `size` entries of a shared dim into, inside `shard_map`.

    Over all devices they are as many on every mesh: the largest power of two that divides the whole dim, or `most`.
    """
    devices = jax.lax.axis_size(AXIS)
    whole = size * devices
    return min(whole & -whole, most) // devices


def shared_dim(layout: PartitionSpec) -> int | None:
    """The dim of an array with this layout that devices share; None when each has all of it."""
    for dim, axes in enumerate(layout):
        if axes is not None and AXIS in ((axes,) if isinstance(axes, str) else axes):
            return dim
    return None
