"""SHA-256 of files while others are still being written: hashing then costs a save no time of its own.

A file is hashed once it has been left alone for a moment, and that hash counts only if the file is the same one, with
the same size and time of change, when all is written; otherwise it is hashed again. Should a file system hide a change
from this, then the hash is not that of the file, and what reads the checkpoint back finds it damaged: an early hash can
refuse good bytes, and never pass bad ones.
"""

import concurrent.futures
import glob
import hashlib
import os
import threading
import time
from stat import S_ISREG

# What tells a file, and every change of it, from others: st_dev, st_ino, st_size, st_mtime_ns.
Stamp = tuple[int, int, int, int]
_LEAST_BYTES = 1 << 20  # smaller files are hashed at the end
_QUIET_SECONDS = 0.05  # for so long a file must not change before it is hashed
_LOOKING_SHARE = 0.05  # of a thread's time at most is spent on listing files
_THREADS = 2


def stamp(stat: os.stat_result) -> Stamp:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class EarlyHashes:
    """Hashes the files of a step as they are written, in threads of its own, until `stop`.

    Args:
      step_dir: the step's directory.
      arrays: how the names of those directories in it begin that are being written.
    """

    def __init__(self, step_dir: str, arrays: str) -> None:
        self._written = os.path.join(glob.escape(step_dir), glob.escape(arrays) + "*", "**")
        self._hashes: dict[Stamp, concurrent.futures.Future[str | None]] = {}
        self._stopped = threading.Event()
        for number in range(_THREADS):
            threading.Thread(target=self._follow, name=f"early hashes {number}", daemon=True).start()

    def of(self, at: Stamp) -> str | None:
        """The hash of the file that has this stamp now; None when it was not hashed so. Waits for one under way."""
        hashed = self._hashes.get(at)
        return None if hashed is None else hashed.result()

    def stop(self) -> None:
        """Begin with no further file."""
        self._stopped.set()

    def _follow(self) -> None:
        since: dict[Stamp, float] = {}
        pause = _QUIET_SECONDS
        while not self._stopped.wait(pause):
            now = time.monotonic()
            files = self._large_files()
            pause = max(_QUIET_SECONDS, (time.monotonic() - now) / _LOOKING_SHARE)
            since = {at: since.get(at, now) for at in files}
            for at, path in files.items():
                if now - since[at] >= _QUIET_SECONDS and not self._stopped.is_set():
                    self._hash(at, path)

    def _hash(self, at: Stamp, path: str) -> None:
        hashed: concurrent.futures.Future[str | None] = concurrent.futures.Future()
        if self._hashes.setdefault(at, hashed) is not hashed:  # done, or another thread's
            return
        try:
            hashed.set_result(sha256(path))
        except Exception:  # gone, renamed, not readable: who asks hashes it anew and learns why
            hashed.set_result(None)

    def _large_files(self) -> dict[Stamp, str]:
        found = {}
        for path in glob.iglob(self._written, recursive=True, include_hidden=True):
            try:
                stat = os.stat(path)
            except OSError:  # gone or renamed meanwhile
                continue
            if S_ISREG(stat.st_mode) and stat.st_size >= _LEAST_BYTES:
                found[stamp(stat)] = path
        return found
