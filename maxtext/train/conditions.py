"""What the bits of a run depend on besides its config, recorded with each checkpoint and checked on resume."""

from __future__ import annotations

import os
import platform

from jax.sharding import Mesh

from maxtext.checkpoint.manager import Restored
from maxtext.config.schema import Config
from maxtext.parallel.mesh import sizes_of
from maxtext.train.resume import ResumeError

# Flags that decide no bit: the number of virtual devices, which the mesh says, and what `maxtext launch` adds for jobs.
FREE_FLAGS = ("--xla_force_host_platform_device_count=", "--xla_cpu_collective_timeout_seconds=",
              "--xla_cpu_collective_call_terminate_timeout_seconds=")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def conditions(cfg: Config, mesh: Mesh) -> dict[str, str]:
    """By name, all that must stay so that `train.determinism` can be kept; empty when it promises nothing."""
    if cfg.train.determinism == "none":
        return {}
    device = mesh.devices.flat[0]
    found = {"device": _processor() if device.platform == "cpu" else device.device_kind}
    for name in FLAGS:
        kept = [flag for flag in os.environ.get(name, "").split() if not flag.startswith(FREE_FLAGS)]
        found[name] = " ".join(sorted(kept))
    if cfg.train.determinism == "same_mesh":
        found["mesh"] = " x ".join(f"{axis} {size}" for axis, size in sizes_of(mesh).items())
        found["train.gradient_accumulation_steps"] = str(cfg.train.gradient_accumulation_steps)
    else:
        found["virtual shards"] = str(cfg.virtual_shards)
    return found


def check_conditions(cfg: Config, mesh: Mesh, restored: Restored) -> None:
    """Compares the conditions that a checkpoint was made under with those at hand.

    Those that were not recorded are free: the run did not promise then what it promises now.

    Raises:
      ResumeError: when bits would differ although `train.determinism` promises that they do not.
    """
    if cfg.train.determinism == "none":
        return
    now, saved = conditions(cfg, mesh), restored.extra.get("conditions", {})
    lines = [f"  {name}: {saved[name]!r} when update {restored.step} was saved, {now[name]!r} now"
             for name in sorted(saved.keys() & now.keys()) if saved[name] != now[name]]
    lines += [f"  saved with {change}" for change in restored.other_versions]
    if lines:
        raise ResumeError("\n".join([
            f"train.determinism {cfg.train.determinism} promises that {cfg.run_dir} keeps every bit, but what bits "
            "depend on has changed:", *lines,
            "go back to that, or write train.determinism: none to go on without the promise"]))


def _processor() -> str:
    """The kind of CPU, which decides which instructions are used."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith(("model name", "CPU part"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
