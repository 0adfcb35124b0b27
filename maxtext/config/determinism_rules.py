"""Rules of `train.determinism` and `train.virtual_shards`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from maxtext.config.schema import Config
from maxtext.config.wording import Problem, division, either

SHARED_AXES = ("data", "fsdp")  # the axes that any_mesh may spread a run over


def _virtual_shards(cfg: Config) -> Iterator[Problem]:
    train, shards = cfg.train, cfg.train.virtual_shards
    if shards is None:
        return
    if train.determinism != "any_mesh":
        yield "train.virtual_shards", (f"train.virtual_shards {shards} is set, but train.determinism "
                                       f"{train.determinism} cuts no batch; remove one of them")
        return
    if shards & (shards - 1) or train.global_batch % shards:
        fits = [str(2**i) for i in range(train.global_batch.bit_length()) if train.global_batch % 2**i == 0]
        yield "train.virtual_shards", (f"train.virtual_shards {shards} must be a power of two that divides "
                                       f"train.global_batch {train.global_batch}; write {either(fits[-8:])}")


def _any_mesh(cfg: Config) -> Iterator[Problem]:
    if cfg.train.determinism != "any_mesh":
        return
    if cfg.optim.uses_muon:
        yield "optim.kind", (f"optim.kind {cfg.optim.kind} multiplies matrices in groups that depend on the mesh, "
                             f"which train.determinism any_mesh cannot allow; write optim.kind: "
                             f"{cfg.optim.kind.replace('muon', 'adamw')}, or train.determinism: same_mesh")
    if cfg.model.moe.experts:
        yield "model.moe.experts", (f"model.moe.experts {cfg.model.moe.experts}: train.determinism any_mesh is not "
                                    "proven for routers; write train.determinism: same_mesh")


def fixed_misfits(cfg: Config, shape: Mapping[str, int]) -> Iterator[Problem]:
    """Why bits would depend on this mesh, or the mesh cannot share the virtual shards."""
    if cfg.train.determinism != "any_mesh":
        return
    for axis, size in shape.items():
        if axis not in SHARED_AXES and size > 1:
            yield f"mesh.{axis}", (f"mesh.{axis} {size} splits single sums, so train.determinism any_mesh allows only "
                                   f"mesh.data and mesh.fsdp; set mesh.{axis} to 1, or write train.determinism: "
                                   "same_mesh")
        elif size & (size - 1):
            yield f"mesh.{axis}", (f"mesh.{axis} {size} is no power of two, but train.determinism any_mesh adds pairs; "
                                   f"set mesh.{axis} to {1 << (size.bit_length() - 1)} or {1 << size.bit_length()}")
    steps, shards = cfg.train.gradient_accumulation_steps, cfg.virtual_shards
    devices = math.prod(shape[axis] for axis in SHARED_AXES)
    if shards % (devices * steps) and not devices & (devices - 1):
        origin = "" if cfg.train.virtual_shards else f" (train.global_batch {cfg.train.global_batch} allows no more)"
        yield "train.virtual_shards", (
            f"{shards} virtual shards{origin} cannot be shared evenly by mesh.data {shape['data']} x mesh.fsdp "
            f"{shape['fsdp']} = {devices} devices in train.gradient_accumulation_steps {steps} micro-batches "
            f"{division(shards, devices * steps)}; use fewer devices or micro-batches, or a train.global_batch and "
            "train.virtual_shards that a larger power of two divides")


DETERMINISM_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (_virtual_shards, _any_mesh)
