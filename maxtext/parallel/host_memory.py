"""Arrays that lie in the host's memory and visit the devices while they are used.

JAX names the kinds of memory that a device reaches: `device`, its own, and `pinned_host`, which it reads and writes by
DMA. The kind is part of an array's type, so code that is traced sees where its arguments lie.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from maxtext.config.optimizer import Offload

HOST = "pinned_host"


class OffloadError(ValueError):
    """The devices cannot use the memory of their host."""


def offloads(asked: Offload, device: jax.Device, key: str) -> bool:
    """Whether arrays go to the host's memory, by the value of the config key `key`.

    Raises OffloadError when that is asked for and `device` has no such memory.
    """
    if asked == "none":
        return False
    reaches = HOST in _kinds(device)
    if asked == "host" and not reaches:
        raise OffloadError(f"{key} is host, but a {device.device_kind} reaches no host memory (it has "
                           f"{', '.join(_kinds(device)) or 'none that JAX knows'}); write {key}: none, or auto")
    return reaches and (asked == "host" or device.platform != "cpu")  # a CPU's memory is the host's


def _kinds(device: jax.Device) -> list[str]:
    return [memory.kind for memory in device.addressable_memories()]


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same layout in the host's memory."""
    return sharding.with_memory_kind(HOST)


def on_devices(tree: Any) -> Any:
    """Arrays (not traced) with the same layout in the devices' own memory; those that lie there are not copied."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), tree)


def lies_on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The arrays of a tree on the devices, where they can be computed with."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if lies_on_host(x) else x, tree)


def working_copy(tree: Any, dtype: jnp.dtype) -> Any:
    """The arrays of a tree ready to compute with: of those that lie on the host, a copy of type `dtype` on the devices.

    Each is cast before the next but one sets out, so that few are on the devices in their own type at one time.
    """
    leaves, treedef = jax.tree.flatten(tree)
    done: list[jax.Array] = []
    for i, x in enumerate(leaves):
        if lies_on_host(x):
            x, *_ = jax.lax.optimization_barrier((x, *done[-2:-1]))
            leaves[i] = to_device(x).astype(dtype)
            done.append(leaves[i])
    return treedef.unflatten(leaves)


def add(tree: Any, changes: Any) -> Any:
    """The arrays of a tree plus changes that lie on the devices; the sums lie where the arrays do."""
    def one(x: jax.Array, change: jax.Array) -> jax.Array:
        if not lies_on_host(x):
            return x + change
        here, change = jax.lax.optimization_barrier((x, change))  # no sooner than its change is known
        return jax.device_put(to_device(here) + change, jax.memory.Space.Host)

    return jax.tree.map(one, tree, changes)


def back(tree: Any, like: Any) -> Any:
    """The arrays of a tree in the memory where those of `like` lie."""
    def move(x: jax.Array, before: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if lies_on_host(before) else x

    return jax.tree.map(move, tree, like)
