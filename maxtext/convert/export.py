"""Folders that transformers loads, written from a checkpoint of ours. Memory is bounded by one piece of one array."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.convert import ConvertError, safetensors
from maxtext.convert.config_json import Family, write_config
from maxtext.convert.families import family_for
from maxtext.convert.hf import INDEX, WEIGHT_DTYPES, WEIGHTS, copy_tokenizer, open_folder, read_json, refuse_used
from maxtext.convert.mapping import Place, check_tensors, places
from maxtext.convert.saved import TOKENIZER, Pieces, Saved

# Keys of a config.json that say nothing about the architecture; an export writes them back as they came.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_folder(saved: Saved, path: str, dtype: str | None, shard_bytes: int, vocabulary: int | None,
                  note: Callable[[str], None]) -> Family:
    """Writes a checkpoint of ours as a folder that transformers loads.

    Args:
      dtype: of the tensors, in torch's words; None: that of the folder which was imported, else float32.
      shard_bytes: size of a weight file above which there are several, with an index.
      vocabulary: rows of embedding and head that are written, the others being padding that no token uses; None: all.

    Raises ConvertError; then nothing was written under `path`.
    """
    refuse_used(path)
    origin = (saved.manifest.extra or {}).get("converted", {})
    dtype = dtype or (origin.get("dtype") if origin.get("dtype") in ("float32", "bfloat16") else "float32")
    model = saved.cfg.model
    family = family_for(model, origin.get("family"))
    wanted = places(family.rules, model)
    rows = model.vocab_size if vocabulary is None else vocabulary
    shapes = {place.name: tuple(rows if i == 0 and is_vocabulary(place) else size for i, size in enumerate(place.shape))
              for place in wanted.values()}
    partial = f"{os.path.abspath(path)}.partial-{os.getpid()}"
    try:
        os.makedirs(partial)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be made ({error.strerror}); give a place that you may write") from error
    try:
        dtypes = {name: np.dtype(np.float32) if place.rule.float32 else WEIGHT_DTYPES[dtype]
                  for name, place in wanted.items()}
        _write_weights(partial, saved, wanted, shapes, dtypes, shard_bytes)
        config = write_config(family, dataclasses.replace(model, vocab_size=rows), dtype, _positions(saved),
                              _kept(saved))
        Path(partial, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        copied = _export_tokenizer(saved, Path(partial))
        written = open_folder(partial)  # the exactly-once check of what lies on disk now
        trimmed = places(family.rules, dataclasses.replace(model, vocab_size=rows))
        check_tensors(trimmed, {name: tensor.shape for name, tensor in written.tensors.items()}, partial)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    note(f"{len(wanted)} tensors of {dtype} as {family.architecture}, each written exactly once; "
         f"tokenizer files: {', '.join(copied) or 'none known'}")
    if rows != model.vocab_size:
        note(f"vocabulary: {rows} of {model.vocab_size} rows; the others are padding (--keep-padding writes them too)")
    return family


def is_vocabulary(place: Place) -> bool:
    """Whether the first dim of the tensor runs over the vocabulary."""
    return place.piece.leaf in ("embed", "head")


def _write_weights(folder: str, saved: Saved, wanted: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]],
                   dtypes: Mapping[str, np.dtype], limit: int) -> None:
    groups = safetensors.shards(shapes, dtypes, limit)
    names = [WEIGHTS] if len(groups) == 1 else [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    stored = Pieces(saved)  # tensors are in the order of our arrays, so that each piece is read once
    for file, group in zip(names, groups, strict=True):
        with safetensors.Writer(os.path.join(folder, file), group, dtypes) as writer:
            for name in group:
                place = wanted[name]
                piece = stored.read(place.piece.leaf, place.piece.repeat)
                writer.write(name, place.to_theirs(piece)[: shapes[name][0]])
    if len(groups) > 1:
        files = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        size = sum(safetensors.n_bytes(shape, dtypes[name]) for name, shape in shapes.items())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        Path(folder, INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _kept(saved: Saved) -> dict[str, Any]:
    config = (saved.manifest.extra or {}).get("converted", {}).get("config")
    if config is not None:
        return {key: config[key] for key in _KEPT if key in config}
    data = tokens_of(saved)
    return {"bos_token_id": None, "eos_token_id": data["eos_id"], "pad_token_id": data["pad_id"]}


def _positions(saved: Saved) -> int:
    config = (saved.manifest.extra or {}).get("converted", {}).get("config", {})
    return config.get("max_position_embeddings") or saved.cfg.data.sequence_length


def tokens_of(saved: Saved) -> dict[str, Any]:
    """vocab_size, eos_id and pad_id of the tokenizer that a model was trained with; None where they are not known."""
    data = saved.cfg.data
    known = {"vocab_size": data.vocab_size, "eos_id": data.eos_id, "pad_id": data.pad_id}
    if data.prepared is not None and Path(data.prepared, "dataset.json").is_file():
        prepared = read_json(Path(data.prepared, "dataset.json"))
        known = {key: prepared.get(key) if value is None else value for key, value in known.items()}
    return known


def _export_tokenizer(saved: Saved, target: Path) -> list[str]:
    """The tokenizer's files that lie beside a converted model, or that of the prepared data of a run."""
    copied = copy_tokenizer(saved.folder / TOKENIZER, target)
    data = saved.cfg.data
    if copied or data.prepared is None or not Path(data.prepared, "dataset.json").is_file():
        return copied
    file = Path(data.prepared, read_json(Path(data.prepared, "dataset.json"))["tokenizer"]["file"])
    name = "tokenizer.json" if file.suffix == ".json" else "tokenizer.model"
    shutil.copyfile(file, target / name)
    return [name]
