"""Readers of data sets in folders: TensorFlow Datasets (without TensorFlow) and Hugging Face `save_to_disk`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxtext.config.reason import reason
from maxtext.data import DataError
from maxtext.data.text_source import Bad, Document, Unit, optional, ranges, record_document

DEFAULT_SPLIT = "train"


def is_tfds(folder: Path) -> bool:
    """Whether a folder is one version of a data set of TensorFlow Datasets."""
    return (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file()


def is_hf(folder: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def dataset_units(folder: Path, name: str, key: str, split: str) -> Iterator[Unit]:
    """Ranges of rows of a data set in a folder."""
    kind = "tfds" if is_tfds(folder) else "hf"
    rows, columns = _tfds(str(folder), split) if kind == "tfds" else _hf(str(folder), split)
    if key not in columns:
        raise DataError(f"{folder}: has no column {key!r} but {', '.join(columns)}; name the text with --text-key")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    for start, stop in ranges(len(rows), size):
        yield Unit(kind, str(folder), name, size * (stop - start) // max(1, len(rows)), start, stop, start + 1, key,
                   split)


def read_tfds(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document an example; examples are counted from 1."""
    yield from _rows(_tfds(unit.path, unit.split)[0], unit, domain)


def read_hf(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document a row; rows are counted from 1."""
    yield from _rows(_hf(unit.path, unit.split)[0], unit, domain)


def _rows(rows: Any, unit: Unit, domain: str) -> Iterator[Document | Bad]:
    for place in range(unit.start, unit.stop):
        yield record_document(rows[place], unit, place + 1, domain)


def _tfds(folder: str, split: str) -> tuple[Any, Sequence[str]]:
    tfds = optional("tensorflow_datasets", folder, "tfds")
    try:
        builder = tfds.builder_from_directory(folder)
        known = list(builder.info.splits)
        if (split or DEFAULT_SPLIT) in known:
            return builder.as_data_source(split or DEFAULT_SPLIT), list(builder.info.features)
    except (OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{folder}: TensorFlow Datasets cannot open it for random access ({reason(error)}); prepare "
                        "it with file_format array_record") from error
    raise _no_split(folder, split, known)


def _hf(folder: str, split: str) -> tuple[Any, Sequence[str]]:
    datasets = optional("datasets", folder, "datasets")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            found = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: Hugging Face datasets cannot open it ({reason(error)})") from error
    if isinstance(found, datasets.DatasetDict):
        if (split or DEFAULT_SPLIT) not in found:
            raise _no_split(folder, split, list(found))
        found = found[split or DEFAULT_SPLIT]
    elif split:
        raise DataError(f"{folder}#{split}: this folder is one data set, without splits; leave out #{split}")
    return found, found.column_names


def _no_split(folder: str, split: str, known: Sequence[str]) -> DataError:
    return DataError(f"{folder}: has no split {split or DEFAULT_SPLIT!r} but {', '.join(known)}; write "
                     f"{folder}#{known[0] if known else 'SPLIT'}")
