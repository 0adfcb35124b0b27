"""Silent corruption: devices that compute or hold other bits than their peers, with no error anywhere.

Two comparisons, bit for bit. Devices that hold the same part of the state must hold the same bits of it. And the
gradient of one row of the batch, computed by the same program on two devices in turn, must be the same; a third device
decides which of the two is wrong. (Of Llama 3's 419 unexpected interruptions 6 were such: Dubey et al. 2024, table 5.)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext.checkpoint import integrity
from maxtext.config.schema import Config
from maxtext.config.validate import AXES
from maxtext.data.batch import Batch
from maxtext.parallel.host_memory import on_devices
from maxtext.parallel.sharding import sharding
from maxtext.train.state import TrainState, abstract_state
from maxtext.train.step import batch_gradient

PyTree = Any
Sums = tuple[int, ...]


class Comparison:
    """Compares the devices of a mesh, a part of the work each time it is called."""

    def __init__(self, cfg: Config, mesh: Mesh) -> None:
        self._mesh, self._calls = mesh, 0
        train = dataclasses.replace(cfg.train, global_batch=1, gradient_accumulation_steps=1)
        optim = dataclasses.replace(cfg.optim, offload="none", offload_weights="none")  # a device has all it works with
        self._cfg = dataclasses.replace(cfg, train=train, mesh=type(cfg.mesh)(), optim=optim)
        self._local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        self._gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._sums = replica_sums(mesh)
        self._gradient = jax.jit(self._gradient_sums)

    def __call__(self, state: TrainState, batch: Batch) -> str | None:
        """What is wrong, with the device, or None."""
        return self.replicas(state) or self.gradient(state.params, batch)

    def replicas(self, state: PyTree) -> str | None:
        """Whether devices that hold the same part of an array hold the same bits. The same answer in every process."""
        for name, leaf in integrity.named_leaves(state).items():
            if not isinstance(leaf.sharding, NamedSharding) or leaf.size == 0:
                continue
            sums = np.asarray(jax.device_get(self._sums(on_devices(leaf))))  # mesh sizes, 2
            for group in _replica_groups(self._mesh, leaf.sharding.spec):
                found = [tuple(map(int, sums[where])) for where in group]
                if len(set(found)) > 1:
                    devices = [self._mesh.devices[where] for where in group]
                    return f"{_blamed(dict(zip(devices, found, strict=True)))} other bits of {name} than its copies"
        return None

    def gradient(self, params: PyTree, batch: Batch) -> str | None:
        """Whether two devices of this process, others each time, compute the same gradient of one row of the batch."""
        if len(self._local) < 2:
            return None
        first, self._calls = self._calls % len(self._local), self._calls + 1
        devices = [self._local[(first + i) % len(self._local)] for i in range(min(3, len(self._local)))]
        whole, row = self._gather(on_devices(params)), jax.tree.map(_first_row, batch)
        found = {device: self._on(device, whole, row) for device in devices[:2]}
        if len(set(found.values())) == 1:
            return None
        found |= {device: self._on(device, whole, row) for device in devices[2:]}
        return f"{_blamed(found)} another gradient of the same row than its peers"

    def _on(self, device: jax.Device, whole: PyTree, row: PyTree) -> Sums:
        """Fingerprints of the gradient as one device computes it from its own copy of the weights."""
        mesh = Mesh(np.asarray([device]).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
        with jax.set_mesh(mesh):
            def here(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
                own = next(shard.data for shard in x.addressable_shards if shard.device == device)
                return jax.device_put(own, like.sharding)

            params = jax.tree.map(here, whole, abstract_state(self._cfg, mesh).params)
            placed = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, "batch", *(None,) * (x.ndim - 1))), row)
            return tuple(int(x) for x in jax.device_get(self._gradient(params, placed)))

    def _gradient_sums(self, params: PyTree, row: Batch) -> list[jax.Array]:
        grads, _, _ = batch_gradient(self._cfg, params, row, jnp.maximum(row.weights_BT.sum(), 1))
        return [one for leaf in jax.tree.leaves(grads) for one in integrity.leaf_sums(leaf)[:2]]


def replica_sums(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A function of an array on the mesh: fingerprints of what each device holds of it, (mesh sizes, 2), everywhere."""
    each = PartitionSpec(*mesh.axis_names, None)

    def sums(x: jax.Array) -> jax.Array:
        def own(part: jax.Array) -> jax.Array:
            return jnp.stack(integrity.leaf_sums(part)[:2]).reshape(*(1,) * mesh.devices.ndim, 2)

        spec = jax.typeof(x).sharding.spec
        found = jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=each, check_vma=False)(x)
        return jax.sharding.reshard(found, NamedSharding(mesh, PartitionSpec()))

    return jax.jit(sums)


def _replica_groups(mesh: Mesh, spec: PartitionSpec) -> Iterator[list[tuple[int, ...]]]:
    """The places in the mesh that hold the same part of an array; groups of one are left out."""
    used = {axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)}
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for where in np.ndindex(mesh.devices.shape):
        key = tuple(place for place, axis in zip(where, mesh.axis_names, strict=True) if axis in used)
        groups.setdefault(key, []).append(where)
    yield from (group for group in groups.values() if len(group) > 1)


def _blamed(found: dict[jax.Device, Sums]) -> str:
    """The devices outside the majority, and the verb; all of them where there is no majority."""
    (common, votes), *_ = Counter(found.values()).most_common()
    odd = [device for device, sums in found.items() if sums != common]
    if votes * 2 <= len(found):
        odd = list(found)
        return f"one of {', '.join(map(_named, odd))} has"
    return f"{', '.join(map(_named, odd))} {'has' if len(odd) == 1 else 'have'}"


def _named(device: jax.Device) -> str:
    return f"device {device.id} ({device.device_kind}, process {device.process_index})"


def _first_row(x: jax.Array) -> np.ndarray:
    """The first row of the batch that this process holds."""
    first = min(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.asarray(first.data)[:1]
