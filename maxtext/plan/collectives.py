"""The collectives of a compiled program: kind, mesh axes, count and bytes, and whether other work may overlap them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from maxtext.plan.hlo import Run, byte_size

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
         "collective-broadcast")
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over the same mesh axes, of one device and step.

    `bytes_sent` are what a ring sends from each device: with n devices and an operand of b bytes (n - 1) b for an
    all-gather, (n - 1) / n b for a reduce-scatter or all-to-all, twice that for an all-reduce, b for a permute.
    """

    kind: str
    axes: str  # names joined by +, in the order of the mesh; "unknown" when the groups cannot be read
    devices: int  # in one group
    asynchronous: bool
    count: int
    bytes_sent: int


def traffic(runs: Iterable[Run], mesh: Mapping[str, int]) -> tuple[Traffic, ...]:
    """Sums the collectives of a walk; those inside groups of one device move nothing and are left out.

    XLA for TPU hides two kinds in fusions. A collective that matmuls overlap stands in several fusions, its start, its
    end and those between, which share a chain; it counts once, as asynchronous. A reduce-scatter may be an all-reduce
    in a fusion that is named all-reduce-scatter.
    """
    found: dict[tuple[str, str, int, bool], list[int]] = {}
    chains = set[tuple[str, ...]]()
    for run in runs:
        if not is_collective(run):
            continue
        kind, asynchronous = run.instruction.opcode.removesuffix("-start"), run.asynchronous
        chain = re.search(r'chain_id="(\d+)"', run.instruction.attributes)
        if run.outer is not None and chain:
            one = (run.outer, kind, chain[1])
            if one in chains:
                continue
            chains.add(one)
            asynchronous = True
        if run.outer is not None and run.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        groups = replica_groups(run.instruction.attributes, math.prod(mesh.values()))
        axes, devices = (UNKNOWN, math.prod(mesh.values())) if groups is None else axes_of(groups, mesh)
        if devices == 1:
            continue
        if kind == "collective-permute":  # groups are pairs
            axes = axes.removesuffix(" in part")
        scope = run.computation.instructions
        operand = sum(byte_size(scope[name].type) for name in run.instruction.operands)
        total = found.setdefault((kind, axes, devices, asynchronous), [0, 0])
        total[0] += run.times
        total[1] += run.times * bytes_sent(kind, operand, devices)
    rows = [Traffic(*key, count, sent) for key, (count, sent) in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes_sent, row.kind, row.axes)))


def is_collective(run: Run) -> bool:
    return run.instruction.opcode.removesuffix("-start") in KINDS


def bytes_sent(kind: str, operand: int, devices: int) -> int:
    """Bytes that one of `devices` in a ring sends, for an operand of so many bytes on each."""
    if kind == "all-gather":
        return operand * (devices - 1)
    if kind in ("collective-permute", "collective-broadcast"):
        return operand
    passes = 2 if kind == "all-reduce" else 1
    return passes * operand * (devices - 1) // devices


def replica_groups(attributes: str, n_devices: int) -> list[tuple[int, ...]] | None:
    """The groups of device positions that talk to each other, in any of XLA's notations; None for another one."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        return [tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)", pairs[0])]
    listed = re.search(r"replica_groups=(\{\}|\{\{.*?\}\})", attributes)
    if listed:
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return groups or [tuple(range(n_devices))]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
        return [tuple(map(int, row)) for row in ids.reshape(shape)]
    named = re.search(r"replica_groups=mesh\[((?:'[^']+'=\d+,?)+)\] ?\{([^}]*)\}", attributes)
    return _mesh_groups(named[1], named[2]) if named else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _mesh_groups(mesh: str, axes: str) -> list[tuple[int, ...]]:
    """Groups over axes of a mesh of consecutive ids, such as `'data'=2,'fsdp'=4` and `'fsdp','data':(1)2`.

    `'axis':(m)s` is the part of an axis of which m positions lie before it and s in it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        taken[name].append((int(before or 1), int(size or sizes[name])))
    shape, inside = list[int](), list[bool]()
    for name, size in sizes.items():
        cuts = sorted({1, size, *(cut for before, part in taken[name] for cut in (before, before * part))})
        for low, high in itertools.pairwise(cuts):
            shape.append(high // low)
            inside.append(any(before <= low < before * part for before, part in taken[name]))
    order = sorted(range(len(shape)), key=lambda dim: inside[dim])
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    group = math.prod(size for size, one in zip(shape, inside, strict=True) if one)
    return [tuple(map(int, row)) for row in ids.reshape(-1, group)]


def axes_of(groups: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, int]:
    """The mesh axes along which the members of each group differ, and the size of a group.

    Positions are those of the mesh, row by row. Groups that hold less than their axes are marked `in part`.
    """
    names, shape = list(mesh), tuple(mesh.values())
    varying = np.zeros(len(shape), bool)
    for group in groups:
        places = np.asarray(np.unravel_index(np.asarray(group), shape))
        varying |= (places != places[:, :1]).any(axis=1)
    axes = [name for name, varies in zip(names, varying, strict=True) if varies]
    devices = max(map(len, groups))
    part = "" if devices == math.prod(mesh[name] for name in axes) else " in part"
    return "+".join(axes) + part, devices
