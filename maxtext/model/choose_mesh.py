"""`mesh: auto`: sizes of the mesh axes from what shapes say about memory and communication.

Of all meshes that are valid on the devices, those whose step should fit into memory are kept; of these, those within 2%
of the fastest predicted step; of these, the one with the fewest axes beside fsdp. So weights are shared by all devices
(fsdp) unless their gathers cannot hide behind computing; then come copies of the model (data) and, for experts, their
own axis. Heads are split (tensor) only inside a domain of fast links, sequences (context) only where they are long or
fewer than the devices. Of devices that nothing is published of, such as virtual ones, the fewest axes count alone.
Pipelines are never chosen: their stages wait, so they are for those who ask for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from maxtext.config.schema import Config
from maxtext.config.validate import AXES, mesh_problems
from maxtext.model.prediction import Prediction, predict
from maxtext.parallel.chips import GIB
from maxtext.parallel.mesh import MeshError
from maxtext.parallel.network import Network

LARGEST_TENSOR = 8
LONG_SEQUENCE = 16_384  # from here on sequences may be split although there are enough of them
CLOSE = 1.02  # predicted steps this near to the fastest count as equally fast
ORDER = ("tensor", "context", "expert", "data")  # axes to avoid first, all else being equal


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One valid mesh and what is predicted for it."""

    sizes: dict[str, int]
    prediction: Prediction

    @property
    def cost(self) -> tuple[int, ...]:
        """How far it is from fsdp alone."""
        used = [self.sizes.get(axis, 1) for axis in ORDER]
        return (sum(size > 1 for size in used), *used)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The mesh that was chosen, and why, in lines for people."""

    sizes: dict[str, int]
    why: tuple[str, ...]


def choose_mesh(cfg: Config, n_devices: int, network: Network) -> Choice:
    """Picks the sizes of the mesh axes; the same for the same config, devices and network.

    Raises:
      MeshError: when no mesh is valid for this model and batch on so many devices.
    """
    found = [Candidate(sizes, predict(cfg, sizes, network)) for sizes in valid_meshes(cfg, n_devices, network)]
    if not found:
        alone = "; ".join(text for _, text in mesh_problems(with_mesh(cfg, {"fsdp": n_devices}), n_devices))
        raise MeshError(f"mesh: auto finds no mesh that divides model and batch over {n_devices} devices; with fsdp "
                        f"alone, {alone}")
    chip = network.chip
    fitting = [one for one in found if chip is None or one.prediction.memory_on(chip) <= chip.memory_bytes]
    if not fitting:
        best = min(found, key=lambda one: (one.prediction.memory.total, one.prediction.step, one.cost))
        why = (f"{shown(best.sizes)}: needs the least memory of {len(found)} valid meshes, of which none fits "
               f"({_memory(best, network)})")
        return Choice(best.sizes, (why,))
    fastest = min(one.prediction.step for one in fitting)
    close = [one for one in fitting if network.chip is None or one.prediction.step <= CLOSE * fastest]
    best = min(close, key=lambda one: (one.cost, one.prediction.step))
    return Choice(best.sizes, tuple(_reasons(best, found, fitting, network)))


def settled(cfg: Config, n_devices: int, network: Network) -> tuple[Config, tuple[str, ...]]:
    """The config with sizes in place of `mesh: auto`, and why these; any other config as it is."""
    if not cfg.mesh.auto:
        return cfg, ()
    choice = choose_mesh(cfg, n_devices, network)
    return with_mesh(cfg, choice.sizes), choice.why


def with_mesh(cfg: Config, sizes: dict[str, int]) -> Config:
    """The config on a mesh of these sizes, 1 of the axes left out."""
    whole = {axis: sizes.get(axis, 1) for axis in AXES}
    return dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, auto=False, **whole))


def valid_meshes(cfg: Config, n_devices: int, network: Network) -> Iterator[dict[str, int]]:
    """Every mesh without a pipeline that divides devices, model and batch; data spans the slices of a TPU."""
    slices = n_devices // network.domain if network.torus else 1
    for sizes in _meshes(cfg, n_devices, network):
        changed = with_mesh(cfg, sizes)
        if sizes["data"] % slices == 0 and not mesh_problems(changed, n_devices):
            yield {axis: sizes.get(axis, 1) for axis in AXES}


def _meshes(cfg: Config, n_devices: int, network: Network) -> Iterator[dict[str, int]]:
    train, long = cfg.train, cfg.data.sequence_length >= LONG_SEQUENCE
    few = train.global_batch // train.gradient_accumulation_steps < n_devices
    tensors = [size for size in _divisors(n_devices) if size <= min(LARGEST_TENSOR, network.domain)]
    contexts = _divisors(n_devices) if long or few else [1]
    experts = [size for size in _divisors(n_devices) if size == 1 or not (cfg.model.moe.experts or 1) % size]
    for tensor, context, expert in itertools.product(tensors, contexts, experts):
        rest, left = divmod(n_devices, tensor * context * expert)
        if left:
            continue
        for data in _divisors(rest):
            yield {"data": data, "fsdp": rest // data, "expert": expert, "context": context, "tensor": tensor}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def shown(sizes: dict[str, int]) -> str:
    """The axes that are used, such as `data 2 x fsdp 64`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def _memory(one: Candidate, network: Network) -> str:
    needed = one.prediction.memory_on(network.chip)
    size = f"{needed / GIB:.2f} GiB" if needed > GIB // 10 else f"{needed / (1 << 20):.2f} MiB"
    room = "" if network.chip is None else f" of {network.chip.memory_bytes / GIB:.0f} GiB"
    return f"about {size}{room} a device"


def _reasons(best: Candidate, found: list[Candidate], fitting: list[Candidate], network: Network) -> Iterator[str]:
    if network.chip is None:
        yield (f"{shown(best.sizes)}: {_memory(best, network)}; nothing is published of these devices, so of "
               f"{len(found)} valid meshes the one with the fewest axes beside fsdp")
        return
    waits = best.prediction.waiting / best.prediction.step
    yield (f"{shown(best.sizes)}: {_memory(best, network)}; {waits:.1%} of a predicted step waits for other devices; "
           f"{len(fitting)} of {len(found)} valid meshes fit")
    simpler = [one for one in found if one.cost < best.cost]
    if simpler:
        nearest = min(simpler, key=lambda one: (one not in fitting, one.prediction.step))
        slower = nearest.prediction.step / best.prediction.step - 1
        why = f"{slower:.1%} slower" if nearest in fitting else f"does not fit ({_memory(nearest, network)})"
        yield f"simpler, but not taken: {shown(nearest.sizes)}, {why}"
