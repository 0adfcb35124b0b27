"""From the data section of a config to checked token files: what one epoch consists of, in data-set order.

Token files are OLMo's: headerless little-endian arrays of the smallest unsigned type that holds the vocabulary, with
the end-of-document id after every document. Each file is cut by itself into instances of T tokens; its tail is dropped
(OLMo-core `data/numpy_dataset.py`, NumpyFSLDataset).
"""

from __future__ import annotations

import dataclasses
import fractions
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from maxtext.config.schema import Config, DataConfig
from maxtext.data import DataError
from maxtext.data.manifest import DTYPES, Prepared, load_prepared, smallest_dtype
from maxtext.data.mixture import MixtureSource, allot
from maxtext.data.packing import PackedIndex, PackingPlan, pack
from maxtext.data.preflight import FileReport, check_files, raise_problems, read_tokens
from maxtext.data.sources import SourceFile, find_files
from maxtext.data.stream_files import identity as stream_identity

DOCUMENT_BLOCK_TOKENS = 1 << 20


class Part(NamedTuple):
    """One occurrence of a file in an epoch: its first n_instances instances, of n_tokens tokens in the file.

    n_instances is 0 when documents are packed, as instances are then of several files. label is that of the mix list.
    allotted is what a mixture by ratios gives the file, before it is cut to whole blocks (`ResolvedData.chunk`).
    """

    source: str
    path: str
    n_tokens: int
    n_instances: int
    label: str = ""
    allotted: int = 0


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
      chunk: consecutive instances that the order keeps together (data.max_target_sequence_length).
      packing: how documents are packed into instances, or None when files are cut.
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
    chunk: int = 1
    packing: PackedIndex | None = None

    @property
    def n_instances(self) -> int:
        """Instances in one epoch."""
        return sum(part.n_instances for part in self.parts) if self.packing is None else self.packing.n_instances


def resolve(cfg: Config, training: bool = True) -> ResolvedData:
    """Finds and checks the token files of a run; reads samples of them only.

    Args:
      cfg: the run.
      training: False leaves its training files alone (they need not be there), for evaluation: `parts` is empty.

    Raises:
      DataError: every file that cannot be used, with the place in it; ids or types that contradict each other; fewer
        instances than one batch, with the arithmetic.
    """
    prepared = None if cfg.data.prepared is None else load_prepared(cfg.data.prepared)
    streamed, training = training and cfg.data.stream.kind != "none", training and cfg.data.stream.kind == "none"
    vocab_size, eos_id, pad_id = _identity(cfg, prepared)
    dtype = _dtype(cfg, prepared, vocab_size)
    files, eval_sets = find_files(cfg, prepared, training)
    reports = check_files([*(file.path for group in files.values() for file in group),
                           *(path for paths in eval_sets.values() for path in paths)], dtype, vocab_size,
                          {} if prepared is None else prepared.tokens_of())
    chunk = (cfg.data.max_target_sequence_length or cfg.data.sequence_length) // cfg.data.sequence_length
    parts = tuple(_parts(cfg, files, reports, chunk))
    packing = None
    fingerprint = stream_identity(cfg, prepared, eos_id) if streamed else _fingerprint(parts, reports, cfg, dtype)
    if cfg.data.packs_documents and training:
        packing = pack(_packing_plan(cfg.data, parts, dtype, eos_id), fingerprint, cache_dir(cfg))
        # What was packed with what counts too: it may depend on the machine (data.packing_ties).
        fingerprint = hashlib.sha256(f"{fingerprint} {packing.summary['sha256']}".encode()).hexdigest()
    data = ResolvedData(
        vocab_size, eos_id, pad_id, dtype, parts, eval_sets, None if prepared is None else prepared.token_bytes,
        cfg.data.sequence_length, fingerprint, None if prepared is None else str(prepared.tokenizer), chunk, packing)
    if training:
        _check_instances(cfg, data)
    return data


def cache_dir(cfg: Config) -> str:
    """Where the order of instances and the packing of documents are kept: they serve every run of the same data."""
    return f"{cfg.output_dir}/data_order"


