"""Whether a compiled step fits into a device's memory, and which settings would help when it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from maxtext.config.schema import Config, RematConfig
from maxtext.config.validate import mesh_problems, problems, resolve_mesh
from maxtext.model.cost import memory_per_device
from maxtext.plan.program import Program, Refusal
from maxtext.plan.topology import Target

SUGGESTIONS = 3


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Overrides that need less memory, and by how many bytes a device, estimated from shapes."""

    overrides: tuple[str, ...]
    saves: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    fits: bool
    needed: int
    capacity: int
    suggestions: tuple[Suggestion, ...]  # the largest saving first; none when it fits


def judge(cfg: Config, target: Target, program: Program | Refusal) -> Verdict:
    """Compares what the compiler laid out, or would have had to, with the memory of a device."""
    refused = isinstance(program, Refusal)
    needed, capacity = program.needed if refused else program.memory.total, target.memory_bytes
    fits = not refused and needed <= capacity
    return Verdict(fits, needed, capacity, () if fits else suggestions(cfg, target.n_devices))


def suggestions(cfg: Config, n_devices: int) -> tuple[Suggestion, ...]:
    """Settings of remat, mesh and accumulation that are valid on these devices and need less memory by estimate."""
    now = _estimated(cfg, n_devices)
    found = [Suggestion(overrides, now - _estimated(changed, n_devices))
             for overrides, changed in _changes(cfg, n_devices)]
    useful = sorted((one for one in found if one.saves > 0), key=lambda one: -one.saves)
    return tuple(useful[:SUGGESTIONS])


def _estimated(cfg: Config, n_devices: int) -> int:
    return memory_per_device(cfg, resolve_mesh(cfg.mesh, n_devices)).total


def _changes(cfg: Config, n_devices: int) -> Iterator[tuple[tuple[str, ...], Config]]:
    """One change each of remat, of what shares weights, heads and positions, of the optimizer, and of accumulation."""
    train, sizes = cfg.train, resolve_mesh(cfg.mesh, n_devices)
    if train.remat.mode != "full":
        yield ("train.remat.mode=full",), _with_train(cfg, remat=RematConfig(mode="full"))
    if sizes["data"] > 1:
        changed = {"data": 1, "fsdp": sizes["data"] * sizes["fsdp"]}
        yield from _meshes(cfg, n_devices, changed)
    for axis in ("fsdp", "data"):
        if sizes[axis] % 2 == 0:
            yield from _meshes(cfg, n_devices, {axis: sizes[axis] // 2, "tensor": 2 * sizes["tensor"]})
            break
    if sizes.get("context", 2) == 1 and sizes["fsdp"] % 2 == 0:
        yield from _meshes(cfg, n_devices, {"fsdp": sizes["fsdp"] // 2, "context": 2})
    if cfg.optim.moments_dtype == "float32":
        yield ("optim.moments_dtype=bfloat16",), _with_optim(cfg, moments_dtype="bfloat16")
    if cfg.optim.offload == "none":
        yield ("optim.offload=host",), _with_optim(cfg, offload="host")
    if cfg.optim.offload_weights == "none" and cfg.train.compute_dtype != "float32":
        yield ("optim.offload_weights=host",), _with_optim(cfg, offload_weights="host")
    for count in range(train.gradient_accumulation_steps + 1, train.global_batch + 1):
        changed = _with_train(cfg, gradient_accumulation_steps=count)
        if not train.global_batch % count and not mesh_problems(changed, n_devices):
            yield (f"train.gradient_accumulation_steps={count}",), changed
            break


def _with_train(cfg: Config, **changes: object) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **changes))


def _with_optim(cfg: Config, **changes: object) -> Config:
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **changes))


def _meshes(cfg: Config, n_devices: int, sizes: dict[str, int]) -> Iterator[tuple[tuple[str, ...], Config]]:
    changed = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **sizes))
    if not problems(changed) and not mesh_problems(changed, n_devices):
        yield tuple(f"mesh.{axis}={size}" for axis, size in sizes.items()), changed
