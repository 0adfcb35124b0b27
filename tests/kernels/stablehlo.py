"""What a test asks of a program that was lowered for a TPU, which needs no TPU."""

from __future__ import annotations

import re

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

BARRIER = re.compile(r"(%\w+):2 = stablehlo.optimization_barrier (\S+), (\S+) : (\S+), (\S+)")


def tpu_mesh(mesh: Mesh) -> AbstractMesh:
    """A mesh of the same axes, of TPUs that are not there."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names),
                        abstract_device=AbstractDevice("TPU v5", 1, "tpu"))


def lowered_for_tpu(function, *arrays) -> str:
    """The StableHLO of a jitted function for shapes, under the mesh of the moment."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


def pairs_behind_barriers(text: str) -> list[tuple[str, str]]:
    """Types of both arrays of each barrier of two; nothing but it may use what goes in, and both results are used."""
    found = []
    for function in text.split("func.func")[1:]:
        for result, first, second, *types in BARRIER.findall(function):
            for name in (first, second):
                uses = re.findall(re.escape(name) + r"(?![\w#])(?! =|:)", function)
                assert len(uses) == 1, f"{name} is used beside the barrier"
            assert all(f"{result}#{number}" in function for number in (0, 1)), f"{result} is not all used"
            found.append(tuple(types))
    return found
