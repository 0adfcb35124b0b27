"""Files that are worked out once, kept under the output folder, and memory-mapped by every process that reads them.

Each is written whole or not at all, as are the files of a data set that is being prepared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from maxtext.config.reason import reason
from maxtext.data import DataError

Opened = TypeVar("Opened")


def open_or_make(path: Path, opened: Callable[[Path], Opened | None], write: Callable[[IO[bytes]], None]) -> Opened:
    """Opens a file, and first makes it when it is missing or damaged: by one process, while the others wait for it.

    Args:
      path: where it stands; its folder is made.
      opened: opens it, or returns None when it is missing or not whole.
      write: writes its content.

    Raises:
      DataError: it cannot be written, or is still not whole afterwards.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        result = opened(path)
        if result is None:
            write_whole(path, write)
            result = opened(path)
    if result is None:
        raise DataError(f"{path}: was written but is not whole; is the disk full?")
    return result


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time per file: the others wait for its result instead of computing it again."""
    with open(f"{path}.lock", "w") as lock:
        # Some network file systems have no locks; the atomic rename alone keeps the file whole.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """A file that is there whole or not at all.

    Raises:
      DataError: it cannot be written.
    """
    # By chance and not by process id, which hosts that share the folder may have in common.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot write ({reason(error)})") from error
    finally:
        temporary.unlink(missing_ok=True)
