"""Checks of token files before the first step, so that a bad file costs seconds and not a night."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from maxtext.data import DataError, storage
from maxtext.data.manifest import DTYPES

NPY_MAGIC = b"\x93NUMPY"
SAMPLE_BLOCKS = 8
SAMPLE_BYTES = 32 << 10
PROBLEMS_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class FileReport:
    """What is known of a token file without reading all of it; `sample` is the sha256 of its sampled bytes."""

    n_tokens: int
    sample: str


def read_tokens(path: str, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Tokens start..start+count of a headerless file, shape (count,).

    Raises:
      DataError: the file ends before, or cannot be read.
    """
    width = dtype.itemsize
    data = storage.read(path, start * width, count * width)
    if len(data) != count * width:
        raise DataError(f"{path}: {len(data)} bytes at byte offset {start * width} where {count * width} are expected: "
                        "the file was cut after it was checked")
    return np.frombuffer(data, dtype)


def check_ids(tokens: np.ndarray, vocab_size: int, path: str, start: int) -> None:
    """Refuses an id that the vocabulary does not have.

    Args:
      tokens: raw ids of the unsigned file type, in file order.
      vocab_size: every id must be below it.
      path, start: the file, and the token in it at which `tokens` begins; for the message.

    Raises:
      DataError: with the first bad id, its byte offset and the likely cause.
    """
    if tokens.size and int(tokens.max()) >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        place = f"{path}: id {int(tokens.flat[at])} at byte offset {(start + at) * tokens.dtype.itemsize}"
        raise DataError(f"{place} is not below vocab_size {vocab_size}{_other_type(tokens, vocab_size)}")


def check_files(paths: Iterable[str], dtype: np.dtype, vocab_size: int,
                expected: dict[str, int] | None = None) -> dict[str, FileReport]:
    """Checks every file: there, not empty, whole tokens, raw, and sampled ids in the vocabulary.

    Args:
      paths: headerless token files; repeated paths are checked once.
      dtype: type in which they will be read.
      vocab_size: every id must be below it.
      expected: number of tokens by path, where a manifest says it.

    Returns:
      A report by path.

    Raises:
      DataError: all problems, one a line.
    """
    unique = list(dict.fromkeys(paths))

    def check(path: str) -> FileReport | str:
        try:
            return _check_file(path, dtype, vocab_size, (expected or {}).get(path))
        except DataError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        reports = dict(zip(unique, pool.map(check, unique), strict=True))
    raise_problems([report for report in reports.values() if isinstance(report, str)])
    return {path: report for path, report in reports.items() if isinstance(report, FileReport)}


def raise_problems(problems: Sequence[str]) -> None:
    """Raises one DataError with all problems, or returns when there are none."""
    if problems:
        more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        raise DataError("\n".join([*problems[:PROBLEMS_SHOWN], *more]))


def _check_file(path: str, dtype: np.dtype, vocab_size: int, expected: int | None) -> FileReport:
    width = dtype.itemsize
    size = storage.size(path)
    if storage.read(path, 0, len(NPY_MAGIC)) == NPY_MAGIC:
        raise DataError(f"{path}: starts with a .npy header at byte offset 0; token files are raw. Rewrite it with "
                        "numpy.load(file).tofile(new_file)")
    if size == 0:
        raise DataError(f"{path}: is empty (0 bytes)")
    if size % width:
        raise DataError(f"{path}: {size} bytes are not whole {dtype.name} tokens of {width} bytes ({size % width} left "
                        f"over at byte offset {size - size % width}): cut short, or another dtype")
    if expected is not None and size != expected * width:
        raise DataError(f"{path}: {size} bytes hold {size // width} {dtype.name} tokens, but the manifest says "
                        f"{expected}: changed after it was prepared")
    blocks = _sample(path, size, width)
    for offset, data in blocks:
        tokens = np.frombuffer(data, dtype)
        check_ids(tokens, vocab_size, path, offset // width)
    _check_not_wider(path, dtype, [data for _, data in blocks])
    return FileReport(size // width, hashlib.sha256(b"".join(data for _, data in blocks)).hexdigest())


def _sample(path: str, size: int, width: int) -> list[tuple[int, bytes]]:
    """Blocks spread evenly over the file, the first and the last bytes included; the whole of a small file."""
    block = SAMPLE_BYTES // width * width
    if size <= block * SAMPLE_BLOCKS:
        return [(0, storage.read(path, 0, size))]
    # Offsets are multiples of 4 so that a wider type keeps its phase.
    offsets = [(size - block) * i // (SAMPLE_BLOCKS - 1) // 4 * 4 for i in range(SAMPLE_BLOCKS - 1)] + [size - block]
    return [(offset, storage.read(path, offset, block)) for offset in offsets]


def _check_not_wider(path: str, dtype: np.dtype, blocks: list[bytes]) -> None:
    """Refuses a uint32 file that is read as uint16 or uint8 (and uint16 as uint8): its high words are nearly all 0."""
    for wider in sorted(DTYPES.values(), key=lambda other: -other.itemsize):
        if wider.itemsize <= dtype.itemsize:
            break
        # The last block of a file may have another phase: left out unless it is the only one.
        words = np.concatenate([np.frombuffer(data[:len(data) // wider.itemsize * wider.itemsize], dtype)
                                for data in blocks[:max(1, len(blocks) - 1)]])
        groups = words.reshape(-1, wider.itemsize // dtype.itemsize)
        low, high = np.split(groups, 2, axis=1)
        # No text has a tiny id at every second place; 15 in the high word leaves room for a million ids.
        if len(groups) >= 32 and high.max() <= 15 < low.max():
            raise DataError(f"{path}: looks like {wider.name} tokens, read as {dtype.name}: from byte offset 0 on, the "
                            f"upper half of every {wider.itemsize} bytes is at most {int(high.max())}. Set data.dtype "
                            f"to {wider.name}, or correct data.vocab_size")


def _other_type(tokens: np.ndarray, vocab_size: int) -> str:
    """A hint when the same bytes are all good ids in another type."""
    data = np.ascontiguousarray(tokens).tobytes()
    for name, other in DTYPES.items():
        if other.itemsize != tokens.dtype.itemsize and len(data) % other.itemsize == 0:
            read = np.frombuffer(data, other)
            if int(read.max()) < vocab_size and (other.itemsize > 1 or vocab_size <= 256):
                return f"; read as {name} all ids fit: is data.dtype right?"
    return ""
