"""From the data section of a config to checked token files: what one epoch consists of, in data-set order.

Token files are OLMo's: headerless little-endian arrays of the smallest unsigned type that holds the vocabulary, with
the end-of-document id after every document. Each file is cut by itself into instances of T tokens; its tail is dropped
(OLMo-core `data/numpy_dataset.py`, NumpyFSLDataset).
"""

from __future__ import annotations

import dataclasses
import fractions
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxtext.config.schema import Config, SourceConfig
from maxtext.data import DataError
from maxtext.data.manifest import DTYPES, Prepared, load_prepared, smallest_dtype
from maxtext.data.preflight import FileReport, check_files, raise_problems, read_tokens

DOCUMENT_BLOCK_TOKENS = 1 << 20


class Part(NamedTuple):
    """One occurrence of a file in an epoch: its first n_instances instances, of n_tokens tokens in the file."""

    source: str
    path: str
    n_tokens: int
    n_instances: int


@dataclasses.dataclass(frozen=True)
class ResolvedData:
    """Checked data of one run.

    Attributes:
      vocab_size, eos_id, pad_id: of the tokenizer.
      dtype: type of the token files.
      parts: the epoch, in data-set order; global instance i is counted over them.
      eval_sets: held-out token files by set.
      token_bytes: UTF-8 bytes of each id, 0 for special ids; None when no prepared folder gives them.
      sequence_length: T.
      fingerprint: hex identity of the epoch: names, sizes and sampled content of the files, T and type.
      tokenizer: path of the prepared folder's tokenizer, or None.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    dtype: np.dtype
    parts: tuple[Part, ...]
    eval_sets: dict[str, tuple[str, ...]]
    token_bytes: np.ndarray | None
    sequence_length: int
    fingerprint: str
    tokenizer: str | None = None

    @property
    def n_instances(self) -> int:
        """Instances in one epoch."""
        return sum(part.n_instances for part in self.parts)


def resolve(cfg: Config) -> ResolvedData:
    """Finds and checks the token files of a run; reads samples of them only.

    Raises:
      DataError: every file that cannot be used, with the place in it; ids or types that contradict each other; fewer
        instances than one batch, with the arithmetic.
    """
    prepared = None if cfg.data.prepared is None else load_prepared(cfg.data.prepared)
    vocab_size, eos_id, pad_id = _identity(cfg, prepared)
    dtype = _dtype(cfg, prepared, vocab_size)
    files, eval_sets, expected = _find_files(cfg, prepared)
    reports = check_files([*(path for paths in files.values() for path in paths),
                           *(path for paths in eval_sets.values() for path in paths)], dtype, vocab_size, expected)
    parts = tuple(part for name, paths in files.items()
                  for part in _repeat(name, paths, reports, cfg.data.sequence_length, _repeats(cfg, name)))
    n_instances = sum(part.n_instances for part in parts)
    if n_instances < cfg.train.global_batch:
        T = cfg.data.sequence_length
        rows = ", ".join(f"{part.path} {part.n_tokens} // {T} = {part.n_tokens // T}" for part in parts[:8])
        more = f", and {len(parts) - 8} more files" if len(parts) > 8 else ""
        raise DataError(f"data.sources: one epoch has {n_instances} instances of data.sequence_length {T} tokens, but "
                        f"train.global_batch is {cfg.train.global_batch}: {rows}{more}. Add data, or lower one of them")
    if n_instances >= 2**32:
        raise DataError(f"data.sources: {n_instances:,} instances in one epoch; the order holds fewer than 2^32. Raise "
                        "data.sequence_length or lower repeat")
    return ResolvedData(
        vocab_size, eos_id, pad_id, dtype, parts, eval_sets, None if prepared is None else prepared.token_bytes,
        cfg.data.sequence_length, _fingerprint(parts, reports, cfg.data.sequence_length, dtype),
        None if prepared is None else str(prepared.tokenizer))


def read_documents(paths: Sequence[str], dtype: np.dtype, eos_id: int) -> Iterator[np.ndarray]:
    """The documents of token files, each with its end-of-document id; ids keep the type of the file.

    Tokens after the last end of document of a file are left out (OLMo-core `data/utils.py`).

    Raises:
      DataError: a file without any end of document, or one that cannot be read.
    """
    for path in paths:
        n_tokens = check_files([path], dtype, np.iinfo(dtype).max + 1)[path].n_tokens
        pending: list[np.ndarray] = []
        found = False
        for start in range(0, n_tokens, DOCUMENT_BLOCK_TOKENS):
            tokens = read_tokens(path, dtype, start, min(DOCUMENT_BLOCK_TOKENS, n_tokens - start))
            begin = 0
            for end in np.flatnonzero(tokens == eos_id) + 1:
                pending.append(tokens[begin:end])
                yield np.concatenate(pending) if len(pending) > 1 else pending[0]
                pending, begin, found = [], int(end), True
            pending.append(tokens[begin:])
        if not found:
            raise DataError(f"{path}: no end of document (id {eos_id}) in its {n_tokens} tokens: is eos_id right?")


def _identity(cfg: Config, prepared: Prepared | None) -> tuple[int, int, int]:
    """vocab_size, eos_id and pad_id from the config, the prepared folder, or both when they agree."""
    values: dict[str, int] = {}
    problems = []
    for key in ("vocab_size", "eos_id", "pad_id"):
        given = getattr(cfg.data, key)
        known = None if prepared is None else getattr(prepared, key)
        value = known if given is None else given
        if value is None:
            problems.append(f"data.{key}: is not set; give it, or a folder of `maxtext data prepare` as data.prepared")
        elif known is not None and value != known:
            problems.append(f"data.{key}: {given} contradicts {cfg.data.prepared}, which was prepared with {known}")
        else:
            values[key] = value
    raise_problems(problems)
    for key in ("eos_id", "pad_id"):
        if values[key] >= values["vocab_size"]:
            problems.append(f"data.{key}: {values[key]} is not below data.vocab_size {values['vocab_size']}")
    if values["vocab_size"] > cfg.model.vocab_size:
        problems.append(f"model.vocab_size: {cfg.model.vocab_size} is below the {values['vocab_size']} ids of the data")
    raise_problems(problems)
    return values["vocab_size"], values["eos_id"], values["pad_id"]


def _dtype(cfg: Config, prepared: Prepared | None, vocab_size: int) -> np.dtype:
    if cfg.data.dtype == "auto":
        return smallest_dtype(vocab_size) if prepared is None else prepared.dtype
    dtype = DTYPES[cfg.data.dtype]
    if prepared is not None and dtype != prepared.dtype:
        raise DataError(f"data.dtype: {dtype.name} contradicts {cfg.data.prepared}, which holds {prepared.dtype.name}")
    if vocab_size - 1 > np.iinfo(dtype).max:
        raise DataError(f"data.dtype: {dtype.name} ends at {np.iinfo(dtype).max}, but data.vocab_size is {vocab_size}")
    return dtype


def _find_files(cfg: Config, prepared: Prepared | None) -> tuple[
        dict[str, list[str]], dict[str, tuple[str, ...]], dict[str, int]]:
    """Training files by source, held-out files by set, and the token counts that the manifest gives."""
    problems: list[str] = []
    files: dict[str, list[str]] = {}
    expected: dict[str, int] = {}
    if prepared is not None:
        everything = [*prepared.train.values(), *prepared.heldout.values()]
        expected = {file.path: file.tokens for group in everything for file in group}
    if not cfg.data.sources and prepared is None:
        problems.append("data.sources: is empty; name a source with paths, or give data.prepared")
    for name in cfg.data.sources or (prepared.train if prepared else {}):
        try:
            files[name] = _source_files(name, cfg.data.sources.get(name, SourceConfig()), prepared)
        except DataError as error:
            problems.append(str(error))
    eval_sets: dict[str, tuple[str, ...]] = {}
    for name, eval_set in cfg.eval.sets.items():
        try:
            eval_sets[name] = tuple(_expand(eval_set.paths, "", f"eval.sets.{name}.paths"))
        except DataError as error:
            problems.append(str(error))
    raise_problems(problems)
    if not eval_sets and prepared is not None:
        eval_sets = {name: tuple(file.path for file in group) for name, group in prepared.heldout.items()}
    return files, eval_sets, expected


def _source_files(name: str, source: SourceConfig, prepared: Prepared | None) -> list[str]:
    """The files of one source in data-set order: its paths, its mix file, or those of the prepared folder."""
    where = f"data.sources.{name}"
    if source.paths and source.mix is not None:
        raise DataError(f"{where}: give paths or mix, not both")
    if source.paths:
        return _expand(source.paths, source.root, f"{where}.paths")
    if source.mix is not None:
        return _read_mix(source)
    if prepared is None:
        raise DataError(f"{where}: gives neither paths nor mix, and there is no data.prepared")
    files = [file.path for file in prepared.source(name)]
    if not files:
        raise DataError(f"{where}: {prepared.folder} has no training file of it")
    return files


def _expand(paths: Sequence[str], root: str, key: str) -> list[str]:
    """Paths from `root` on, with globs replaced by their matches sorted by name."""
    if not paths:
        raise DataError(f"{key}: is empty")
    files: list[str] = []
    for path in paths:
        full = _join(root, path)
        if "://" not in full and glob.has_magic(full) and not os.path.exists(full):
            matches = sorted(glob.glob(full, recursive=True))
            if not matches:
                raise DataError(f"{key}: no file matches {full}")
            files += matches
        else:
            files.append(full)
    return files


def _read_mix(source: SourceConfig) -> list[str]:
    """The paths of a mix file of `label,path` lines, in the order of the file (OLMo-core `data/mixes`)."""
    assert source.mix is not None
    try:
        lines = Path(source.mix).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source.mix}: cannot read the mix file ({error})") from error
    files = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            label, comma, path = (part.strip() for part in line.partition(","))
            if not (label and comma and path):
                raise DataError(f"{source.mix}:{number}: expected label,path but found {line!r}")
            files.append(_join(source.root, path.replace("{TOKENIZER}", source.tokenizer_placeholder)))
    if not files:
        raise DataError(f"{source.mix}: names no file")
    return files


def _join(root: str, path: str) -> str:
    if not root or "://" in path or os.path.isabs(path):
        return path
    return f"{root.rstrip('/')}/{path}" if "://" in root else os.path.join(root, path)


def _repeats(cfg: Config, name: str) -> float:
    return cfg.data.sources[name].repeat if name in cfg.data.sources else 1.0


def _repeat(source: str, paths: Sequence[str], reports: dict[str, FileReport], sequence_length: int,
            repeat: float) -> Iterator[Part]:
    """Whole passes over the files, then a pass over the first instances of each file for the fraction that is left.

    The decimal that the user wrote counts, not its binary rounding: repeat 1.1 of 70 instances is 77.
    """
    exact = fractions.Fraction(str(repeat))
    for share in [fractions.Fraction(1)] * (exact.numerator // exact.denominator) + [exact % 1]:
        for path in paths:
            n_tokens = reports[path].n_tokens
            n_instances = int(n_tokens // sequence_length * share)
            if n_instances or share == 1:
                yield Part(source, path, n_tokens, n_instances)


def _fingerprint(parts: Sequence[Part], reports: dict[str, FileReport], sequence_length: int, dtype: np.dtype) -> str:
    """Identity of the epoch: folders are left out, so that data may move; content is sampled, not read."""
    digests = {path: hashlib.sha256(report.sample).hexdigest() for path, report in reports.items()}
    identity = [[sequence_length, dtype.name],
                *([os.path.basename(part.path), part.n_tokens, part.n_instances, digests[part.path]] for part in parts)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
