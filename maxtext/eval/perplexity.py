"""Held-out perplexity: every token of every held-out document but its first is scored exactly once.

A document longer than the sequence length is cut into consecutive rows; each row's first target is the token after the
previous row's last target, so nothing is scored twice or left out. The numbers do not depend on the batch or the mesh:
each row is summed on the device, rows are summed on the host in float64.

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
from maxtext.data.tokens import ResolvedData, read_documents
from maxtext.model.decoder import Decoder
from maxtext.model.loss import nll
from maxtext.parallel.mesh import batch_devices
from maxtext.parallel.sharding import sharding, spec


class Row(NamedTuple):
    tokens_T: np.ndarray
    targets_T: np.ndarray
    weights_T: np.ndarray


@dataclasses.dataclass
class Score:
    """Sums over one held-out set: nats, scored tokens, and UTF-8 bytes of the scored tokens (None when unknown)."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0

    @property
    def cross_entropy(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def rows_of(documents: Iterable[np.ndarray], length: int) -> Iterator[Row]:
    """Cuts documents into rows of `length` inputs and targets; a document of n tokens has n - 1 targets."""
    for document in documents:
        for start in range(0, len(document) - 1, length):
            piece = document[start : start + length + 1].astype(np.int32)
            row = Row(np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.float32))
            count = len(piece) - 1
            row.tokens_T[:count], row.targets_T[:count], row.weights_T[:count] = piece[:-1], piece[1:], 1
            yield row


class Evaluator:
    """Scores held-out sets with the current weights. It compiles once and keeps no state between calls."""

    def __init__(self, cfg: Config, data: ResolvedData, mesh: Mesh) -> None:
        self._cfg, self._data, self._mesh = cfg, data, mesh
        devices = batch_devices(mesh)
        self._rows = -(-cfg.eval.batch // devices) * devices  # every device gets as many rows

        def row_nll(p: Decoder, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
            losses_B = (nll(p, tokens_BT, targets_BT, cfg) * weights_BT).sum(-1)
            return jax.sharding.reshard(losses_B, spec(None))

        self._row_nll = jax.jit(row_nll)

    def score(self, params: Decoder, paths: tuple[str, ...]) -> Score:
        """Scores the documents of these token files.

        Raises:
          DataError: for a file that cannot be read.
        """
        placement = sharding(self._mesh, "batch", None)

        def place(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, placement, lambda index: array[index])

        total, device_sums = Score(bytes=None if self._data.token_bytes is None else 0), []
        rows = rows_of(read_documents(paths, self._data.dtype, self._data.eos_id), self._cfg.data.sequence_length)
        while chunk := list(itertools.islice(rows, self._rows)):
            blank = Row(*(np.zeros_like(part) for part in chunk[0]))
            batch = Row(*map(np.stack, zip(*chunk, *[blank] * (self._rows - len(chunk)), strict=True)))
            device_sums.append(self._row_nll(params, *map(place, batch)))
            total.tokens += int(batch.weights_T.sum())
            if self._data.token_bytes is not None:
                scored = batch.targets_T[batch.weights_T > 0]
                total.bytes = (total.bytes or 0) + int(self._data.token_bytes[scored].sum(dtype=np.int64))
        total.nats = math.fsum(float(x) for sums in device_sums for x in np.asarray(sums))
        return total

    def __call__(self, params: Decoder) -> dict[str, float]:
        """Scores all sets and returns metrics under OLMo-core's names, with macro and micro averages."""
        with jax.set_mesh(self._mesh):
            scores = {name: self.score(params, paths) for name, paths in self._data.eval_sets.items()}
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
