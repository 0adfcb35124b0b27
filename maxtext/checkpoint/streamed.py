"""Arrays of a checkpoint that is written piece by piece, because the whole state need not fit into memory.

Orbax is given a whole tree at once; a converted checkpoint of billions of weights is made of one layer's array after
the other. So its arrays are one Zarr 3 group of uncompressed arrays, for any Zarr reader to open.
`arrays.py` reads either kind; manifests, hashes and fingerprints are the same.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint import integrity

CHUNK_BYTES = 32 << 20
GROUP = "zarr.json"


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """One array to be written; `by_row` when its pieces are entries of its first dim."""

    shape: tuple[int, ...]
    dtype: str
    by_row: bool = False


def is_streamed(path: str) -> bool:
    """Whether the arrays in this directory were written here rather than by Orbax."""
    return os.path.exists(os.path.join(path, GROUP))


def _chunks(leaf: StreamedLeaf) -> list[int]:
    """A chunk's shape: whole trailing dims, as much of the others as fits CHUNK_BYTES, never two rows of pieces."""
    chunk, size = list(leaf.shape), np.dtype(leaf.dtype).itemsize
    if leaf.by_row:
        chunk[0] = 1
    for dim in range(len(chunk)):
        below = math.prod(chunk[dim + 1 :]) * size
        chunk[dim] = max(1, min(chunk[dim], CHUNK_BYTES // max(below, 1)))
    return chunk


def _open(path: str, name: str, create: StreamedLeaf | None = None) -> Any:
    import tensorstore

    where = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.join(path, name)}}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})  # the manifest syncs
    if create is None:
        return tensorstore.open(where, open=True, context=context).result()
    grid = {"name": "regular", "configuration": {"chunk_shape": _chunks(create)}}
    where["metadata"] = {"shape": list(create.shape), "data_type": create.dtype, "chunk_grid": grid,
                         "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
    where["store_data_equal_to_fill_value"] = True
    return tensorstore.open(where, create=True, context=context).result()


class Writer:
    """Writes the leaves of one step into a new directory, in pieces, and takes their fingerprints on the way."""

    def __init__(self, path: str, leaves: Mapping[str, StreamedLeaf]) -> None:
        os.makedirs(path)
        with open(os.path.join(path, GROUP), "w") as file:
            json.dump({"zarr_format": 3, "node_type": "group"}, file)
        self._stores = {name: _open(path, name, leaf) for name, leaf in leaves.items()}
        self._leaves = leaves
        self._missing = {name: set(range(leaf.shape[0])) if leaf.by_row else {None} for name, leaf in leaves.items()}
        self.sums: dict[str, tuple[int, int, int]] = dict.fromkeys(leaves, (0, 0, 0))

    def write(self, name: str, row: int | None, array: np.ndarray) -> None:
        """Writes one row of a leaf, or a whole leaf when `row` is None. Each must come exactly once."""
        leaf, store = self._leaves[name], self._stores[name]
        shape = leaf.shape if row is None else leaf.shape[1:]
        assert (array.shape, str(array.dtype)) == (shape, leaf.dtype), (name, array.shape, leaf)
        self._missing[name].remove(row)
        place = () if row is None else (row,)
        if array.ndim == 0:
            store[place].write(array).result()
        else:
            rows = _chunks(leaf)[len(place)]
            for start in range(0, array.shape[0], rows):  # chunk by chunk: tensorstore copies what it is given
                part = array[start : start + rows]
                store[(*place, slice(start, start + len(part)))].write(part).result()
        start = 0 if row is None else row * math.prod(shape)
        sums = integrity.partial_sums_numpy(array, leaf.shape, start)
        first, second, bad = (a + b for a, b in zip(self.sums[name], sums, strict=True))
        self.sums[name] = (first % integrity.WORD, second % integrity.WORD, bad)

    def close(self) -> None:
        left = [name for name, rows in self._missing.items() if rows]
        assert not left, f"these leaves are not complete: {left}"
        self._stores.clear()


def read(path: str, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Every leaf of `wanted` (jax.ShapeDtypeStruct by name) on its sharding; each device reads its own part."""
    found = {}
    for name, want in wanted.items():
        store = _open(path, name)
        sharding = want.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def part(index: Any, store: Any = store) -> np.ndarray:
            return np.asarray(store[index].read().result())

        found[name] = jax.make_array_from_callback(want.shape, sharding, part)
    return found


def read_row(path: str, name: str, row: int) -> np.ndarray:
    """One row of a leaf on the host."""
    return np.asarray(_open(path, name)[row].read().result())


def read_leaf(path: str, name: str) -> np.ndarray:
    """One whole leaf on the host."""
    return np.asarray(_open(path, name).read().result())
