"""Compiles the train step of a config for a target without running it, and reads what the compiler made."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import importlib.metadata
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.data.global_batches import abstract_batch
from maxtext.kernels.choice import KernelError
from maxtext.parallel.compiler import compiler_options
from maxtext.parallel.mesh import make_mesh
from maxtext.parallel.sharding import sharding
from maxtext.plan.collectives import UNKNOWN, Traffic, is_collective, traffic
from maxtext.plan.hlo import Walk, estimated_cycles, holds_matmul, matmul_flops, parse
from maxtext.plan.kernels import is_attention, kernel_flops, kernel_name
from maxtext.plan.topology import PlanError, compiler_flags
from maxtext.train.state import abstract_state
from maxtext.train.step import compile_train_step

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, as the compiler laid them out."""

    arguments: int  # weights, moments, batch
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled step, of one device; loops count as often as they turn."""

    mesh: dict[str, int]
    memory: Memory
    matmul_flops: int  # of dots and convolutions
    kernel_flops: int  # of custom kernels, as far as they are known
    kernels: int  # executions of custom kernels a step
    silent_kernels: int  # of these, executions whose FLOPs are not known
    kernel_names: dict[str, int]  # executions of each
    attention_flops: int  # of kernel_flops, what attention kernels do
    cycles: int  # XLA's estimate for the matrix and vector units, without kernels and collectives; 0: it makes none
    matmul_cycles: int  # of these, in fusions around a matmul
    traffic: tuple[Traffic, ...]
    torus_dims: dict[str, int]  # how many dims of the torus each of traffic's axes spans
    unknown_loops: tuple[str, ...]  # counted once
    branches: int  # conditionals, of which every branch is counted
    trace_seconds: float
    compile_seconds: float
    versions: dict[str, str]
    flags: tuple[str, ...]  # of the compiler: in XLA_FLAGS and LIBTPU_INIT_ARGS, and those that every step is given
    date: str  # of the compilation, year-month-day
    named_loops: int = 0  # as long as the data says, counted as if experts shared their rows evenly

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Program:
        """The inverse of `to_json`; KeyError or TypeError when the tree is of another version."""
        parts = {"memory": Memory(**tree["memory"]), "unknown_loops": tuple(tree["unknown_loops"]),
                 "flags": tuple(tree["flags"]), "traffic": tuple(Traffic(**row) for row in tree["traffic"])}
        return cls(**tree | parts)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The compiler gave up because the step does not fit into a device's memory.

    Bytes by its own count; libtpu 0.0.52 names the temporaries alone.
    """

    needed: int
    available: int

    def to_json(self) -> dict[str, Any]:
        return {"refusal": dataclasses.asdict(self)}


def versions() -> dict[str, str]:
    """Installed versions of what decides how a program is compiled."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compile_program(cfg: Config, devices: Sequence[jax.Device]) -> Program | Refusal:
    """Lays the config's mesh over the devices and compiles the step that training runs; reads no data.

    Raises:
      MeshError: when the mesh does not fit devices, model or batch.
      PlanError: when gradients are logged, the mesh cannot be laid over the links, or the compiler fails for another
        reason than memory.
    """
    if cfg.checkpoint.gradient_log:
        raise PlanError("checkpoint.gradient_log true makes two programs of the step, and a plan reads one; add "
                        "checkpoint.gradient_log=false to plan the run without")
    try:
        mesh = make_mesh(cfg, devices)
    except NotImplementedError as error:
        raise PlanError(f"mesh: {error}; make each size of the mesh a product of sizes of the topology") from error
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        state, batch = abstract_state(cfg, mesh), abstract_batch(cfg, sharding(mesh, "batch", None))
        try:
            lowered = compile_train_step(cfg).lower(state, batch)
        except KernelError as error:
            raise PlanError(str(error)) from error
        traced = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            refusal = read_refusal(str(error))
            if refusal is None:
                raise PlanError(f"the compiler failed: {str(error)[:2000]}") from error
            return refusal
    compiled_at = time.perf_counter()
    return read_program(compiled, mesh, traced - began, compiled_at - traced)


def read_refusal(message: str) -> Refusal | None:
    """What XLA for TPU says when the memory does not suffice, newer and older; None of another failure."""
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"\({size}\) exceeds available HBM \({size}\)|Used {size} of {size} hbm", message)
    if "RESOURCE_EXHAUSTED" not in message or found is None:
        return None
    needed, needed_unit, available, available_unit = (group for group in found.groups() if group is not None)
    return Refusal(round(float(needed) * _UNITS[needed_unit]), round(float(available) * _UNITS[available_unit]))


def read_program(compiled: Any, mesh: Mesh, trace_seconds: float, compile_seconds: float) -> Program:
    """What a compiled step (`jax.stages.Compiled`) costs on each device of the mesh."""
    walk, shape = Walk(parse(compiled.as_text())), dict(mesh.shape)
    rows = traffic(walk.runs, shape)
    flops = sum(run.times * matmul_flops(run) for run in walk.runs)
    kernels = [(run.times, declared) for run in walk.runs if (declared := kernel_flops(run)) != 0]
    names, attention = collections.Counter[str](), 0
    for run in walk.runs:
        if name := kernel_name(run):
            names[name] += run.times
            attention += run.times * (kernel_flops(run) or 0) if is_attention(name) else 0
    device = mesh.devices.flat[0]
    options = [f"{name}={value}" for name, value in compiler_options(device.platform, device.device_kind).items()]
    # A fusion's line speaks for all inside it; what starts and finishes apart runs on other units.
    timed = [run for run in walk.runs if not run.fused and not run.asynchronous and not is_collective(run)]
    stats = compiled.memory_analysis()
    memory = Memory(stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.alias_size_in_bytes,
                    stats.temp_size_in_bytes, stats.generated_code_size_in_bytes)
    return Program(
        mesh=shape, memory=memory, matmul_flops=flops,
        kernel_flops=sum(times * (declared or 0) for times, declared in kernels),
        kernels=sum(times for times, _ in kernels),
        silent_kernels=sum(times for times, declared in kernels if declared is None), kernel_names=dict(names),
        attention_flops=attention,
        cycles=sum(run.times * estimated_cycles(run) for run in timed),
        matmul_cycles=sum(run.times * estimated_cycles(run) for run in timed
                          if holds_matmul(walk.module, run.instruction)),
        traffic=rows, torus_dims={row.axes: torus_dims(mesh, row.axes) for row in rows},
        unknown_loops=tuple(walk.unknown_loops), branches=walk.branches, trace_seconds=trace_seconds,
        compile_seconds=compile_seconds, versions=versions(), flags=(*compiler_flags(), *options),
        date=datetime.date.today().isoformat(), named_loops=len(walk.named_loops))


def torus_dims(mesh: Mesh, axes: str) -> int:
    """Dims of the chips' torus along which devices differ inside a group over these axes of the mesh.

    0 when the group lies on one chip or devices have no coordinates. Axes that cannot be told span all.
    """
    names = set(mesh.axis_names) if axes == UNKNOWN else set(axes.removesuffix(" in part").split("+"))
    group = mesh.devices[tuple(slice(None) if name in names else 0 for name in mesh.axis_names)].flatten()
    places = np.asarray([getattr(device, "coords", None) or (0,) for device in group])
    return int((places != places[:1]).any(axis=0).sum()) if math.prod(places.shape) else 0
