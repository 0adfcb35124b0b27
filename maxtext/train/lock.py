"""One trainer a run directory: two would write over each other's metrics and checkpoints without a word.

A file lock tells processes of one machine apart at once and goes with its process. The lease (checkpoint/lease.py) does
so for several machines that share the directory.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from maxtext.checkpoint import lease, manifest
from maxtext.checkpoint.lease import Lease, LeaseError

NAME = ".lock"


class RunInUseError(ValueError):
    """Another process trains in the run directory."""


@contextmanager
def machine_lock(run_dir: str) -> Iterator[bool | None]:
    """Holds a run directory against other processes of this machine; the system frees it however this process ends.

    Yields whether the file system has such locks, or None where the directory cannot be written.

    Raises:
      RunInUseError: another process holds it; the message says which and since when.
    """
    file = None
    with suppress(OSError):
        os.makedirs(run_dir, exist_ok=True)
        file = os.open(os.path.join(run_dir, NAME), os.O_RDWR | os.O_CREAT, 0o644)
    if file is None:
        yield None
        return
    try:
        yield _lock(file, run_dir)
    finally:
        os.close(file)


@contextmanager
def run_lease(run_dir: str, alone_here: bool) -> Iterator[Lease | None]:
    """Holds the lease of a run directory; `alone_here` says that no other process of this machine trains there.

    Yields the lease, or None where the directory cannot be written, which is for others to report.

    Raises:
      RunInUseError: another process holds it; the message says which and since when.
    """
    held: Lease | None = None
    try:
        held = lease.acquire(run_dir, lambda: manifest.counted(os.path.join(run_dir, "checkpoints")),
                             alone_here=alone_here)
    except LeaseError as error:
        raise RunInUseError(str(error)) from None
    except OSError:
        held = None
    try:
        yield held
    finally:
        if held is not None:
            held.release()


@contextmanager
def run_lock(run_dir: str) -> Iterator[Lease | None]:
    """Holds a run directory, by lock and lease; see `machine_lock` and `run_lease`."""
    with machine_lock(run_dir) as alone:
        if alone is None:
            yield None
            return
        with run_lease(run_dir, alone) as held:
            yield held


def _lock(file: int, run_dir: str) -> bool:
    """Locks the file; False where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = lease.holder(run_dir)
        raise RunInUseError(f"another process is training in {run_dir}{f' ({who})' if who else ''}; wait for it, stop "
                            f"it, or choose another run_name") from None
    except OSError:
        return False
    return True
