"""Writes headerless token files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

SHARD_TOKENS = 1 << 28


class TokenWriter:
    """Appends documents to headerless token files `<part>/<source>-00000.npy`, a new one every SHARD_TOKENS."""

    def __init__(self, root: Path, part: str, source: str, dtype: np.dtype):
        self._root, self._stem, self._dtype = root, f"{part}/{source}", dtype
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._tokens = 0
        self.files: list[dict[str, Any]] = []
        self.documents = self.tokens = self.text_bytes = 0

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        """Appends one document, its end-of-document id included."""
        if self._file is None:
            self._path = f"{self._stem}-{len(self.files):05d}.npy"
            (self._root / self._path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._root / self._path, "wb")  # noqa: SIM115 (closed in finish)
            self._hash, self._tokens = hashlib.sha256(), 0
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(ids)
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        if self._tokens >= SHARD_TOKENS:
            self.finish()

    def finish(self) -> None:
        """Closes the current file on disk and records it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self.files.append({"path": self._path, "tokens": self._tokens, "sha256": self._hash.hexdigest()})

    def entry(self) -> dict[str, Any]:
        """What the manifest says of this part of the source."""
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.text_bytes, "files": self.files}
