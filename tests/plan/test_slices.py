"""Meshes over several slices: which devices talk over the slow network."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxtext.config.schema import MeshConfig
from maxtext.parallel.mesh import MeshError, make_mesh, over_slices
from maxtext.parallel.network import spread
from maxtext.plan.topology import make_devices, read_target
from tests.tiny import tiny_config


def fakes(slices: int, each: int) -> list[Any]:
    """Devices that come in an order that mixes the slices."""
    made = [SimpleNamespace(id=number, slice_index=number % slices, process_index=number, platform="gpu",
                            device_kind="fake") for number in range(slices * each)]
    return made[::-1]


def laid(sizes: dict[str, int], slices: int) -> tuple[tuple[str, ...], np.ndarray]:
    from maxtext.config.validate import AXES

    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = over_slices(fakes(slices, int(np.prod(shape)) // slices), shape, slices)
    assert devices.shape == shape
    return AXES, np.vectorize(lambda device: device.slice_index)(devices)


@pytest.mark.one_pass
def test_only_the_axis_data_leaves_a_slice():
    axes, slices = laid({"data": 4, "fsdp": 2, "tensor": 2}, 2)
    for axis in axes:
        same = (slices == np.take(slices, [0], axes.index(axis))).all()
        assert same == (axis != "data"), axis
    by_data = slices.reshape(4, -1)
    assert [set(row) for row in by_data] == [{0}, {0}, {1}, {1}]  # whole slices, one after the other


@pytest.mark.one_pass
def test_the_network_counts_slices_as_they_are_laid():
    """What is predicted of a group must be where its devices really are."""
    axes, slices = laid({"data": 4, "fsdp": 2, "tensor": 2}, 2)
    sizes = dict(zip(axes, slices.shape, strict=True))
    for group in (("data",), ("fsdp",), ("data", "fsdp")):
        mine = slices[tuple(slice(None) if axis in group else 0 for axis in axes)].flatten()
        assert spread(group, sizes, 8) == (len(mine) // len(set(mine)), len(set(mine)))


@pytest.mark.one_pass
def test_copies_that_the_slices_cannot_share_are_refused():
    with pytest.raises(MeshError, match="there are 4 slices, and only data and pipeline may span them"):
        laid({"data": 2, "fsdp": 8}, 4)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs the tpu extra")
def test_a_mesh_over_slices_of_a_tpu():
    devices = make_devices(read_target("v5e:4x2", 2))
    cfg = dataclasses.replace(tiny_config(global_batch=16), mesh=MeshConfig(data=2, fsdp=8, tensor=1))
    mesh = make_mesh(cfg, devices)
    assert [{device.slice_index for device in half.flat} for half in mesh.devices] == [{0}, {1}]