def _check_instances(cfg: Config, data: ResolvedData) -> None:
    """Refuses an epoch that is shorter than a batch, with the arithmetic, or too long for the order."""
    count, longest = data.n_instances, cfg.data.max_target_sequence_length or cfg.data.sequence_length
    if count < cfg.train.global_batch:
        rows = ", ".join(f"{part.path} {part.n_tokens:,} // {longest} = {part.n_tokens // longest}"
                         for part in data.parts[:8])
        more = f", and {len(data.parts) - 8} more files" if len(data.parts) > 8 else ""
        key = "data.sequence_length" if data.chunk == 1 else "data.max_target_sequence_length"
        how = "of packed documents" if data.packing is not None else f"of {key} {longest} tokens"
        arithmetic = "" if data.packing is not None else f": {rows}{more}"
        times = f" x {data.chunk}" if data.chunk > 1 else ""
        raise DataError(f"data.sources: one epoch has {count} instances{times and f' ({count // data.chunk}{times})'} "
                        f"{how}, but train.global_batch is {cfg.train.global_batch}{arithmetic}. Add data, or lower "
                        "one of them")
    if count >= 2**32:
        raise DataError(f"data.sources: {count:,} instances in one epoch; the order holds fewer than 2^32. Raise "
                        "data.sequence_length or lower repeat")


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


def _parts(cfg: Config, files: dict[str, list[SourceFile]], reports: dict[str, FileReport],
           chunk: int) -> Iterator[Part]:
    """The epoch in data-set order, from ratios or repeats."""
    T, sources = cfg.data.sequence_length, cfg.data.sources
    if cfg.data.mixture_tokens is not None:
        mixture = {name: MixtureSource(source.ratio or 0.0, [reports[file.path].n_tokens for file in files[name]],
                                       source.max_repetition, source.max_source_fraction)
                   for name, source in sources.items()}
        for take in allot(mixture, cfg.data.mixture_tokens, T, cfg.train.global_batch):
            file = files[take.source][take.file]
            yield Part(take.source, file.path, reports[file.path].n_tokens, take.instances // chunk * chunk, file.label,
                       take.instances)
        return
    for name, group in files.items():
        repeat = sources[name].repeat if name in sources else 1.0
        if cfg.data.packs_documents:
            for file in group * int(repeat):
                yield Part(name, file.path, reports[file.path].n_tokens, 0, file.label)
        else:
            yield from _repeat(name, group, reports, T * chunk, repeat, chunk)


def _repeat(source: str, files: Sequence[SourceFile], reports: dict[str, FileReport], longest: int, repeat: float,
            chunk: int) -> Iterator[Part]:
    """Whole passes over the files, then a pass over the first instances of each file for the fraction that is left.

    The decimal that the user wrote counts, not its binary rounding: repeat 1.1 of 70 instances is 77.
    """
    exact = fractions.Fraction(str(repeat))
    for share in [fractions.Fraction(1)] * (exact.numerator // exact.denominator) + [exact % 1]:
        for file in files:
            n_tokens = reports[file.path].n_tokens
            n_instances = int(n_tokens // longest * share) * chunk
            if n_instances or share == 1:
                yield Part(source, file.path, n_tokens, n_instances, file.label)


def _packing_plan(data: DataConfig, parts: Sequence[Part], dtype: np.dtype, eos_id: int) -> PackingPlan:
    return PackingPlan(tuple(part.path for part in parts), tuple(part.n_tokens for part in parts), dtype, eos_id,
                       data.sequence_length, data.packing_group, data.packing_seed, data.packing_ties == "stable",
                       data.document_boundaries == "csv", data.packing)


def _fingerprint(parts: Sequence[Part], reports: dict[str, FileReport], cfg: Config, dtype: np.dtype) -> str:
    """Identity of the epoch: folders are left out, so that data may move; content is sampled, not read."""
    longest = cfg.data.max_target_sequence_length
    cut = [cfg.data.sequence_length, dtype.name, *([] if longest is None else [longest])]
    identity = [cut, *([os.path.basename(part.path), part.n_tokens, part.n_instances, reports[part.path].sample]
                       for part in parts)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
