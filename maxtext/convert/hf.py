"""Folders of Hugging Face transformers, read into a checkpoint of ours; `export` writes them.

A tensor that is missing, unknown, renamed or of another shape is named before anything is written. A square matrix that
was transposed cannot be seen here; `maxtext convert verify` names the layer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from maxtext.checkpoint.manager import Checkpoints
from maxtext.checkpoint.streamed import StreamedLeaf
from maxtext.config.load import to_yaml
from maxtext.config.reason import reason
from maxtext.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SourceConfig,
    TrainConfig,
)
from maxtext.config.validate import problems
from maxtext.convert import ConvertError, safetensors
from maxtext.convert.config_json import read_model
from maxtext.convert.families import family_of
from maxtext.convert.mapping import Place, assemble, check_tensors, pieces, places
from maxtext.convert.saved import PARAMS, TOKENIZER
from maxtext.convert.torch_files import open_bins
from maxtext.model.decoder import decoder_params, leaf_names
from maxtext.parallel.sharding import is_param

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")
# Types of weights, by torch's name of them.
WEIGHT_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16),
                 "float16": np.dtype(np.float16)}


class Tensor(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Folder:
    """A transformers folder: its config.json, and its tensors, of which only the headers are read."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """The type of most of its weights, in torch's words."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + int(np.prod(tensor.shape))
        return max(counts, key=counts.__getitem__)


def open_folder(path: str) -> Folder:
    """Reads config.json and the headers of all weight files. Raises ConvertError when something is missing."""
    folder = Path(path)
    config = read_json(folder / "config.json")
    return Folder(folder, config, _open_tensors(folder))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        ours = path.name == "config.json" and (path.parent / "checkpoints").is_dir()
        hint = f" ({path.parent} is a run of ours: `maxtext convert export` writes it for transformers)" if ours else ""
        raise ConvertError(f"{path}: not found{hint}; give the folder of a transformers model") from None
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: cannot be read: {reason(error)}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: a JSON object is expected")
    return value


def _open_tensors(folder: Path) -> Mapping[str, Tensor]:
    if (folder / INDEX).exists():
        files = {name: str(file) for name, file in read_json(folder / INDEX).get("weight_map", {}).items()}
        return _union(folder, sorted(set(files.values())), files)
    found = sorted(file.name for file in folder.glob("model*.safetensors"))
    if found:
        _refuse_missing_parts(folder, found)
        return _union(folder, found, None)
    bins = sorted(folder.glob("pytorch_model*.bin"))
    if bins:
        return open_bins(bins)
    raise ConvertError(f"{folder}: no weights: neither {WEIGHTS}, nor {INDEX}, nor pytorch_model.bin")


