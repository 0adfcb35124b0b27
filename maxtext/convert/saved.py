"""A checkpoint of ours, opened for reading leaf by leaf, so that memory is bounded by the largest array."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext.checkpoint import arrays, integrity, manifest
from maxtext.config.load import ConfigError, load
from maxtext.config.runs import no_run
from maxtext.config.schema import Config
from maxtext.convert import ConvertError
from maxtext.model.decoder import Decoder, abstract_decoder

TOKENIZER = "tokenizer"  # folder with tokenizer files beside the checkpoints of a converted model
PARAMS = "params."


@dataclasses.dataclass(frozen=True)
class Saved:
    """One good step.

    Attributes:
      folder: of the run, or of the converted model.
      step_dir: of the step.
      cfg: the resolved config that it was saved with.
    """

    folder: Path
    step_dir: str
    manifest: manifest.Manifest
    cfg: Config

    def expected(self, name: str) -> manifest.Leaf:
        """What was saved of an array. Raises ConvertError when there is none of this name."""
        if name not in self.manifest.leaves:
            raise ConvertError(f"{self.step_dir} has no array {name}; is it a checkpoint of this model?")
        return self.manifest.leaves[name]

    def leaf(self, name: str) -> np.ndarray:
        """One array on the host. Raises ConvertError when it is not what was saved."""
        expected = self.expected(name)
        array = arrays.read_leaf(os.path.join(self.step_dir, self.manifest.arrays), name)
        if integrity.fingerprint_numpy(array) != expected.fingerprint:
            raise ConvertError(f"{self.step_dir}: {name} does not have the fingerprint that it was saved with")
        return array

    def params(self, mesh: Mesh) -> Decoder:
        """The weights as float32 arrays on a mesh; one of them at a time is whole on the host."""
        def place(path: tuple[Any, ...], want: jax.ShapeDtypeStruct) -> jax.Array:
            array = self.leaf(PARAMS + integrity.leaf_name(path))
            if array.shape != want.shape:
                raise ConvertError(f"{self.step_dir}: {integrity.leaf_name(path)} is {list(array.shape)}, its config "
                                   f"says {list(want.shape)}")
            assert isinstance(want.sharding, NamedSharding)
            return jax.make_array_from_callback(array.shape, want.sharding, lambda index: array[index])

        return jax.tree_util.tree_map_with_path(place, abstract_decoder(self.cfg.model, mesh))


class Pieces:
    """The weights piece by piece, in the order of the arrays: one layer's share of a stacked one is in memory.

    The arrays of a training run can only be read whole, so that there it is one of these.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved, self._key = saved, ("", -1)
        self._piece = self._whole = np.empty(0)
        self._sums, self._rows = (0, 0), 0

    def read(self, leaf: str, row: int | None) -> np.ndarray:
        """A row of an array, or the array when it is None. Raises ConvertError when it is not what was saved."""
        key = (leaf, -1 if row is None else row)
        if key != self._key:
            self._piece = np.empty(0)  # the last one need not be in memory any more
            self._piece = self._saved.leaf(PARAMS + leaf) if row is None else self._read_row(leaf, row)
            self._key = key
        return self._piece

    def _read_row(self, leaf: str, row: int) -> np.ndarray:
        saved, name = self._saved, PARAMS + leaf
        expected = saved.expected(name)
        array = arrays.read_row(os.path.join(saved.step_dir, saved.manifest.arrays), name, row)
        if array is None:
            if leaf != self._key[0]:
                self._whole = np.empty(0)
                self._whole = saved.leaf(name)
            return self._whole[row]
        if leaf != self._key[0]:
            self._sums, self._rows = (0, 0), 0
        found = integrity.partial_sums_numpy(array, expected.shape, row * array.size)
        self._sums = tuple((a + b) % integrity.WORD for a, b in zip(self._sums, found, strict=False))
        self._rows += 1
        if self._rows == expected.shape[0] and self._sums != tuple(expected.fingerprint):
            raise ConvertError(f"{saved.step_dir}: {name} does not have the fingerprint that it was saved with")
        return array


def open_saved(path: str, step: int | None = None, note: Callable[[str], None] = print) -> Saved:
    """Opens the newest good step of a run, of a folder of checkpoints, or a step's own folder.

    Every file is compared with its hash first. Raises ConvertError when there is no such good step.
    """
    root = Path(os.path.abspath(path))
    if manifest.STEP_DIR.fullmatch(root.name):
        if step is None:
            step = int(root.name.removeprefix("step_"))
        root = root.parent
    elif (root / "checkpoints").is_dir():
        root = root / "checkpoints"
    entries = [entry for entry in manifest.scan(str(root)) if entry.step is not None]
    good = {entry.step: entry for entry in entries if entry.status == "good"}
    chosen = max(good, default=None) if step is None else step
    entry = good.get(chosen)
    if entry is None or entry.manifest is None:
        if not any(e.status != "foreign" for e in entries):
            made = os.path.isfile(os.path.join(path, "config.json"))
            hint = " (it is a transformers folder, which export writes and import reads)" if made else ""
            raise ConvertError(f"{no_run(path, 'checkpoint')}{hint}; give a run, an imported model or one step's "
                               "folder")
        there = "; ".join(f"{e.name}: {e.status}" for e in entries if e.status != "foreign")
        raise ConvertError(f"{path}: no good checkpoint{'' if step is None else f' of step {step}'} ({there})")
    bad = [e.name for e in entries if e.status != "good" and e.step is not None and e.step > (chosen or 0)]
    if step is None and bad:
        note(f"warning: {', '.join(bad)} cannot be used; taking step {chosen}")
    step_dir = str(root / entry.name)
    try:
        manifest.check_files(step_dir, entry.manifest)
    except manifest.Damaged as damage:
        raise ConvertError(f"{step_dir} is damaged: {damage}") from None
    folder = root.parent if root.name == "checkpoints" else root
    return Saved(folder, step_dir, entry.manifest, load_text(entry.manifest.config_text, step_dir))


def load_text(text: str, where: str) -> Config:
    """The config in a checkpoint. Raises ConvertError when it cannot be read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yml")
        file.write_text(text)
        try:
            return load(file)
        except ConfigError as error:
            raise ConvertError(f"{where}: its config cannot be read:\n{error}") from None
