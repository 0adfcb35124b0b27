"""Joins the processes of one job, as its environment describes them. With one process there is nothing to do.

Sources: JAX's own variables, whose process id a Kubernetes Indexed Job (such as each job of a JobSet on GKE) knows too,
and the schedulers that `jax.distributed` knows (SLURM, Open MPI, Cloud TPU, also on GKE). A launcher that joins the
processes itself, as Ray Train does, is left to it; under Pathways one process has the devices of all machines.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

import jax
import numpy as np

from maxtext.parallel.exchange import all_values

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What each scheduler tells a process about the size of its job, and what it tells only those that it started: the shell
# of a SLURM allocation knows the size too, but is no process of the job.
SCHEDULERS = {"SLURM": ("SLURM_NTASKS", "SLURM_STEP_NODELIST"),
              "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
POD_INDEX = "JOB_COMPLETION_INDEX"  # of a Kubernetes Indexed Job
TPU_HOSTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")  # comma-separated

_SHOWN_HOSTS = 8


class LaunchError(RuntimeError):
    """The processes of the job cannot be joined; the message says what to set."""


def join_processes(environment: Mapping[str, str] = os.environ) -> str | None:
    """Makes this process one of its job's. Call it before any other use of JAX.

    Returns how the job was found, such as "SLURM", or None for a single process.

    Raises LaunchError when the variables are incomplete, or the other processes do not come.
    """
    if "proxy" in environment.get("JAX_PLATFORMS", "").split(","):
        _connect_to_pathways()
        return None
    if jax.distributed.is_initialized():
        return "Ray" if "ray" in sys.modules else "its launcher"
    explicit = _given(environment)
    found = job(environment)
    if found is None:
        return None
    try:
        if all(explicit.values()):
            jax.distributed.initialize(explicit[COORDINATOR], int(explicit[COUNT] or 0), int(explicit[INDEX] or 0))
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"this process cannot join its job ({found}): {error}. Check that all processes were started "
                          f"and that they reach the first one; or set {COORDINATOR}=HOST:PORT, {COUNT} and {INDEX} "
                          "in each process") from None
    return found


def job(environment: Mapping[str, str]) -> str | None:
    """What describes a job of several processes here, or None. Raises LaunchError for half a description."""
    given = _given(environment)
    if given[COUNT] or given[INDEX]:
        missing = [name for name, value in given.items() if not value]
        if missing:
            raise LaunchError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but "
                              f"{' and '.join(name for name in given if name not in missing)} is; a job of several "
                              f"processes needs {COORDINATOR}=HOST:PORT, {COUNT} and {INDEX}")
        count, index = _number(COUNT, given[COUNT]), _number(INDEX, given[INDEX])
        if not 0 <= index < count:
            raise LaunchError(f"{INDEX} is {index}, but the {count} processes of {COUNT} are numbered 0 to {count - 1}")
        if count == 1:
            return None
        return "JAX's variables" if environment.get(INDEX) else "JAX's variables in a Kubernetes Indexed Job"
    for name, (size, started) in SCHEDULERS.items():
        if started in environment and environment.get(size, "").isdigit() and int(environment[size]) > 1:
            return name
    if environment.get(POD_INDEX, "0") != "0" and not any(environment.get(name) for name in TPU_HOSTS):
        raise LaunchError(f"this is pod {environment[POD_INDEX]} of a Kubernetes Indexed Job, but nothing says how "
                          f"many there are; set {COUNT} and {COORDINATOR}=HOST:PORT (of pod 0) in all of them")
    hosts = next((environment[name] for name in TPU_HOSTS if environment.get(name)), "")
    return "Cloud TPU" if len(hosts.split(",")) > 1 or environment.get("MEGASCALE_COORDINATOR_ADDRESS") else None


def describe(found: str) -> str:
    """The processes of this job in a line, for the start-up table; all of them must call it.

    Args:
      found: what `join_processes` returned.
    """
    mine = np.zeros(65, np.uint8)
    name = socket.gethostname().encode()[:64]
    mine[: len(name)], mine[64] = np.frombuffer(name, np.uint8), min(jax.local_device_count(), 255)
    rows = all_values(mine)
    hosts: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        hosts.setdefault(bytes(row[:64]).rstrip(b"\0").decode(errors="replace"), []).append(index)
    shown = [f"{host}: {', '.join(map(str, held))}" for host, held in list(hosts.items())[:_SHOWN_HOSTS]]
    shown += [f"and {len(hosts) - _SHOWN_HOSTS} more"] if len(hosts) > _SHOWN_HOSTS else []
    counts = sorted({int(row[64]) for row in rows})
    return (f"{len(rows)}, found through {found}, {' or '.join(map(str, counts))} devices each, on {len(hosts)} "
            f"host{'s' * (len(hosts) > 1)} ({'; '.join(shown)})")


def _connect_to_pathways() -> None:
    """Makes Pathways' devices those of this process, its only one. The package registers the platform `proxy`."""
    try:
        import pathwaysutils
    except ImportError:
        raise LaunchError("JAX_PLATFORMS=proxy means Pathways, which needs pathwaysutils; install it with: pip install "
                          "'maxtext[pathways]'") from None
    pathwaysutils.initialize()


def _given(environment: Mapping[str, str]) -> dict[str, str | None]:
    """JAX's variables; a Kubernetes Indexed Job gives each pod its process id."""
    given = {name: environment.get(name) for name in (COORDINATOR, COUNT, INDEX)}
    if given[COUNT] and not given[INDEX]:
        given[INDEX] = environment.get(POD_INDEX)
    return given


def _number(name: str, text: str | None) -> int:
    if not (text or "").isdigit():
        raise LaunchError(f"{name} is {text!r}, which is not a number of processes")
    return int(text or 0)
