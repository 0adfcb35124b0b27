"""The device mesh: named axes in explicit sharding mode, where every array's type carries its sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxtext.config.schema import Config
from maxtext.config.validate import AXES, BATCH_AXES, mesh_problems, resolve_mesh

SLICED_AXES = ("data", "pipeline")  # the axes that may span slices


class MeshError(ValueError):
    """The mesh asked for cannot be laid over the devices at hand."""


def make_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays the configured mesh over all devices.

    Args:
      cfg: the run; `cfg.mesh` gives the sizes, one of which may be -1.
      devices: the devices to use; all of them by default.

    Returns:
      A mesh with all axes of `AXES`, explicit.

    Raises:
      MeshError: when sizes and devices, or sizes and the model or batch, do not fit; the arithmetic is in the message.
    """
    devices = jax.devices() if devices is None else devices
    problems = mesh_problems(cfg, len(devices))
    if problems:
        raise MeshError("\n".join(f"{key}: {message}" for key, message in problems))
    shape = tuple(resolve_mesh(cfg.mesh, len(devices)).values())
    types = (AxisType.Explicit,) * len(AXES)
    if len(devices) == 1 or devices[0].platform == "cpu":  # no topology to arrange: keep the order that was given
        return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=types)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        return Mesh(over_slices(devices, shape, slices), AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def over_slices(devices: Sequence[jax.Device], shape: Sequence[int], slices: int) -> np.ndarray:
    """Lays devices of several slices out so that only copies of the model, and stages, talk between slices.

    The slices are the outer part of the axis data, and of pipeline where data has too few; all other axes stay inside a
    slice, whose links are faster.

    Raises:
      MeshError: when data and pipeline are not shared evenly by the slices.
    """
    sizes, left = dict(zip(AXES, shape, strict=True)), slices
    across = dict.fromkeys(AXES, 1)
    for axis in SLICED_AXES:
        across[axis] = math.gcd(sizes[axis], left)
        left //= across[axis]
    if left > 1:
        named = " x ".join(f"mesh.{axis} {sizes[axis]}" for axis in SLICED_AXES)
        raise MeshError(f"there are {slices} slices, and only {SLICED_AXES[0]} and {SLICED_AXES[1]} may span them, but "
                        f"{named} is not a multiple of {slices}; set mesh.data to a multiple of {slices}")
    inside = [size // across[axis] for axis, size in sizes.items()]
    return mesh_utils.create_hybrid_device_mesh(inside, list(across.values()), devices)


def batch_devices(mesh: Mesh) -> int:
    """How many ways the batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
