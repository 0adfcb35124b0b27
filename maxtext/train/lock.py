"""One trainer a run directory: two would write over each other's metrics and checkpoints without a word."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NAME = ".lock"


class RunInUseError(ValueError):
    """Another process trains in the run directory."""


@contextmanager
def run_lock(run_dir: str) -> Iterator[None]:
    """Holds the lock of a run directory; the system frees it however this process ends.

    Raises:
      RunInUseError: another process holds it.
    """
    file = None
    with suppress(OSError):  # a place that cannot be written is reported by what must write there
        os.makedirs(run_dir, exist_ok=True)
        file = os.open(os.path.join(run_dir, NAME), os.O_RDWR | os.O_CREAT, 0o644)
    if file is None:
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RunInUseError(f"another process is training in {run_dir}; wait for it, stop it, or choose another "
                            f"run_name") from None
    try:
        yield
    finally:
        os.close(file)
