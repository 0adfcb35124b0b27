"""What a run says when its devices have no memory left: what lies there, and which settings would help."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from maxtext.checkpoint.integrity import named_leaves
from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.parallel.mesh import batch_devices, sizes_of
from maxtext.parallel.show import size_text
from maxtext.train.state import abstract_state
from maxtext.train.stop import TrainingError

MEMORY = "memory.prof"
_MOST = 3
_MOMENTS = re.compile(r"^(params|optimizer\.(mu|nu))\.")
_ASKED = re.compile(r"allocat\w* (\d+) bytes|allocat\w* ([\d.]+[KMGT]i?B?)", re.I)


@contextmanager
def explained(cfg: Config, mesh: Mesh) -> Iterator[None]:
    """Turns a device that is out of memory into a TrainingError that helps; all else passes."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(explanation(cfg, mesh, str(error))) from error


def explanation(cfg: Config, mesh: Mesh, error: str) -> str:
    """One line: what was asked for, the biggest arrays of the state, settings that need less, where the rest is."""
    asked = _ASKED.search(error)
    wanted = f" allocating {size_text(int(asked[1])) if asked[1] else asked[2]}" if asked else ""
    total, biggest = biggest_arrays(cfg, mesh)
    arrays = ", ".join(f"{name} {shape} {size_text(size)}" for name, shape, size in biggest)
    helps = ", ".join(settings_that_help(cfg, batch_devices(mesh) // sizes_of(mesh)["pipeline"])[:3])
    return (f"out of memory{wanted} on a {mesh.devices.flat[0].device_kind} device{_limit(mesh)}. The state takes "
            f"{size_text(total)} of each device; its biggest arrays, with their moments: {arrays}. The rest is "
            f"activations, gradients and the batch. Settings that need less: {helps}. `maxtext plan` tells what they "
            f"save before they are tried. "
            f"{_profile(cfg.run_dir)}")


def biggest_arrays(cfg: Config, mesh: Mesh) -> tuple[int, list[tuple[str, tuple[int, ...], int]]]:
    """Bytes of the state on one device, and the largest weights there: path, shape on the device, bytes with moments.
    """
    with jax.set_mesh(mesh):
        leaves = named_leaves(abstract_state(cfg, mesh))
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, leaf in leaves.items():
        if leaf.sharding.memory_kind in (None, mesh.devices.flat[0].default_memory().kind):
            shape = leaf.sharding.shard_shape(leaf.shape)
            path = _MOMENTS.sub("", name)
            before = found.get(path, (shape, 0))
            found[path] = (before[0], before[1] + math.prod(shape) * leaf.dtype.itemsize)
    ordered = sorted(((path, shape, size) for path, (shape, size) in found.items()), key=lambda one: -one[2])
    return sum(size for *_, size in ordered), ordered[:_MOST]


def settings_that_help(cfg: Config, ways: int) -> list[str]:
    """Overrides that need less memory and are not yet made, the cheapest in speed first.

    Args:
      ways: that a micro-batch is split over the mesh.
    """
    rows = cfg.train.global_batch // cfg.train.gradient_accumulation_steps // ways  # of a micro-batch, on a device
    found = []
    if rows > 1:
        more = next(n for n in range(2, rows + 1) if rows % n == 0)
        found.append(f"train.gradient_accumulation_steps={cfg.train.gradient_accumulation_steps * more}")
    if cfg.train.remat.mode != "full":
        found.append("train.remat.mode=full")
    if cfg.optim.moments_dtype != "bfloat16":
        found.append("optim.moments_dtype=bfloat16")
    if cfg.train.loss_chunk_tokens > 128:
        found.append(f"train.loss_chunk_tokens={cfg.train.loss_chunk_tokens // 4}")
    found += ["more devices with mesh.fsdp=-1", "optim.offload=host", "a smaller train.global_batch"]
    return found


def _profile(run_dir: str) -> str:
    """Writes what lay in the devices' memory, for pprof."""
    path = os.path.join(run_dir, MEMORY)
    try:
        os.makedirs(run_dir, exist_ok=True)
        jax.profiler.save_device_memory_profile(path)
    except (RuntimeError, OSError) as error:
        return f"(What lay in memory could not be written to {path}: {reason(error)}.)"
    return f"What lay in memory is in {path}, for pprof."


def _limit(mesh: Mesh) -> str:
    stats = mesh.local_mesh.devices.flat[0].memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    return f" of {size_text(limit)}, {size_text(used or 0)} in use" if limit else ""
