"""Downstream tasks scored with the current weights: every row exactly once, whatever the batch and the mesh.

Rows of all tasks stand in one pool, so that a batch holds rows of like length and few shapes are compiled: lengths are
powers of two times 128 up to the context length, and a shorter batch holds more rows.

Dims: B rows in a batch, T position, C choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval.catalogue import TaskError
from maxtext.eval.requests import find_folder
from maxtext.eval.scoring import Scorer
from maxtext.eval.tasks import load_task, task_metrics
from maxtext.model.decoder import Decoder

SHORTEST = 128


class Batch(NamedTuple):
    """Rows of one kind that are computed together: their places in the pool, the padded length, and rows to compute."""

    members: Sequence[int]
    length: int
    rows: int


class Downstream:
    """The tasks of `eval.tasks`, read and tokenised once; a call scores them and keeps no state."""

    def __init__(self, cfg: Config, prepared_tokenizer: str | None, mesh: Mesh) -> None:
        """Reads the tasks' files.

        Args:
          cfg: the run.
          prepared_tokenizer: tokenizer of the data, used unless eval.tokenizer names one.
          mesh: where the weights are.

        Raises:
          TaskError: a task that is unknown, whose files are missing or damaged, or that does not fit the run.
          DataError: a tokenizer that cannot be read.
        """
        path = cfg.eval.tokenizer or prepared_tokenizer
        if path is None:
            raise TaskError("eval.tasks: tasks are text and need a tokenizer; set eval.tokenizer to the tokenizer.json "
                            "that the token files were made with")
        tokenizer = load_tokenizer(path)
        if tokenizer.vocab_size > cfg.model.vocab_size:
            raise TaskError(f"eval.tokenizer: {path} has {tokenizer.vocab_size} ids, but model.vocab_size is "
                            f"{cfg.model.vocab_size}: it is not the tokenizer of this model")
        folder = find_folder(cfg.eval.tasks_path)
        self._cfg, self._mesh, self._scorer = cfg, mesh, Scorer(cfg, mesh)
        self.tasks = tuple(load_task(name, folder, tokenizer, cfg.data.sequence_length) for name in cfg.eval.tasks)
        self._pool = [row for task in self.tasks for row in task.rows]
        self._batches = list(self._plan())

    def _plan(self) -> Iterator[Batch]:
        """Batches of about eval.batch x sequence_length tokens, fewer when there are not as many rows."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for place, row in enumerate(self._pool):
            length = SHORTEST
            while length < len(row.query_T):
                length *= 2
            groups.setdefault((row.fast, min(length, self._cfg.data.sequence_length)), []).append(place)
        tokens = self._cfg.eval.batch * self._cfg.data.sequence_length
        for (_, length), members in sorted(groups.items()):
            rows = self._scorer.batch_rows(min(max(1, tokens // length), len(members)))
            for start in range(0, len(members), rows):
                yield Batch(members[start : start + rows], length, rows)

    def nats(self, params: Decoder) -> list[np.ndarray]:
        """For each row of the pool, the negative log-likelihood of each of its answers in nats."""
        with jax.set_mesh(self._mesh):
            waiting = [self._start(params, batch) for batch in self._batches]
        nats: list[np.ndarray] = [np.zeros(0)] * len(self._pool)
        for batch, result in zip(self._batches, waiting, strict=True):
            for place, values in zip(batch.members, np.asarray(result)[: len(batch.members)], strict=True):
                nats[place] = np.atleast_1d(values)[: len(self._pool[place].answers)]
        return nats

    def _start(self, params: Decoder, batch: Batch) -> jax.Array:
        """Begins to compute a batch: (B,) nats of its rows' answers, or (B, C) of their choices."""
        rows = [self._pool[place] for place in batch.members]
        tokens_BT = np.zeros((len(rows), batch.length), np.int32)
        for b, row in enumerate(rows):
            tokens_BT[b, : len(row.query_T)] = row.query_T
        if rows[0].fast:
            choices_BC = np.zeros((len(rows), max(len(row.targets) for row in self._pool if row.fast)), np.int32)
            for b, row in enumerate(rows):
                choices_BC[b, : len(row.targets)] = row.targets
            positions_B = np.array([row.first for row in rows], np.int32)
            return self._scorer.choice_nats(params, tokens_BT, positions_B, choices_BC, batch.rows)
        targets_BT, weights_BT = np.zeros_like(tokens_BT), np.zeros(tokens_BT.shape, np.float32)
        for b, row in enumerate(rows):
            scored = slice(row.first, row.first + len(row.targets))
            targets_BT[b, scored], weights_BT[b, scored] = row.targets, 1
        return self._scorer.row_nats(params, tokens_BT, targets_BT, weights_BT, batch.rows)

    def __call__(self, params: Decoder) -> dict[str, float]:
        """Scores every task; metrics under OLMo-core's names."""
        nats, metrics, start = self.nats(params), dict[str, float](), 0
        for task in self.tasks:
            metrics |= task_metrics(task, nats[start : start + len(task.rows)])
            start += len(task.rows)
        return metrics

