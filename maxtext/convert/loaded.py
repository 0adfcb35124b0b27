"""Weights of a transformers folder straight onto devices, for what only reads them: nothing is written.

They are the arrays that an import would have saved, bit by bit: both take them from the same stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext.checkpoint.integrity import leaf_name
from maxtext.config.schema import Config, ModelConfig
from maxtext.convert import ConvertError
from maxtext.convert.hf import Source, open_source, weight_leaves
from maxtext.convert.saved import PARAMS
from maxtext.data.tokenizer import find_tokenizer
from maxtext.model.decoder import Decoder, abstract_decoder

Box = tuple[tuple[int, int], ...]  # start and stop of a shard along each dim


class Loaded:
    """A transformers folder, checked, of which the weights are still on disk.

    Attributes:
      cfg: a run config around its model, called as the folder.
      tokenizer: its tokenizer.json or tokenizer.model, None when it has neither.
    """

    def __init__(self, path: str, note: Callable[[str], None] = print) -> None:
        """Raises ConvertError when the folder does not hold exactly the tensors of its model."""
        self._source: Source = open_source(path, path, note)
        self.cfg: Config = self._source.cfg
        self.tokenizer = find_tokenizer(path)

    def params(self, model: ModelConfig, mesh: Mesh) -> Decoder:
        """The weights as float32 arrays on a mesh. The host holds its own shards of one array, and one piece more.

        `model` may differ from that of `cfg` in what changes no array. Raises ConvertError when it changes one.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_decoder(model, mesh))
        wanted = {PARAMS + leaf_name(path): want for path, want in leaves}
        there = {name: leaf.shape for name, leaf in weight_leaves(self.cfg.model).items()}
        if different := [name for name in sorted(wanted.keys() | there.keys())
                         if name not in wanted or wanted[name].shape != there.get(name)]:
            raise ConvertError(f"{self._source.folder.path} does not fit this model, as {different[0]} shows; leave "
                               "away what changes its sizes")
        found = {name: _place(wanted[name], ((row, array) for _, row, array in pieces)) for name, pieces in
                 itertools.groupby(self._source.stream(), key=lambda piece: piece[0])}
        return jax.tree.unflatten(treedef, [found[name] for name in wanted])


def _place(want: jax.ShapeDtypeStruct, rows: Iterable[tuple[int | None, np.ndarray]]) -> jax.Array:
    """An array on its devices out of its rows, or out of itself as the only row None."""
    assert isinstance(want.sharding, NamedSharding)
    boxes = {_box(index, want.shape) for index in want.sharding.addressable_devices_indices_map(want.shape).values()}
    shards = {box: np.empty([stop - start for start, stop in box], want.dtype) for box in boxes}
    for row, array in rows:
        for box, shard in shards.items():
            if row is None:
                shard[...] = array[_slices(box)]
            elif box[0][0] <= row < box[0][1]:
                shard[row - box[0][0]] = array[_slices(box[1:])]
    return jax.make_array_from_callback(want.shape, want.sharding, lambda index: shards[_box(index, want.shape)])


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    slices = index if index is not None else (slice(None),) * len(shape)
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
