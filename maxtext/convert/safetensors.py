"""The safetensors format: 8 bytes of length, a JSON header, then the tensors, little-endian and without gaps.

Read and written here rather than with the package of that name: a tensor is read with one `pread`, so that memory is
bounded by it and never holds a mapped file; bfloat16 becomes a numpy array; and a file is written tensor by tensor, for
which the package wants all of them at once. Source: the format's README in huggingface/safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from maxtext.convert import ConvertError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # as in the reference implementation: a longer one is a damaged file


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    path: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The tensor, as a new array."""
        array = np.empty(self.shape, self.dtype)
        view = memoryview(array.reshape(-1).view(np.uint8))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise ConvertError(f"{self.path}: ends {len(view) - done} bytes early; copy it again")
                done += count
        return array


def read_header(path: str) -> dict[str, Stored]:
    """Every tensor of a file by name. Raises ConvertError when the file is not whole or not in this format."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise ConvertError(f"{path}: not a safetensors file, or cut off (its header would have {length} bytes, "
                                   f"the file has {size})")
            header = json.loads(file.read(length))
        return _entries(path, header, 8 + length, size)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path}: its header is not that of a safetensors file ({error!r})") from None


def _entries(path: str, header: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    header.pop("__metadata__", None)
    found, spans = {}, []
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ConvertError(f"{path}: {name} has dtype {entry['dtype']}; supported are {', '.join(DTYPES)}")
        begin, end = entry["data_offsets"]
        stored = Stored(tuple(entry["shape"]), DTYPES[entry["dtype"]], path, start + begin)
        if end - begin != stored.nbytes:
            raise ConvertError(f"{path}: {name} has {end - begin} bytes, its shape needs {stored.nbytes}")
        found[name] = stored
        spans.append((begin, end, name))
    place = 0
    for begin, end, name in sorted(spans):
        if begin != place:
            raise ConvertError(f"{path}: {name} starts at byte {begin} of the data, {place} was expected")
        place = end
    if start + place != size:
        raise ConvertError(f"{path}: has {size} bytes, its header says {start + place}; copy it again")
    return found


class Writer:
    """Writes one file, tensor by tensor, in the order of `tensors` (name -> shape); one dtype for all or for each.

    Used in a `with`; the file is forced to disk at its end.
    """

    def __init__(self, path: str, tensors: Mapping[str, tuple[int, ...]],
                 dtypes: np.dtype | Mapping[str, np.dtype]) -> None:
        dtypes = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(tensors, dtypes)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed in __exit__
        self._dtypes, self._left = dtypes, list(tensors)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, shape in tensors.items():
            end = place + n_bytes(shape, dtypes[name])
            header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: np.ndarray) -> None:
        assert self._left[:1] == [name], (name, self._left[:1])
        self._left.pop(0)
        self._file.write(np.ascontiguousarray(tensor, self._dtypes[name]).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                assert not self._left, self._left
                self._file.flush()
                os.fsync(self._file.fileno())


def shards(tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype],
           limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Splits tensors, in order, into files of at most `limit` bytes; a larger tensor has a file of its own."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors.items():
        size = n_bytes(shape, dtypes[name])
        if groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    return groups


def n_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
