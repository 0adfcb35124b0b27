"""Held-out perplexity, in one of two styles (`eval.rows`).

whole: every token of every document but its first is scored exactly once. A document longer than the sequence length is
cut into consecutive rows; each row's first target is the token after the previous row's last target. The numbers depend
neither on the batch nor on the mesh.

truncated: what the reference reports (OLMo-core 3.0.0 `eval/lm_evaluator.py`, `data/numpy_dataset.py`). One document a
row, cut to its first T tokens, the rest unread. A document of n tokens (after the cut) counts n entries: n - 1 losses
and one 0.0, because the reference masks losses by the unshifted tokens; its loss is therefore lower than the true one.
The documents of all sets together are shuffled once and the last, incomplete batch of them is never scored, so
the numbers depend on `eval.batch` (all sequences of one batch, over all devices), but not on the mesh.

In both, each row is summed on the device and rows are summed on the host in float64.

Dims: B rows in a batch, T position.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.order import instance_order
from maxtext.data.tokens import ResolvedData, read_documents
from maxtext.eval.scoring import Scorer
from maxtext.model.decoder import Decoder


class Row(NamedTuple):
    """One row of a batch. `entries` is what it adds to the number that its loss is divided by."""

    tokens_T: np.ndarray
    targets_T: np.ndarray
    weights_T: np.ndarray
    entries: int


@dataclasses.dataclass
class Score:
    """Sums over one held-out set: nats, tokens to divide by, UTF-8 bytes of the scored tokens (None when unknown)."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0

    @property
    def cross_entropy(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def whole_rows(documents: Iterable[np.ndarray], length: int) -> Iterator[Row]:
    """Cuts documents into rows of `length` inputs and targets; a document of n tokens has n - 1 targets."""
    for document in documents:
        for start in range(0, len(document) - 1, length):
            piece = document[start : start + length + 1].astype(np.int32)
            yield _row(piece[:-1], piece[1:], length, entries=len(piece) - 1)


def truncated_rows(documents: Iterable[np.ndarray], length: int) -> Iterator[Row]:
    """One row a document, of its first `length` tokens; n of them have n - 1 targets and count n."""
    for document in documents:
        piece = document[:length].astype(np.int32)
        yield _row(piece, piece[1:], length, entries=len(piece))


def _row(tokens: np.ndarray, targets: np.ndarray, length: int, entries: int) -> Row:
    row = Row(np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.float32), entries)
    row.tokens_T[: len(tokens)] = tokens
    row.targets_T[: len(targets)], row.weights_T[: len(targets)] = targets, 1
    return row


