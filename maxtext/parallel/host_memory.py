"""Arrays that lie in the host's memory and visit the devices while they are used.

JAX names the kinds of memory that a device reaches: `device`, its own, and `pinned_host`, which it reads and writes by
DMA. The kind is part of an array's type, so code that is traced sees where its arguments lie.
"""

from __future__ import annotations

from typing import Any

import jax
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


def lies_on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The arrays of a tree on the devices, where they can be computed with."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if lies_on_host(x) else x, tree)


def back(tree: Any, like: Any) -> Any:
    """The arrays of a tree in the memory where those of `like` lie."""
    def move(x: jax.Array, before: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if lies_on_host(before) else x

    return jax.tree.map(move, tree, like)
