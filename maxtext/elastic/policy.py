"""Decisions of the supervisor, as pure functions: who goes on, on which mesh, and when it has been enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from maxtext.config.guards import WatchdogConfig
from maxtext.config.schema import Config, MeshConfig
from maxtext.config.validate import AXES, BATCH_AXES, mesh_problems, resolve_mesh

# Seconds: for Python and JAX to start, for a group to be joined and left. What waits for other workers ends by itself
# when one of them is found dead.
START_SECONDS, JOIN_SECONDS, LEAVE_SECONDS = 600.0, 60.0, 15.0


def phase_limits(watchdog: WatchdogConfig) -> dict[str, float]:
    """Seconds that a worker may spend in a phase. An update (step) has a limit of its own, and waiting has none."""
    return {"start": START_SECONDS, "join": JOIN_SECONDS, "leave": LEAVE_SECONDS, "init": watchdog.init_seconds,
            "compile": watchdog.compile_seconds, "data": watchdog.data_seconds, "checkpoint": watchdog.save_seconds,
            "snapshot": watchdog.save_seconds, "gradient log": watchdog.save_seconds,
            "restore": watchdog.restore_seconds, "eval": watchdog.eval_seconds, "samples": watchdog.eval_seconds,
            "comparison": watchdog.step_seconds}


def resized(cfg: Config, n_devices: int, full_devices: int) -> Config | None:
    """The same run on some of its devices: the same global batch, and no larger share of a micro-batch a device.

    An axis that is -1 takes what there is. A mesh of fixed sizes gives up replicas (data) first, then shards (fsdp).
    There are as many more micro-batches as it takes, so that the memory of activations and the speed of a device stay.

    Returns None when the run does not fit these devices.
    """
    if n_devices == full_devices or cfg.mesh.auto or cfg.mesh.pipeline != 1:  # a pipeline's schedule is not ours to cut
        return None if not cfg.mesh.auto and mesh_problems(cfg, n_devices) else cfg
    batch, counts = cfg.train.global_batch, range(cfg.train.gradient_accumulation_steps, cfg.train.global_batch + 1)
    share = batch // cfg.train.gradient_accumulation_steps // _ways(cfg, full_devices)
    for count in (count for count in counts if batch % count == 0):
        train = dataclasses.replace(cfg.train, gradient_accumulation_steps=count)
        for mesh in _meshes(cfg.mesh):
            candidate = dataclasses.replace(cfg, mesh=mesh, train=train)
            if not mesh_problems(candidate, n_devices) and batch // count // _ways(candidate, n_devices) <= share:
                return candidate
    return None


def _meshes(mesh: MeshConfig) -> list[MeshConfig]:
    if -1 in (getattr(mesh, axis) for axis in AXES):
        return [mesh]
    return [mesh, *(dataclasses.replace(mesh, **{axis: -1}) for axis in ("data", "fsdp"))]


def _ways(cfg: Config, n_devices: int) -> int:
    """How many devices share a batch."""
    shape, ways = resolve_mesh(cfg.mesh, n_devices), 1
    for axis in BATCH_AXES:
        ways *= shape[axis]
    return ways


def choose_members(cfg: Config, ready: Collection[int], before: Sequence[int], workers: int,
                   each: int) -> tuple[int, ...]:
    """The largest group of ready workers, of `workers` with `each` devices, that the run fits; () when none does.

    Workers of the group before come first, in their order, so that what they hold stays where it is.
    """
    full = each * workers
    ordered = [worker for worker in before if worker in ready]
    ordered += sorted(set(ready) - set(ordered))
    for count in range(len(ordered), 0, -1):
        if resized(cfg, count * each, full) is not None:
            return tuple(ordered[:count])
    return ()


@dataclasses.dataclass(frozen=True)
class Budget:
    """How often the members may change, and how long to wait before a worker that keeps dying is started again."""

    per_hour: int
    spent: tuple[float, ...] = ()  # monotonic times of the changes of the last hour

    def after(self, now: float) -> Budget:
        """The budget after one more change."""
        return Budget(self.per_hour, (*(t for t in self.spent if now - t < 3600), now))

    def exhausted(self, now: float) -> bool:
        return sum(now - t < 3600 for t in self.spent) >= self.per_hour


def back_off(deaths_without_progress: int) -> float:
    """Seconds before a worker is started again: none at first, then 1, 2, 4 ... up to a minute."""
    return 0.0 if deaths_without_progress < 2 else min(60.0, 2.0 ** (deaths_without_progress - 2))


def survival(workers: int, replicas: int, peer: bool, every: int, saves: bool,
             gradient_log: bool = False) -> list[tuple[str, str]]:
    """What each tier of a run survives, as rows of the start table.

    Args:
      workers: in the job; each counts as one host.
      replicas: copies of the whole state over the workers (the data axis, at most the workers).
      peer: whether each worker's part has a second copy at the next one.
      every: updates between snapshots.
      saves: whether checkpoints go to disk before the end.
      gradient_log: whether gradients are kept between snapshots.
    """
    copies = max(1, min(replicas, workers)) * (2 if peer else 1)
    spread = min(copies, workers)
    lost = spread - 1  # whose loss leaves every part somewhere, whichever they are
    hosts = "but not the loss of a host's memory"
    if lost:
        most = "thus of 75% of them" if lost >= math.ceil(0.75 * workers) else "fewer than 75% of them"
        hosts = f"and the loss of the memory of any {lost} of {workers} hosts, {most}"
    disk = "every process and host, as long as the store of output_dir stands"
    between = " and the gradient of each update since" if gradient_log else ""
    return [
        ("memory", f"a snapshot every {every} updates{between}; survives the death of any or all processes, {hosts}"),
        ("disk", f"verified checkpoints; survive the loss of {disk}" if saves else
         f"one checkpoint at the end or on a stop; it survives the loss of {disk}"),
        ("site", "nothing here survives the loss of the site; copy checkpoints elsewhere"),
    ]
