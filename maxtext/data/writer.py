"""Writes headerless token files, each with a companion that lists its documents."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.data.text_source import Document

SHARD_TOKENS = 1 << 28


class TokenWriter:
    """Appends documents to headerless token files `<part>-<n>.npy`, a new one every SHARD_TOKENS.

    Beside each stands `<part>-<n>.csv.gz` with a line `start,end,id,src,loc` a document, in tokens of the file; the end
    of document counts to it (the form of dolma's tokenizer, which OLMo-core reads).
    """

    def __init__(self, root: Path, part: str, dtype: np.dtype):
        self._root, self._part, self._dtype = root, part, dtype
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._tokens = 0
        self.files: list[dict[str, Any]] = []
        self.documents = self.tokens = self.text_bytes = 0

    def write(self, ids: np.ndarray, text_bytes: int, document: Document) -> None:
        """Appends one document, its end-of-document id included."""
        if self._file is None:
            self._stem = f"{self._part}-{len(self.files):05d}"
            self._file = open(self._root / f"{self._stem}.npy", "wb")  # noqa: SIM115 (closed in finish)
            self._companion = open(self._root / f"{self._stem}.csv.gz", "wb")  # noqa: SIM115
            # Without a time, so that the same documents give the same bytes.
            self._lines = io.TextIOWrapper(gzip.GzipFile("", "wb", 6, self._companion, mtime=0), encoding="utf-8",
                                           newline="")
            self._rows = csv.writer(self._lines, lineterminator="\n")
            self._hash, self._tokens = hashlib.sha256(), 0
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._rows.writerow((self._tokens, self._tokens + len(ids), _one_line(document.name), _one_line(document.file),
                             document.place))
        self._tokens += len(ids)
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        if self._tokens >= SHARD_TOKENS:
            self.finish()

    def finish(self) -> None:
        """Closes the current file on disk and records it."""
        if self._file is not None:
            self._lines.close()
            for file in (self._file, self._companion):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            self._file = None
            self.files.append({"path": self._stem, "tokens": self._tokens, "sha256": self._hash.hexdigest()})

    def entry(self) -> dict[str, Any]:
        """What the manifest says of this part of the source."""
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.text_bytes, "files": self.files}


def _one_line(text: str) -> str:
    """A name without control characters: readers of the companion cut it at line ends, whatever is quoted."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
