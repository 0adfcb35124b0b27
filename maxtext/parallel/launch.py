"""Joins the processes of one job, as its environment describes them. With one process there is nothing to do.

Sources: JAX's own variables, and the schedulers that `jax.distributed` knows (SLURM, Open MPI, Cloud TPU).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# What each scheduler tells a process about the size of its job, and what it tells only those that it started: the shell
# of a SLURM allocation knows the size too, but is no process of the job.
SCHEDULERS = {"SLURM": ("SLURM_NTASKS", "SLURM_STEP_NODELIST"),
              "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}
TPU_HOSTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")  # comma-separated


class LaunchError(RuntimeError):
    """The processes of the job cannot be joined; the message says what to set."""


def join_processes(environment: Mapping[str, str] = os.environ) -> str | None:
    """Makes this process one of its job's. Call it before any other use of JAX.

    Returns how the job was found, such as "SLURM", or None for a single process.

    Raises LaunchError when the variables are incomplete, or the other processes do not come.
    """
    explicit = {name: environment.get(name) for name in (COORDINATOR, COUNT, INDEX)}
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
    given = {name: environment.get(name) for name in (COORDINATOR, COUNT, INDEX)}
    if given[COUNT] or given[INDEX]:
        missing = [name for name, value in given.items() if not value]
        if missing:
            raise LaunchError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but "
                              f"{' and '.join(name for name in given if name not in missing)} is; a job of several "
                              f"processes needs {COORDINATOR}=HOST:PORT, {COUNT} and {INDEX}")
        count, index = _number(COUNT, given[COUNT]), _number(INDEX, given[INDEX])
        if not 0 <= index < count:
            raise LaunchError(f"{INDEX} is {index}, but the {count} processes of {COUNT} are numbered 0 to {count - 1}")
        return None if count == 1 else "JAX's variables"
    for name, (size, started) in SCHEDULERS.items():
        if started in environment and environment.get(size, "").isdigit() and int(environment[size]) > 1:
            return name
    hosts = next((environment[name] for name in TPU_HOSTS if environment.get(name)), "")
    return "Cloud TPU" if len(hosts.split(",")) > 1 or environment.get("MEGASCALE_COORDINATOR_ADDRESS") else None


def _number(name: str, text: str | None) -> int:
    if not (text or "").isdigit():
        raise LaunchError(f"{name} is {text!r}, which is not a number of processes")
    return int(text or 0)
