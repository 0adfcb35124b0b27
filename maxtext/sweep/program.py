"""One program for all members of a group: the train step over states and numbers that have a leading dim of members.

The members share the mesh of a run, each laid out on it as its own run would be; or, where a member needs only one of
several devices, they are shared out over the devices, which then send each other nothing.

On accelerators the members of a device go through every operation together (`jax.vmap`). On a CPU, whose matmuls are
slower in batches than one by one, they take turns inside the program (`jax.lax.map`).

Dims: M members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext.config.schema import Config
from maxtext.config.validate import AXES
from maxtext.data.batch import Batch
from maxtext.parallel.sharding import spec
from maxtext.train.state import Numbers, TrainState, numbers_of
from maxtext.train.step import StepMetrics, make_train_step, step_options

MEMBERS = "members"  # the mesh axis that members are shared out over
PyTree = Any


class Program:
    """The compiled update of a group.

    Attributes:
      mesh: what one member is laid out on.
      width: members that go through each operation together, on each device.
    """

    def __init__(self, cfgs: Sequence[Config], mesh: Mesh, devices: Sequence[jax.Device] = (),
                 width: int | None = None) -> None:
        """Shares the members out over `devices`, if there are several; `mesh` is then of one device.

        `width` None: all on accelerators, 1 on a CPU.
        """
        self.mesh, self._cfgs = mesh, list(cfgs)
        self._ways = max(len(devices), 1)
        self._cfgs += [self._cfgs[-1]] * (-len(cfgs) % self._ways)  # so that each device has as many
        self._program_mesh = _with_members(devices) if self._ways > 1 else mesh
        here = len(self._cfgs) // self._ways
        wanted = (1 if mesh.devices.flat[0].platform == "cpu" else here) if width is None else width
        self.width = min(wanted, here)
        self._count = len(cfgs)

    def stacked(self, states: Sequence[TrainState]) -> TrainState:
        """The members' states, as they are on `mesh`, with the leading dim M."""
        padded = [*states, *[states[-1]] * (len(self._cfgs) - len(states))]

        def stack(*leaves: jax.Array) -> jax.Array:
            sharding = NamedSharding(self._program_mesh, self._over(leaves[0].sharding.spec))
            return jax.device_put(np.stack([np.asarray(leaf) for leaf in leaves]), sharding)

        return jax.tree.map(stack, *padded)

    def apart(self, states: TrainState, like: TrainState) -> list[TrainState]:
        """The state of each member, laid out as `like`, which is that of one on `mesh`."""
        host = jax.device_get(states)
        return [jax.tree.map(lambda leaf, one, i=i: jax.device_put(leaf[i], one.sharding), host, like)
                for i in range(self._count)]

    def batch_sharding(self) -> NamedSharding:
        """Of a (B, T) array of the batch, which all members share."""
        with jax.set_mesh(self._program_mesh):
            return NamedSharding(self._program_mesh, spec("batch", None))

    def compile(self, states: TrainState, batch: Batch
                ) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """The update of all members; the states given to it are consumed. Metrics have the leading dim M."""
        structure, width = self._cfgs[0], self.width

        def one(state: TrainState, numbers: Numbers, batch: Batch) -> tuple[TrainState, StepMetrics]:
            return make_train_step(structure, numbers)(state, batch)

        def update(states: TrainState, numbers: Numbers, batch: Batch) -> tuple[TrainState, StepMetrics]:
            if width == len(numbers.z_loss):
                return jax.vmap(functools.partial(one, batch=batch))(states, numbers)
            return jax.lax.map(lambda each: one(*each, batch), (states, numbers),
                               batch_size=None if width == 1 else width)

        if self._ways > 1:
            # Unchecked: what an update makes from constants alone is not typed as different on the devices.
            over = PartitionSpec(MEMBERS)
            update = jax.shard_map(update, in_specs=(over, over, PartitionSpec()), out_specs=over,
                                   axis_names={MEMBERS}, check_vma=False)
        numbers = self._numbers()
        with jax.set_mesh(self._program_mesh):
            step = jax.jit(update, donate_argnums=0, compiler_options=step_options(structure))
            compiled = step.lower(states, numbers, batch).compile()
        return lambda states, batch: compiled(states, numbers, batch)

    def _numbers(self) -> Numbers:
        """Those of all members; rounded to float32 once, as the constants of a program are."""
        def stack(*values: float) -> jax.Array:
            kind = np.int32 if all(isinstance(value, int) for value in values) else np.float32
            return jax.device_put(np.asarray(values, kind), NamedSharding(self._program_mesh, self._over(())))

        return jax.tree.map(stack, *(numbers_of(cfg) for cfg in self._cfgs))

    def _over(self, rest: Sequence[Any]) -> PartitionSpec:
        return PartitionSpec(MEMBERS if self._ways > 1 else None, *rest)


def one_device(device: jax.Device) -> Mesh:
    """The mesh of a run on one device."""
    return Mesh(np.asarray(device).reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def _with_members(devices: Sequence[jax.Device]) -> Mesh:
    names = (MEMBERS, *AXES)
    shape = (len(devices), *(1,) * len(AXES))
    return Mesh(np.asarray(devices).reshape(shape), names, axis_types=(AxisType.Explicit,) * len(names))