def _union(folder: Path, files: list[str], index: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The tensors of several files, each of which has its own; checked against the index when there is one."""
    found: dict[str, Tensor] = {}
    home: dict[str, str] = {}
    for file in files:
        for name, stored in safetensors.read_header(str(folder / file)).items():
            if name in home:
                raise ConvertError(f"{folder}: {name} is in {home[name]} and again in {file}")
            found[name], home[name] = stored, file
    wrong = [f"{name} is listed in {file}, but is {'in ' + home[name] if name in home else 'in no file'}"
             for name, file in (index or {}).items() if home.get(name) != file]
    if index is not None:
        wrong += [f"{name} in {file} is not listed" for name, file in home.items() if name not in index]
    if wrong:
        raise ConvertError("\n  ".join([f"{folder / INDEX} does not fit the files beside it:", *wrong[:20]]))
    return found


def _refuse_missing_parts(folder: Path, files: list[str]) -> None:
    """Files called model-00001-of-00003 and so on must all be there."""
    for file in files:
        stem = file.removesuffix(".safetensors").split("-of-")
        if len(stem) == 2 and stem[1].isdigit() and len(files) != int(stem[1]):
            raise ConvertError(f"{folder}: {file} is one of {int(stem[1])} files, {len(files)} are there")


# ---- import


@dataclasses.dataclass(frozen=True)
class Source:
    """A transformers folder of which every tensor has its one place in a model of ours.

    Attributes:
      cfg: a run config around the model.
      wanted: the place of each tensor.
      extra: what a checkpoint says about where its weights come from.
    """

    folder: Folder
    cfg: Config
    wanted: Mapping[str, Place]
    tensors: Mapping[str, Tensor]
    extra: dict[str, Any]

    def stream(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """The weights in the order of our arrays: name, place on the leading dim of a stacked one, float32 array."""
        return weight_stream(self.wanted, lambda name: self.tensors[name].read())


def open_source(path: str, out: str, note: Callable[[str], None]) -> Source:
    """Reads and checks everything but the weights themselves. `out` gives the config its names.

    Raises ConvertError when the folder does not hold exactly the tensors of its model.
    """
    folder = open_folder(path)
    positions = folder.config.get("max_position_embeddings") or 0
    if not isinstance(positions, int):
        raise ConvertError(f"{folder.path / 'config.json'}: max_position_embeddings is {positions!r}; a whole number "
                           "is needed")
    family = family_of(folder.config, str(folder.path / "config.json"))
    model = read_model(family, folder.config, str(folder.path / "config.json"))
    ids = {key: _one_id(folder.config.get(f"{key}_token_id")) for key in ("eos", "pad")}
    cfg = converted_config(model, folder.dtype, out, positions, **ids)
    _refuse_model(cfg, str(folder.path / "config.json"))
    wanted = places(family.rules, model)
    tensors = _without_tied_head(folder, model)
    ignored = check_tensors(wanted, {name: tensor.shape for name, tensor in tensors.items()}, path,
                            family.ignored_of(model))
    _refuse_types(folder.path, {name: tensor for name, tensor in tensors.items() if name in wanted})
    if ignored:
        note(f"left out {len(ignored)} tensors that this model does not use: {ignored[0]} ...")
    return Source(folder, cfg, wanted, tensors, {"converted": {
        "from": "transformers", "family": family.name, "dtype": folder.dtype, "config": folder.config}})


def import_folder(path: str, out: str, note: Callable[[str], None], allow_nonfinite: bool = False) -> Config:
    """Writes a transformers folder as a checkpoint of ours: float32 weights alone, as step 0 of `out`/checkpoints.

    Beside it lie config.yml, with which train.init_from, eval and export open it, and the tokenizer's files. Memory is
    bounded by one array outside the blocks, or one layer's largest array, and one tensor.

    Returns the config. Raises ConvertError, also for NaN and infinite weights unless `allow_nonfinite`; then nothing
    was written.
    """
    source = open_source(path, out, note)
    stream = source.stream() if allow_nonfinite else finite(source.stream(), path)
    write_step(out, source.cfg, 0, weight_leaves(source.cfg.model), stream, source.extra)
    copied = copy_tokenizer(source.folder.path, Path(out, TOKENIZER))
    note(f"{len(source.wanted)} tensors of {source.folder.dtype}, each mapped exactly once; "
         f"tokenizer files: {', '.join(copied) or 'none found'}")
    return source.cfg


def _refuse_model(cfg: Config, where: str) -> None:
    """ConvertError when the rules of our own configs forbid the model."""
    wrong = [text for key, text in problems(cfg) if key.startswith("model.")]
    if wrong:
        raise ConvertError("\n  ".join([f"{where}: this model cannot be converted; nothing was written:", *wrong]))


def _without_tied_head(folder: Folder, model: ModelConfig) -> dict[str, Tensor]:
    """The tensors without a head that only repeats the embedding.

    ConvertError when it does not, or when embeddings are not tied and there is no head.
    """
    tensors = dict(folder.tensors)
    head, embed = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not model.tie_embeddings and head is None and embed is not None:
        raise ConvertError(f"{folder.path}: missing: lm_head.weight, though its config.json says that embeddings are "
                           "not tied; set tie_word_embeddings to true if they are")
    if model.tie_embeddings and head is not None and embed is not None:
        if head.shape != embed.shape or not np.array_equal(_bits(head.read()), _bits(embed.read())):
            raise ConvertError(f"{folder.path}: config.json says tie_word_embeddings, but lm_head.weight is not "
                               "model.embed_tokens.weight; set it to false, or remove lm_head.weight")
        del tensors["lm_head.weight"]
    return tensors


def _bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _refuse_types(path: Path, tensors: Mapping[str, Tensor]) -> None:
    wrong = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items()
             if tensor.dtype not in WEIGHT_DTYPES.values()]
    if wrong:
        raise ConvertError("\n  ".join([f"{path}: weights must be {', '.join(WEIGHT_DTYPES)}; dequantise it first:",
                                        *wrong[:20]]))


def _one_id(value: Any) -> Any:
    return next(iter(value), None) if isinstance(value, list) else value


def converted_config(model: ModelConfig, dtype: str, out: str, positions: int, eos: Any, pad: Any,
                     vocabulary: int | None = None) -> Config:
    """A run config around a converted model; what only training needs is filled with values that train nothing."""
    vocabulary = vocabulary or model.vocab_size
    ids = [value if isinstance(value, int) and 0 <= value < vocabulary else 0 for value in (eos, pad)]
    return Config(
        model=model,
        data=DataConfig(sequence_length=positions if positions > 1 else 2048, vocab_size=vocabulary,
                        eos_id=ids[0], pad_id=ids[1],
                        sources={"none": SourceConfig(paths=("a-converted-model-has-no-training-data",))}),
        optim=OptimConfig(lr=0.0),
        train=TrainConfig(steps=1, global_batch=1, compute_dtype="float32" if dtype == "float32" else "bfloat16"),
        description="Converted weights",
        run_name=Path(os.path.abspath(out)).name,
        output_dir=str(Path(os.path.abspath(out)).parent),
    )


def refuse_used(out: str) -> None:
    """ConvertError unless `out` can be made anew."""
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise ConvertError(f"{out} exists and is not empty; choose another place, or remove it")
    above = Path(os.path.abspath(out))
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        fault = f"{above} is not writable" if above.is_dir() else f"{above} is no folder"
        raise ConvertError(f"{out}: cannot be made ({fault}); give a place that you may write")


def weight_stream(wanted: Mapping[str, Place], read: Callable[[str], np.ndarray]
                  ) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Our arrays out of the tensors that fill them, one piece at a time."""
    for piece, parts in pieces(wanted.values()).items():
        yield PARAMS + piece.leaf, piece.repeat, assemble(piece, parts, read)


def finite(stream: Iterator[tuple[str, int | None, np.ndarray]], where: str
           ) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """The same pieces. Raises ConvertError at the first that has a NaN or an infinity, with its name."""
    for name, row, array in stream:
        # A sum is one pass without a copy; only where it overflows or is spoilt is each value looked at.
        if array.dtype.kind == "f" and not np.isfinite(array.sum(dtype=np.float64)):
            count = int((~np.isfinite(array)).sum())
            if count:
                place = name.removeprefix(PARAMS) + ("" if row is None else f" (repeat {row})")
                raise ConvertError(f"{where}: {place} has {count:,} NaN or infinite values of {array.size:,}; nothing "
                                   "was written. Fetch the files again, or import it as it is with --allow-nonfinite")
        yield name, row, array


def weight_leaves(model: ModelConfig, prefix: str = PARAMS) -> dict[str, StreamedLeaf]:
    """What is written of the weights, or of the moments, of a model."""
    declared = decoder_params(model)
    return {prefix + name: StreamedLeaf(p.shape, "float32", by_row=p.dims[0] == "layers") for name, p in
            zip(jax.tree.leaves(leaf_names(declared)), jax.tree.leaves(declared, is_leaf=is_param), strict=True)}


def write_step(out: str, cfg: Config, step: int, leaves: dict[str, StreamedLeaf],
               stream: Iterator[tuple[str, int | None, np.ndarray]], extra: dict[str, Any]) -> None:
    """Writes one streamed step and config.yml into a new folder; none is left when that fails."""
    refuse_used(out)
    text = to_yaml(cfg)
    checkpoints = Checkpoints(os.path.join(out, "checkpoints"), CheckpointConfig(), config_text=text)
    try:
        checkpoints.save_streamed(step, leaves, stream, extra)
        Path(out, "config.yml").write_text(text)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    finally:
        checkpoints.close()


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies the tokenizer's files as they are; returns their names."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names
