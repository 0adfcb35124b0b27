"""Reads pieces of files, local or behind a URL; imported by Grain's worker processes, therefore without jax."""

from __future__ import annotations

import os
from typing import Any

from maxtext.data import DataError

ADVICE = "mount the bucket (gcsfuse, mountpoint-s3) or copy the files, and set root to that folder"


def is_url(path: str) -> bool:
    return "://" in path


def size(path: str) -> int:
    """Bytes of a file.

    Raises:
      DataError: it is missing, is a folder, or its URL cannot be opened.
    """
    if is_url(path):
        info = _remote(path, lambda system, name: system.info(name))
        if info.get("type") != "file" or info.get("size") is None:
            raise DataError(f"{path}: is not a file")
        return int(info["size"])
    try:
        if os.path.isdir(path):
            raise DataError(f"{path}: is a folder; give its files, such as {path}/*.npy")
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def read(path: str, offset: int, count: int) -> bytes:
    """Bytes offset..offset+count of a file; fewer where it ends before.

    Raises:
      DataError: it cannot be opened or read.
    """
    if is_url(path):
        return _remote(path, lambda system, name: system.cat_file(name, start=offset, end=offset + count))
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            # pread and not a memory map: a file that is cut while training is an error here, not a SIGBUS.
            return os.pread(handle, count, offset)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(f"{path}: cannot read at byte offset {offset} ({error.strerror})") from error


def _remote(path: str, use: Any) -> Any:
    """use(file system, path in it), through fsspec, which keeps its file systems and their connections."""
    import fsspec  # here, because local data never needs it

    try:
        system, name = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise DataError(f"{path}: this URL cannot be opened ({error}); {ADVICE}") from error
    try:
        return use(system, name)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except Exception as error:  # each service has its own errors, and none of them may look like a crash
        raise DataError(f"{path}: cannot read ({type(error).__name__}: {error}); check the credentials, or {ADVICE}"
                        ) from error
