"""Small pieces for code that runs on each device's own part of an array, inside `per_device`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.parallel.sharding import in_turn


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes over which any of these local arrays may differ."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, typed as different over `axes` too; the transpose sums gradients over those axes."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, tree)


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with arrays whose types say nothing of the mesh, for kernels that were written without it.

    Its arguments are trees of arrays that all vary over the same axes; so does every array of the result.
    """

    def run(*arrays: Any) -> Any:
        axes = varying_axes(*jax.tree.leaves(arrays))
        if not axes:
            return function(*arrays)
        own = jax.sharding.PartitionSpec()
        inner = jax.shard_map(function, in_specs=(own,) * len(arrays), out_specs=own, axis_names=set(),
                              check_vma=False)
        return vary(inner(*arrays), axes)

    return run


def barrier(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, none of which is used before all are made; each keeps the axes that its type varies over.

    `jax.lax.optimization_barrier` of jax 0.10 lets each result vary over the axes of all its arguments.
    """
    if not varying_axes(*arrays):
        return jax.lax.optimization_barrier(arrays)
    own = jax.sharding.PartitionSpec()
    inner = jax.shard_map(lambda *each: jax.lax.optimization_barrier(each), in_specs=(own,) * len(arrays),
                          out_specs=own, axis_names=set(), check_vma=False)
    return tuple(vary(after, varying_axes(before)) for before, after in zip(arrays, inner(*arrays), strict=True))


def all_gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Joins the pieces of a weight that lie over these axes, as `sharding.gather` does."""
    for part in reversed(in_turn(axes)):
        x = jax.lax.all_gather(x, part, axis=dim, tiled=True)
    return x


def psum_scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Sums over these axes, of which each device keeps its piece; the transpose of `all_gather`."""
    for part in in_turn(axes):
        x = jax.lax.psum_scatter(x, part, scatter_dimension=dim, tiled=True)
    return x


def platform() -> str:
    """The platform that a program on the current mesh is compiled for: cpu, gpu, tpu or another."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The kind of device that a program on the current mesh is compiled for, as JAX names it, such as `TPU v5`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def exchange(x_PR: jax.Array, sent_P: jax.Array | None, came_P: jax.Array | None, axis: str) -> jax.Array:
    """Row p of (P, R, ...) goes to device p of the axis; row p of the result came from there.

    Args:
      sent_P, came_P: int32 numbers of entries of each row that matter, here and in the result. The others come as they
        were sent, or as zeros. None: all matter.
    """
    if sent_P is None or came_P is None:
        return jax.lax.all_to_all(x_PR, axis, split_axis=0, concat_axis=0, tiled=True)
    return _exchange(axis, x_PR, sent_P, came_P)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(axis: str, x_PR: jax.Array, sent_P: jax.Array, came_P: jax.Array) -> jax.Array:
    if platform() == "cpu":  # XLA's CPU back end has no ragged exchange
        return exchange(x_PR, None, None, axis)
    devices, message = x_PR.shape[:2]
    first_P = jnp.arange(devices, dtype=jnp.int32) * message
    theirs_P = jnp.full(devices, jax.lax.axis_index(axis) * message, jnp.int32)
    flat = x_PR.reshape(devices * message, *x_PR.shape[2:])
    out = jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), first_P, sent_P, theirs_P, came_P, axis_name=axis)
    return out.reshape(x_PR.shape)


_exchange.defvjp(
    lambda axis, x_PR, sent_P, came_P: (_exchange(axis, x_PR, sent_P, came_P), (sent_P, came_P)),
    lambda axis, sizes, dy_PR: (_exchange(axis, dy_PR, sizes[1], sizes[0]), None, None))
