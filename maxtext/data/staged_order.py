"""Which instances form the global batch of a step when sources have weights that change over the run.

Every batch is made up by the weights of its stage: row n of a stage (from 0) is of the source whose turn it is by
Webster's method of apportionment, which gives seat j of a source of weight w the time (j + 1/2) / w. So after any
number of rows each source has its share to within a row or so, and a later step needs no walk through earlier ones.
Each source is read in the order of a shuffle of its own, pass after pass.

The batch of step k is a function of (files, stages up to k, seed, k) alone: later stages may be changed.
"""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.order import GlobalOrder
from maxtext.data.text_source import name_hash
from maxtext.data.tokens import ResolvedData, cache_dir


@dataclasses.dataclass(frozen=True)
class Stages:
    """The weights of a run: stage i holds from update steps[i], and gives weights[name][i] of the rows to a source."""

    steps: tuple[int, ...]
    weights: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, cfg: Config) -> Stages:
        """Those of a config whose sources have weights."""
        return cls(cfg.data.mixture_steps, {name: source.weights for name, source in cfg.data.sources.items()})

    def up_to(self, step: int) -> list[list[object]]:
        """What the updates 1 to `step` saw, for JSON: first update of each stage that began, and its weights."""
        return [[first, {name: weights[place] for name, weights in self.weights.items()}]
                for place, first in enumerate(self.steps) if first <= step]


def seats(weights: np.ndarray, n_rows: int) -> np.ndarray:
    """How many of the first `n_rows` rows each source has, int64, by Webster's method; the earlier source of equals.

    Args:
      weights: float64, of sum 1; a source of weight 0 has none.
    """
    counts = np.zeros(len(weights), np.int64)
    live = np.flatnonzero(weights > 0)
    w = weights[live]
    # All seats up to this time are among the first n_rows: there are at most time * 1 + len / 2 of them.
    time = n_rows - len(live) / 2 - 1
    if time > 0:
        n = np.floor(time * w + 0.5).astype(np.int64)
        n -= (n > 0) & ((n - 0.5) / w > time)  # rounding of the product, by the same quotient as below
        counts[live] = n
    return counts + np.bincount(_turns(weights, counts, n_rows - int(counts.sum())), minlength=len(weights))


def _turns(weights: np.ndarray, taken: np.ndarray, n_rows: int) -> np.ndarray:
    """The sources of the next `n_rows` rows, in order, when each has had `taken` rows."""
    sources, times = [], []
    for source, weight in enumerate(weights):
        if weight > 0:
            # No source gets more than its share of the rows and a few.
            count = min(n_rows, int(n_rows * weight) + len(weights) + 3)
            times.append((taken[source] + np.arange(count) + 0.5) / weight)
            sources.append(np.full(count, source))
    order = np.lexsort((np.concatenate(sources), np.concatenate(times)))[:n_rows]
    return np.concatenate(sources)[order]


class StagedOrder:
    """The instances of every step, as `GlobalOrder`.

    Args:
      instances: of each source, in data-set order.
      stages: weights of the same sources.
      batch: B. seed, fingerprint, cache_dir: as of GlobalOrder.
    """

    def __init__(self, instances: Mapping[str, int], stages: Stages, batch: int, seed: int, fingerprint: str,
                 cache_dir: str | Path):
        self.batch, self.n_instances, self.stages = batch, sum(instances.values()), stages
        self._weights = np.array([stages.weights[name] for name in instances], np.float64)  # (sources, stages)
        self._weights /= self._weights.sum(axis=0)
        self._first = np.cumsum([0, *instances.values()])[:-1]
        self._sizes = np.array(list(instances.values()))
        # A seed for each name, so that a source keeps its order when others come or go.
        self._orders = [GlobalOrder(count, 1, name_hash(f"{seed}/{name}"), fingerprint, cache_dir)
                        if count else None for name, count in instances.items()]

    @property
    def batches_per_epoch(self) -> int:
        """Batches that all sources together would make, each seen once."""
        return self.n_instances // self.batch

    def epoch(self, step: int) -> int:
        """The pass, from 1, of the source that is ahead of the others in update `step`."""
        return int(np.max(np.maximum(self.rows(step) - 1, 0) // np.maximum(self._sizes, 1))) + 1

    def rows(self, step: int) -> np.ndarray:
        """Rows of each source in the updates 1 to `step`, int64."""
        counts = np.zeros(len(self._sizes), np.int64)
        for place, first in enumerate(self.stages.steps):
            last = min([step, *(after - 1 for after in self.stages.steps[place + 1:place + 2])])
            if last >= first:
                counts += seats(self._weights[:, place], (last - first + 1) * self.batch)
        return counts

    def instance_ids(self, step: int) -> np.ndarray:
        """Instances of update `step` (from 1), uint32, shape (B,), in the order of the batch's rows."""
        if step < 1:
            raise DataError(f"step {step}: updates are counted from 1")
        place = int(np.searchsorted(self.stages.steps, step, side="right")) - 1
        before = seats(self._weights[:, place], (step - self.stages.steps[place]) * self.batch)
        turns = _turns(self._weights[:, place], before, self.batch)
        seen, ids = self.rows(step - 1), np.zeros(self.batch, np.uint32)
        for source, order in enumerate(self._orders):
            mine = turns == source
            if order is not None and mine.any():
                ids[mine] = self._first[source] + order.in_sequence(int(seen[source]), int(mine.sum()))
        return ids

    def prepare(self, step: int) -> None:
        """As `GlobalOrder.prepare`."""
        self.instance_ids(step)


def make_order(cfg: Config, data: ResolvedData) -> GlobalOrder | StagedOrder:
    """The order of the instances of a run.

    Raises:
      DataError: the text is streamed; or sources that are too short for their weights under max_repetition, with the
        arithmetic.
    """
    if cfg.data.stream.kind != "none":
        raise DataError(f"data.stream.kind {cfg.data.stream.kind}: a stream is read once, in order, so the batch of "
                        "a step cannot be worked out anew; use token files of `maxtext data prepare` for that")
    if not cfg.data.weighted:
        return GlobalOrder(data.n_instances, cfg.train.global_batch, cfg.data.seed, data.fingerprint, cache_dir(cfg),
                           data.chunk)
    instances = dict.fromkeys(cfg.data.sources, 0)
    for part in data.parts:
        instances[part.source] += part.n_instances
    order = StagedOrder(instances, Stages.of(cfg), cfg.train.global_batch, cfg.data.seed, data.fingerprint,
                        cache_dir(cfg))
    _check_repetition(cfg, order, instances)
    return order


def _check_repetition(cfg: Config, order: StagedOrder, instances: Mapping[str, int]) -> None:
    problems = []
    for (name, count), needed in zip(instances.items(), order.rows(cfg.train.steps).tolist(), strict=True):
        limit = cfg.data.sources[name].max_repetition
        most = int(count * fractions.Fraction(str(limit)))  # of the decimal that the user wrote
        if needed > most:
            problems.append(f"data.sources.{name}: its weights take {needed:,} instances in train.steps "
                            f"{cfg.train.steps:,}, but it has {count:,} x max_repetition {limit:g} = "
                            f"{most:,}; raise max_repetition, or lower the weights or train.steps")
    if problems:
        raise DataError("\n".join(problems))


def changed_stages(saved: Sequence[object] | None, stages: Stages | None, step: int) -> list[str]:
    """What differs in the weights of the updates up to `step`: nothing, or one sentence."""
    now = None if stages is None else stages.up_to(step)
    return [] if saved == now else [f"the weights of data.sources up to there are {now} but were {saved}"]
