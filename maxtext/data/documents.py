"""Where documents begin and end: in an instance, in a token file, and as its `.csv.gz` companion says.

Shapes: R rows (instances), T tokens of one instance.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Sequence

import numpy as np

from maxtext.config.reason import reason
from maxtext.data import DataError, storage
from maxtext.data.preflight import read_tokens

SCAN_BLOCK_TOKENS = 1 << 22


def segments(tokens_RT: np.ndarray, eos_id: int) -> np.ndarray:
    """The number of each token's document in its row: a document ends with its end-of-document id.

    Padding behind the last document counts as one more document. Source: OLMo-core `data/utils.py`,
    `get_document_lengths`.

    Returns:
      int32, shape (R, T), from 0 in each row.
    """
    segments_RT = np.zeros(tokens_RT.shape, np.int32)
    np.cumsum(tokens_RT[:, :-1] == eos_id, axis=1, dtype=np.int32, out=segments_RT[:, 1:])
    return segments_RT


def segments_of_lengths(lengths: Sequence[np.ndarray], tokens_RT: np.ndarray, eos_id: int) -> np.ndarray:
    """`segments` where the lengths of the documents in each row are known; only what follows them is searched."""
    segments_RT = segments(tokens_RT, eos_id)
    for row, documents in enumerate(lengths):
        real = int(documents.sum())
        segments_RT[row, :real] = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
        if real < tokens_RT.shape[1]:
            segments_RT[row, real:] += len(documents) - segments_RT[row, real]
    return segments_RT


def document_bounds(path: str, dtype: np.dtype, n_tokens: int, eos_id: int) -> np.ndarray:
    """0, and the place behind each end of document in a file, int64. Raises DataError when it cannot be read."""
    ends = [np.zeros(1, np.int64)]
    for start in range(0, n_tokens, SCAN_BLOCK_TOKENS):
        tokens = read_tokens(path, dtype, start, min(SCAN_BLOCK_TOKENS, n_tokens - start))
        ends.append(np.flatnonzero(tokens == eos_id) + (start + 1))
    return np.concatenate(ends)


def scan(path: str, dtype: np.dtype, n_tokens: int, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """First token and length of each document of a file; tokens after the last end of document are left out.

    Returns:
      int64 starts and lengths, each of shape (documents,).

    Raises:
      DataError: the file holds no end of document, or cannot be read.
    """
    bounds = document_bounds(path, dtype, n_tokens, eos_id)
    if len(bounds) == 1:
        raise DataError(f"{path}: no end of document (id {eos_id}) in its {n_tokens} tokens: is eos_id right?")
    return bounds[:-1], np.diff(bounds)


def companion(path: str) -> str:
    """The file that lists the documents of a token file: part-00.npy has part-00.csv.gz."""
    return f"{os.path.splitext(path)[0]}.csv.gz"


def companion_hashes(paths: Sequence[str]) -> list[str]:
    """sha256 of the companion of each token file.

    Raises:
      DataError: one is missing or cannot be read.
    """
    hashes = []
    for path in paths:
        hashes.append(hashlib.sha256(_companion_bytes(path)).hexdigest())
    return hashes


def _companion_bytes(path: str) -> bytes:
    name = companion(path)
    try:
        return storage.read(name, 0, storage.size(name))
    except DataError as error:
        raise DataError(f"{error}; it should list the documents of {path}. data.document_boundaries: eos needs no such "
                        "file") from error


def read_companion(path: str, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`scan`, from the `start,end[,...]` lines of the token file's companion.

    Raises:
      DataError: there is none, or a line that is not a document inside the file; names the line.
    """
    name, data = companion(path), _companion_bytes(path)
    try:
        fields = [line.split(",", 2)[:2] for line in gzip.decompress(data).decode("utf-8").splitlines()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be decompressed ({reason(error)})") from error
    try:
        bounds = np.array([(int(start), int(end)) for start, end in fields], np.int64).reshape(-1, 2)
    except ValueError as error:
        raise DataError(f"{name}: lines must be start,end[,...] in tokens ({error})") from error
    wrong = np.flatnonzero((bounds[:, 0] < 0) | (bounds[:, 0] >= bounds[:, 1]) | (bounds[:, 1] > n_tokens))
    if wrong.size or not len(bounds):
        what = (f"{name}:{wrong[0] + 1}: {bounds[wrong[0]].tolist()} is not a document" if wrong.size else
                f"{name}: has no document")
        raise DataError(f"{what} inside the {n_tokens} tokens of {path}")
    return bounds[:, 0], bounds[:, 1] - bounds[:, 0]
