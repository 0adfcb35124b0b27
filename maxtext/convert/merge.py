"""`maxtext checkpoint merge OUT RUN[@STEP] RUN[@STEP] ...`: the plain average of the weights of several checkpoints.

OLMo 3 32B averages two mid-trainings, and the last three checkpoints of its long-context stage (its README calls it a
soup; Wortsman et al. 2022). Optimizer states are left out: the mean of moments of several runs is of no run.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint import manifest
from maxtext.checkpoint.early_hashes import sha256
from maxtext.checkpoint.streamed import StreamedLeaf
from maxtext.config.schema import Config, InitFromConfig
from maxtext.convert import ConvertError
from maxtext.convert.hf import copy_tokenizer, refuse_used, weight_leaves, write_step
from maxtext.convert.saved import TOKENIZER, Saved, open_saved

_WITH_STEP = re.compile(r"(.+)@(\d+)")


def merge(out: str, checkpoints: Sequence[str]) -> list[Saved]:
    """Writes the arithmetic mean of the weights as step 0 of a new folder, with the first one's config.

    Sums are in float64, leaf after leaf: memory holds one leaf in float64 and in float32, whatever the model's size.

    Args:
      out: the new folder.
      checkpoints: two or more, as `path` or `path@step`.

    Returns what was averaged. Raises ConvertError, before anything is written, when there are fewer than two, when one
    is missing, damaged or given twice, or when the models differ; CheckpointError when writing fails.
    """
    refuse_used(out)
    if len(checkpoints) < 2:
        raise ConvertError(f"a mean of {len(checkpoints)} checkpoint; give two or more")
    sources = [_open(text) for text in checkpoints]
    _refuse_twice(sources)
    for other in sources[1:]:
        _refuse_other_model(sources[0], other)
    leaves = weight_leaves(sources[0].cfg.model)
    for source in sources:
        _refuse_leaves(source, leaves)
    extra = {"merged": {"rule": "arithmetic mean in float64", "of": [_provenance(source) for source in sources]}}
    write_step(out, _config_of(sources[0].cfg, out, len(sources)), 0, leaves, _pieces(sources, leaves), extra)
    copy_tokenizer(sources[0].folder / TOKENIZER, Path(out, TOKENIZER))
    return sources


def _open(text: str) -> Saved:
    named = None if os.path.exists(text) else _WITH_STEP.fullmatch(text)
    return open_saved(text) if named is None else open_saved(named[1], int(named[2]))


def _refuse_twice(sources: list[Saved]) -> None:
    for index, source in enumerate(sources):
        if source.step_dir in [other.step_dir for other in sources[:index]]:
            raise ConvertError(f"{source.step_dir} is given twice, but every checkpoint counts once; remove one")


def _refuse_other_model(first: Saved, other: Saved) -> None:
    ours, theirs = dataclasses.asdict(first.cfg.model), dataclasses.asdict(other.cfg.model)
    different = [f"  model.{key}: {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
    if different:
        raise ConvertError("\n".join([f"{first.step_dir} and {other.step_dir} are not of the same model:", *different]))


def _refuse_leaves(source: Saved, leaves: dict[str, StreamedLeaf]) -> None:
    """Weights whose arrays are not those of their config, or hold NaN or infinite values."""
    for name, leaf in leaves.items():
        found = source.manifest.leaves.get(name)
        if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise ConvertError(f"{source.step_dir}: {name} is {found or 'missing'}, its config says "
                               f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")
        if found.nonfinite:
            raise ConvertError(f"{source.step_dir}: {name} has {found.nonfinite} NaN or infinite values")


def _pieces(sources: list[Saved], leaves: dict[str, StreamedLeaf]) -> Iterator[tuple[str, int | None, np.ndarray]]:
    for name, leaf in leaves.items():
        total = np.zeros(leaf.shape, np.float64)
        for source in sources:
            total += source.leaf(name)
        total /= len(sources)
        if leaf.by_row:
            for row in range(leaf.shape[0]):
                yield name, row, total[row].astype(np.float32)
        else:
            yield name, None, total.astype(np.float32)


def _provenance(source: Saved) -> dict[str, Any]:
    return {"checkpoint": source.step_dir, "run_name": source.cfg.run_name, "step": source.manifest.step,
            "saved_at": source.manifest.saved_at,
            "manifest_sha256": sha256(os.path.join(source.step_dir, manifest.NAME))}


def _config_of(cfg: Config, out: str, count: int) -> Config:
    """The first checkpoint's config, under the new folder's name and without what starts or continues a run."""
    place = Path(os.path.abspath(out))
    train = dataclasses.replace(cfg.train, init_from=InitFromConfig(), take_over_at=None)
    return dataclasses.replace(cfg, train=train, run_name=place.name, output_dir=str(place.parent),
                               description=f"Mean of the weights of {count} checkpoints")
