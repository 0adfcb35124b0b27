"""Weights in PyTorch's own files, read without PyTorch.

Such a file is a Zip archive: `data.pkl` describes the tensors, `data/<key>` are the raw numbers. The pickle is read
with a table of the few names that tensors need; any other name is refused, so nothing in a file can run. Source: the
layout that torch.save has written since PyTorch 1.6, and torch/_utils.py for `_rebuild_tensor_v2`.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxtext.config.reason import reason
from maxtext.convert import ConvertError

DTYPES = {
    "float32": np.dtype("<f4"), "float64": np.dtype("<f8"), "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "int64": np.dtype("<i8"), "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"), "int8": np.dtype("i1"), "uint8": np.dtype("u1"), "bool": np.dtype("?"),
}
_STORAGES = {"FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
             "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16",
             "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool"}


class Unpickler(pickle.Unpickler):
    """A pickle reader that knows only the names in a table."""

    def __init__(self, file: io.BufferedIOBase, names: Mapping[tuple[str, str], Any],
                 persistent: Callable[[Any], Any] | None = None) -> None:
        super().__init__(file)
        self._names, self._persistent = names, persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which no weights need")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it points outside of itself")
        return self._persistent(pid)


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The numbers under `data/<key>` of an archive; several tensors may share them."""

    key: str
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """A tensor of an archive that is not read yet; offset and strides count elements of its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    open: Callable[[], zipfile.ZipFile]

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    def read(self) -> np.ndarray:
        """The tensor as an array of its own."""
        with self.open() as archive:
            prefix = _prefix(archive)
            data = archive.read(f"{prefix}data/{self.storage.key}")
            if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder") != b"little":
                raise ConvertError(f"{archive.filename}: big-endian weights are not supported")
        flat = np.frombuffer(data, self.dtype)
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if 0 not in self.shape and not 0 <= last < flat.size:
            raise ConvertError(f"a tensor of shape {self.shape} reaches beyond its {flat.size} numbers")
        size = self.dtype.itemsize
        steps = [stride * size for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, steps).copy()


def _prefix(archive: zipfile.ZipFile) -> str:
    return next(name for name in archive.namelist() if name.split("/", 1)[-1] == "data.pkl").removesuffix("data.pkl")


def load(open_archive: Callable[[], zipfile.ZipFile]) -> Any:
    """What torch.save wrote, with `TorchTensor`s in the place of tensors.

    Raises pickle.UnpicklingError for anything but tensors and plain containers, zipfile.BadZipFile for other files.
    """
    def rebuild(storage: _Storage, offset: int, size: Sequence[int], strides: Sequence[int], *_: Any) -> TorchTensor:
        return TorchTensor(storage, offset, tuple(size), tuple(strides), open_archive)

    names: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("torch", "Size"): tuple,
        **{("torch", name): DTYPES[dtype] for name, dtype in _STORAGES.items()},
    }
    with open_archive() as archive:
        pickled = archive.read(_prefix(archive) + "data.pkl")
    return Unpickler(io.BytesIO(pickled), names, lambda pid: _Storage(pid[2], pid[1])).load()


def open_bins(files: Sequence[Path]) -> dict[str, TorchTensor]:
    """The tensors of pytorch_model*.bin files; none is read yet."""
    found: dict[str, TorchTensor] = {}
    for file in files:
        try:
            state = load(lambda file=file: zipfile.ZipFile(file))
        except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, EOFError, KeyError) as error:
            raise ConvertError(f"{file}: cannot be read as weights alone ({reason(error)}); save it as safetensors"
                               ) from None
        if not isinstance(state, dict):
            raise ConvertError(f"{file}: holds a {type(state).__name__}, not named tensors")
        for name, tensor in state.items():
            if name in found:
                raise ConvertError(f"{file}: {name} is in another file too")
            if not isinstance(tensor, TorchTensor):
                raise ConvertError(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
            found[name] = tensor
    return found