def kept_documents(counts: dict[str, int], batch: int) -> dict[str, np.ndarray]:
    """Which documents of each set stand in a complete batch of the reference's shuffle of all of them.

    The order is that of the reference's evaluation loader: seed 0, epoch always 1.

    Args:
      counts: documents by set, in the order of the sets.
      batch: rows of one evaluation batch over all ranks.

    Returns:
      bool by set, one for each document.

    Raises:
      DataError: when there is not one complete batch, or none of a set's documents is in one.
    """
    total = sum(counts.values())
    if total < batch:
        raise DataError(f"eval.rows truncated scores complete batches only, but all held-out sets together have "
                        f"{total} documents and eval.batch is {batch}; lower eval.batch, or set eval.rows to whole")
    kept = np.zeros(total, bool)
    kept[instance_order(total, seed=0, epoch=1)[: total // batch * batch]] = True
    ends = np.cumsum(list(counts.values()))
    by_set = dict(zip(counts, np.split(kept, ends[:-1]), strict=True))
    if empty := [name for name, mask in by_set.items() if not mask.any()]:
        raise DataError(f"eval.rows truncated: no document of {', '.join(empty)} is in a complete batch of {batch}; "
                        "lower eval.batch, or set eval.rows to whole")
    return by_set


class Perplexity:
    """Scores held-out sets with the current weights. It compiles once and keeps no state between calls."""

    def __init__(self, cfg: Config, data: ResolvedData, mesh: Mesh) -> None:
        """Raises DataError when a set cannot be read, or for what `kept_documents` refuses."""
        self._cfg, self._data, self._mesh = cfg, data, mesh
        self._scorer = Scorer(cfg, mesh)
        self._kept: dict[str, np.ndarray] | None = None
        if cfg.eval.rows == "truncated":
            counts = {name: sum(1 for _ in self._documents(paths)) for name, paths in data.eval_sets.items()}
            self._kept = kept_documents(counts, cfg.eval.batch)

    def _documents(self, paths: tuple[str, ...]) -> Iterator[np.ndarray]:
        return read_documents(paths, self._data.dtype, self._data.eos_id)

    def rows(self, name: str) -> Iterator[Row]:
        """The rows of one set, in the configured style."""
        documents, length = self._documents(self._data.eval_sets[name]), self._cfg.data.sequence_length
        if self._kept is None:
            return whole_rows(documents, length)
        return truncated_rows(itertools.compress(documents, self._kept[name]), length)

    def score(self, params: Decoder, name: str) -> Score:
        """Scores the documents of one set. Raises DataError for a file that cannot be read."""
        total, device_sums = Score(bytes=None if self._data.token_bytes is None else 0), []
        rows = self.rows(name)
        count = self._scorer.batch_rows(self._cfg.eval.batch)
        while chunk := list(itertools.islice(rows, count)):
            tokens_BT, targets_BT, weights_BT = (np.stack(part) for part in list(zip(*chunk, strict=True))[:3])
            device_sums.append(self._scorer.row_nats(params, tokens_BT, targets_BT, weights_BT, count))
            total.tokens += sum(row.entries for row in chunk)
            if self._data.token_bytes is not None:
                scored = targets_BT[weights_BT > 0]
                total.bytes = (total.bytes or 0) + int(self._data.token_bytes[scored].sum(dtype=np.int64))
        total.nats = math.fsum(float(x) for sums in device_sums for x in np.asarray(sums))
        return total

    def __call__(self, params: Decoder) -> dict[str, float]:
        """Scores all sets and returns metrics under OLMo-core's names, with macro and micro averages."""
        with jax.set_mesh(self._mesh):
            scores = {name: self.score(params, name) for name in self._data.eval_sets}
        return metrics_of(scores)


def metrics_of(scores: dict[str, Score]) -> dict[str, float]:
    """Metrics of each set; macro is the mean over sets, micro the mean over all tokens (or bytes) of all sets."""
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        metrics[f"eval/lm/{name}/CE loss"] = score.cross_entropy
        metrics[f"eval/lm/{name}/PPL"] = math.exp(score.cross_entropy)
        if score.bits_per_byte is not None:
            metrics[f"eval/lm/{name}/BPB"] = score.bits_per_byte
        metrics[f"eval/lm/{name}/tokens"] = score.tokens
    if len(scores) > 1:
        every = list(scores.values())
        with_bytes = all(score.bits_per_byte is not None for score in every)
        pooled = Score(math.fsum(s.nats for s in every), sum(s.tokens for s in every),
                       sum(s.bytes or 0 for s in every) if with_bytes else None)
        metrics["eval/lm/macro/CE loss"] = math.fsum(s.cross_entropy for s in every) / len(every)
        metrics["eval/lm/micro/CE loss"] = pooled.cross_entropy
        if with_bytes:
            metrics["eval/lm/macro/BPB"] = math.fsum(s.bits_per_byte or 0 for s in every) / len(every)
            metrics["eval/lm/micro/BPB"] = pooled.bits_per_byte or 0
        for kind in ("macro", "micro"):
            metrics[f"eval/lm/{kind}/PPL"] = math.exp(metrics[f"eval/lm/{kind}/CE loss"])
    return metrics
