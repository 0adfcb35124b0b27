"""What made a checkpoint: versions, devices, mesh and flags, for whoever asks later why two runs differ."""

import hashlib
import os
import platform
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

import maxtext

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def versions() -> dict[str, str]:
    """Of what a state's bits may depend on."""
    packages = {name: metadata.version(name) for name in ("jaxlib", "numpy", "orbax-checkpoint")}
    return {"maxtext": maxtext.__version__, "python": platform.python_version(), "jax": jax.__version__, **packages}


def environment(mesh: Mesh) -> dict[str, Any]:
    """Where a run runs, for its ledger: device kind, mesh (axis sizes above 1), processes, system, versions, flags."""
    return {
        "device": mesh.devices.flat[0].device_kind, "mesh": {a: size for a, size in mesh.shape.items() if size > 1},
        "processes": jax.process_count(), "system": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "versions": versions(), **{name: os.environ[name] for name in _FLAGS if name in os.environ},
    }


def provenance(state: Any, config_text: str) -> dict[str, Any]:
    """For the manifest of `state`: config, mesh (axis sizes above 1), devices, processes and compiler flags."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    mesh = next((one.mesh for one in shardings if isinstance(one, NamedSharding)), None)
    devices = set().union(*(one.device_set for one in shardings))
    return {
        "config_sha256": hashlib.sha256(config_text.encode()).hexdigest(),
        "mesh": {} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1},
        "devices": f"{len(devices)} x {min(device.device_kind for device in devices)}" if devices else "",
        "processes": jax.process_count(),
        "flags": {name: os.environ[name] for name in _FLAGS if name in os.environ},
    }
