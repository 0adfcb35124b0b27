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
from maxtext.config.wording import with_key
from maxtext.parallel.sharding import INNER

CUT_KINDS, CUT_FROM = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), 64  # see `cut_of_fsdp`
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
        raise MeshError("\n".join(with_key(*problem) for problem in problems))
    shape = tuple(resolve_mesh(cfg.mesh, len(devices)).values())
    types = (AxisType.Explicit,) * len(AXES)
    if len(devices) == 1 or devices[0].platform == "cpu":  # no topology to arrange: keep the order that was given
        return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=types)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        return Mesh(over_slices(devices, shape, slices), AXES, axis_types=types)
    inner = cut_of_fsdp(cfg, devices)
    if inner > 1:
        return cut_fsdp(jax.make_mesh(shape, AXES, axis_types=types, devices=devices), inner)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def cut_of_fsdp(cfg: Config, devices: Sequence[jax.Device]) -> int:
    """Size of the inner part of fsdp where it should be cut in two; 1 where not.

    XLA for TPU v5p and v6e gathers over all devices of a slice by an all-reduce, which sends and adds up twice the
    bytes; over fewer of them it does not (libtpu 0.0.50 and 0.0.52: always on v5p from 64 devices on, for arrays of up
    to 8 MiB on v6e; sums that are scattered likewise on both). Ironwood has an option instead (`parallel.compiler`).
    Quantised matmuls make gradients of weights that are already summed, and a fixed order of sums counts the devices of
    one axis, so these keep it whole.
    """
    kind = devices[0].device_kind
    alone = resolve_mesh(cfg.mesh, len(devices))["fsdp"] == len(devices)
    whole = cfg.quant.of("dense") is not None or cfg.train.determinism == "any_mesh"
    if not alone or len(devices) < CUT_FROM or kind not in CUT_KINDS or whole:
        return 1
    extents = [len(set(dim)) for dim in zip(*(device.coords for device in devices), strict=True)]
    return next(extent for extent in reversed(extents) if extent > 1)  # the dim of the torus that varies first


def cut_fsdp(mesh: Mesh, inner: int) -> Mesh:
    """The mesh with its axis fsdp cut into an outer part, which keeps the name, and an inner one of this size."""
    at, names = mesh.axis_names.index("fsdp"), list(mesh.axis_names)
    shape = list(mesh.devices.shape)
    shape[at : at + 1] = [shape[at] // inner, inner]
    names.insert(at + 1, INNER)
    return Mesh(mesh.devices.reshape(shape), tuple(names), axis_types=(AxisType.Explicit,) * len(names))


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """Size of each axis as configs count them: fsdp is one, however it is cut."""
    sizes = dict(mesh.shape)
    inner = sizes.pop(INNER, 1)
    return sizes | {"fsdp": sizes["fsdp"] * inner}


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
    return math.prod(sizes_of(mesh)[axis] for axis in BATCH_AXES)
