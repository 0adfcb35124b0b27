"""The device mesh: named axes in explicit sharding mode, where every array's type carries its sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from maxtext.config.schema import Config
from maxtext.config.validate import AXES, BATCH_AXES, mesh_problems, resolve_mesh


class MeshError(ValueError):
    """The mesh asked for cannot be laid over the devices at hand."""


def make_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays the configured mesh over all devices.

    Args:
      cfg: the run; `cfg.mesh` gives the sizes, one of which may be -1.
      devices: the devices to use; all of them by default.

    Returns:
      A mesh with axes `data`, `fsdp`, `expert` and `tensor`, all explicit.

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
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def batch_devices(mesh: Mesh) -> int:
    """How many ways the batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
