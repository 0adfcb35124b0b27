"""Checkpoints in the format of torch.distributed.checkpoint, read without PyTorch.

`.metadata` is a pickle: of every tensor its shape and its chunks, and of every chunk the file, offset and length, where
torch.save wrote it. As with other weights, only the names that this needs are known to the reader. Source:
torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.13, and OLMo-core 3.0.0's own writer.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from typing import Any

import numpy as np

from maxtext.config.reason import reason
from maxtext.convert import ConvertError
from maxtext.convert.torch_files import DTYPES, TorchTensor, Unpickler, load

METADATA = ".metadata"


class _Record:
    """Stands for a class of the metadata: it has the pickled attributes and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Index(_Record):
    """Stands for MetadataIndex: the name of a tensor and the place of a chunk in it."""

    fqn: str
    offset: Any = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


_META = "torch.distributed.checkpoint.metadata"
_NAMES: dict[tuple[str, str], Any] = {
    **{(_META, name): type(name, (_Record,), {}) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "StorageMeta")},
    (_META, "MetadataIndex"): _Index,
    (_META, "_MEM_FORMAT_ENCODING"): lambda *_: None,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_Record,), {}),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_Record,), {}),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("pathlib", "PosixPath"): lambda *parts: os.path.join(*parts),
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class Distributed:
    """The tensors of one such folder. Raises ConvertError when its metadata cannot be read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            with open(os.path.join(folder, METADATA), "rb") as file:
                metadata = Unpickler(file, _NAMES).load()
            entries, stored = metadata.state_dict_metadata, metadata.storage_data
            self._chunks = {name: [tuple(chunk.offsets) for chunk in entry.chunks] for name, entry in entries.items()
                            if hasattr(entry, "chunks")}
            self._sizes = {name: {tuple(c.offsets): tuple(c.sizes) for c in entries[name].chunks}
                           for name in self._chunks}
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(entries[name].size) for name in self._chunks}
            self._stored = {(index.fqn, None if index.offset is None else tuple(index.offset)): info
                            for index, info in stored.items()}
        except (OSError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, KeyError) as error:
            raise ConvertError(f"{os.path.join(folder, METADATA)}: not metadata of torch.distributed.checkpoint that "
                               f"can be read here: {reason(error)}") from None

    def read(self, name: str) -> np.ndarray:
        """One whole tensor, put together from its chunks."""
        shape = self.shapes[name]
        whole: np.ndarray | None = None
        filled = 0
        for offsets in self._chunks[name]:
            part = self._read_chunk(name, offsets)
            if part.shape != self._sizes[name][offsets]:
                raise ConvertError(f"{self.folder}: a chunk of {name} is {list(part.shape)}, its metadata says "
                                   f"{list(self._sizes[name][offsets])}")
            whole = np.empty(shape, part.dtype) if whole is None else whole
            whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
            filled += part.size
        if whole is None or filled != math.prod(shape):
            raise ConvertError(f"{self.folder}: the chunks of {name} hold {filled} of its {math.prod(shape)} numbers")
        return whole

    def _read_chunk(self, name: str, offsets: tuple[int, ...]) -> np.ndarray:
        info = self._stored.get((name, offsets))
        if info is None:
            raise ConvertError(f"{self.folder}: nothing is stored for {name} at {list(offsets)}")
        if getattr(info, "transform_descriptors", None):
            raise ConvertError(f"{self.folder}: {name} is compressed, which is not supported; save it again without")
        path = os.path.join(self.folder, str(info.relative_path))
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            tensor = load(lambda: zipfile.ZipFile(io.BytesIO(data)))
        except OSError as error:
            raise ConvertError(f"{path}: cannot be read: {error.strerror}") from None
        except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, EOFError) as error:
            raise ConvertError(f"{path}: {name} is damaged: {error}") from None
        if not isinstance(tensor, TorchTensor):
            raise ConvertError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
        return tensor.read()
