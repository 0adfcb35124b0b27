"""The iterator of global batches: Grain reads ahead, and the position is a step number and nothing else.

Shapes: B instances of the global batch, T tokens of one instance, R rows of B that this process needs.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.reason import placed
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.batch import Batch
from maxtext.data.global_batches import GlobalBatches
from maxtext.data.journal import Journal, Jump, data_step
from maxtext.data.reader import RowRules, Rows, StepSource, begin_worker, make_reader
from maxtext.data.reference import loader_state
from maxtext.data.source_tokens import SourceTokens
from maxtext.data.staged_order import StagedOrder, changed_stages, make_order
from maxtext.data.tokens import ResolvedData
from maxtext.parallel.exchange import all_values

READ_THREADS = 4
log = logging.getLogger("maxtext.data")


class Batches(GlobalBatches):
    """Global batches of token files; epochs roll over.

    Batch k is a pure function of the data, data.seed, k and the decisions of the journal.
    """

    def __init__(self, cfg: Config, resolved: ResolvedData, sharding: jax.sharding.NamedSharding | None,
                 journal: Journal | None = None):
        super().__init__(cfg, resolved, sharding, journal)
        self._order = make_order(cfg, resolved)
        self._reader = make_reader(resolved)
        self._rules = RowRules.of(cfg.data, resolved.eos_id)
        self._counter = SourceTokens(resolved)
        self._counts = self._counter.sum_of(())
        self._iterator: Any = None

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        if self._iterator is None:
            self._iterator = self._open(self._step)
        rows: Rows = next(self._iterator)
        self.last_wait_seconds = time.perf_counter() - begin
        # Here and not in a worker, so that nothing unchecked can reach a device and the error has one form.
        ids = self.instance_ids(self._step + 1)
        rows, masked = self._without_bad(rows, ids[self._rows])
        self._counts = self._counts + self._counter.of(ids)
        self._step += 1
        return self._placed(rows, masked)

    def _without_bad(self, rows: Rows, ids: np.ndarray) -> tuple[Rows, np.ndarray | None]:
        """The rows with padding in place of bad instances, and which those are; None when all are good.

        What makes an instance bad is in its bytes alone, so that every mesh leaves out the same.
        """
        bad = np.isin(ids, list(self.journal.masked)) if self.journal.masked else np.zeros(len(ids), bool)
        for row in np.flatnonzero(rows.get("unread", bad & False) & ~bad):
            self._mask(int(ids[row]), self._fault(ids[row:row + 1]) or "could not be read at first")
            bad[row] = True
        try:
            self._reader.check(rows["tokens"], ids)  # of all rows, as to take the good ones would copy them
        except DataError:
            for row in np.flatnonzero(~bad):
                try:
                    self._reader.check(rows["tokens"][row:row + 1], ids[row:row + 1])
                except DataError as error:
                    self._mask(int(ids[row]), str(error))
                    bad[row] = True
        if not bad.any():
            return rows, None
        blank = self._rules.blank(self._reader.blank())
        return {name: np.where(bad.reshape(-1, *(1,) * (old.ndim - 1)), blank[name].astype(old.dtype), old)
                for name, old in rows.items() if name != "unread"}, bad

    def _fault(self, ids: np.ndarray) -> str | None:
        """Why an instance cannot be read; None when it can be now."""
        try:
            self._reader.read(ids)
        except (DataError, OSError) as error:
            return placed(error)
        return None

    def _mask(self, instance: int, why: str) -> None:
        """Leaves an instance out from now on. DataError, with file and place, when there have been too many."""
        share, total = self._cfg.data.bad_instances, self._cfg.train.steps * self._shape[0]
        most = int(share * total)
        if len(self.journal.masked) >= most:
            raise DataError(why if not most else (
                f"{why}. It would be the {most + 1}th bad instance, but only {most} may be left out "
                f"(data.bad_instances {share:g} of {total:,}); mend the file, or raise data.bad_instances"))
        self.journal.mask(instance, why)
        log.warning("instance %d is left out of the loss from update %d on: %s", instance, self._step + 1, why)

    @property
    def source_tokens(self) -> dict[str, int]:
        """As `GlobalBatches.source_tokens`."""
        return dict(zip(self._counter.names, self._counts.tolist(), strict=True))

    def get_state(self) -> dict[str, Any]:
        """As `GlobalBatches.get_state`."""
        stages = ({"stages": self._order.stages.up_to(self.data_step(self._step))}
                  if isinstance(self._order, StagedOrder) else {})
        return {**self._header(), **stages, "source_tokens": self.source_tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        """As `GlobalBatches.set_state`."""
        stages = self._order.stages if isinstance(self._order, StagedOrder) else None
        wrong = self._check(state)
        seen = data_step(int(state.get("step", 0)), [Jump(**jump) for jump in state.get("jumps", [])])
        wrong += changed_stages(state.get("stages"), stages, seen)
        self._take(state, wrong)
        self._close_iterator()
        told = state.get("source_tokens")
        self._counts = (self._counter.sum_of(map(self.instance_ids, range(1, self._step + 1))) if told is None else
                        np.array([told[name] for name in self._counter.names], np.int64))

    def instance_ids(self, step: int) -> np.ndarray:
        """Global instance ids of update `step` (from 1), uint32, shape (B,); needs no reading."""
        return self._order.instance_ids(self.data_step(step))

    def epoch(self, step: int) -> int:
        """Epoch, from 1, of update `step`, from 1."""
        return self._order.epoch(self.data_step(step))

    def describe(self) -> dict[str, Any]:
        """As `GlobalBatches.describe`."""
        data, T = self._resolved, self._shape[1]
        kept = [part.n_instances * T for part in data.parts] if data.packing is None else data.packing.summary["tokens"]
        sources: dict[str, dict[str, Any]] = {}
        for part, tokens in zip(data.parts, kept, strict=True):
            row = sources.setdefault(part.source, {"files": set(), "instances": 0, "tokens": 0})
            row["files"].add(part.path)
            row["instances"] += part.n_instances
            row["tokens"] += tokens
        short = sorted({part.path for part in data.parts if part.n_tokens < T}) if data.packing is None else []
        total, taken = data.n_instances, None
        if isinstance(self._order, StagedOrder):
            rows = self._order.rows(self._cfg.train.steps).tolist()
            taken = dict(zip(self._cfg.data.sources, rows, strict=True))
        return {
            "sources": {name: row | {"files": len(row["files"]), "share": row["tokens"] / sum(kept) if taken is None
                                     else taken[name] / sum(taken.values())} for name, row in sources.items()},
            "passes": None if taken is None else {name: taken[name] / max(1, row["instances"])
                                                  for name, row in sources.items()},
            "tokens_per_epoch": sum(kept), "reading": reading(data), "instances_per_epoch": total,
            "batches_per_epoch": self._order.batches_per_epoch,
            "instances_dropped_per_epoch": total - self._order.batches_per_epoch * self._shape[0],
            "epochs": self._cfg.train.steps / self._order.batches_per_epoch,
            "files_shorter_than_one_instance": short, "fingerprint": data.fingerprint,
            "packing": None if data.packing is None else {
                key: sum(data.packing.summary[key]) for key in ("documents", "truncated", "dropped")
            } | {"padding": 1 - sum(kept) / (total * T)},
            "reference_state": self.reference_state(),
        }

    def reference_state(self) -> dict[str, Any]:
        """This position as OLMo-core's data loader would save it, to compare or to go on there."""
        epoch = self.epoch(max(1, self._step))
        return loader_state(self._cfg.data, self._resolved, self._shape[0],
                            self.data_step(self._step) - (epoch - 1) * self._order.batches_per_epoch, epoch)

    def close(self) -> None:
        """As `GlobalBatches.close`."""
        self._close_iterator()

    def _open(self, step: int) -> Any:
        """Grain's iterator from element `step` on."""
        import grain  # here, because it takes 0.3 s and verbs that read no data do not need it

        self._order.prepare(self.data_step(step + 1))
        prefetch, workers = self._cfg.data.prefetch, self._cfg.data.workers
        dataset = grain.MapDataset.source(StepSource(self._order, self._reader, self._rows, self._rules,
                                                     self.journal.jumps))[step:]
        threads = min(READ_THREADS, prefetch) if workers == 0 else 1
        buffer = prefetch if workers == 0 else 1
        dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer))
        if workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():
                # Grain reads its flags when it starts worker processes, and we have no absl command line.
                flags.FLAGS.mark_as_parsed()
            options = grain.multiprocessing.MultiprocessingOptions(
                num_workers=workers, per_worker_buffer_size=max(1, math.ceil(prefetch / workers)))
            dataset = dataset.mp_prefetch(options, worker_init_fn=begin_worker)
        return iter(dataset)

    def _close_iterator(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def reading(data: ResolvedData) -> dict[str, float]:
    """What an epoch makes of its tokens: `tokens` of the files (each pass), `trained` as targets, `dropped` (behind the
    last whole instance or document, or cut off), and the `padding` as a share of all positions."""
    tokens = sum(part.n_tokens for part in data.parts)
    positions = data.n_instances * data.sequence_length
    kept = positions if data.packing is None else sum(data.packing.summary["tokens"])
    return {"tokens": tokens, "trained": kept - data.n_instances, "dropped": tokens - kept,
            "padding": 1 - kept / positions}


def make_batches(cfg: Config, resolved: ResolvedData, sharding: jax.sharding.NamedSharding | None = None,
                 journal: Journal | None = None) -> GlobalBatches:
    """The batches of a run.

    Args:
      cfg: the run.
      resolved: its data, from `tokens.resolve`.
      sharding: of the (B, T) arrays; each process reads only the rows of its devices. None gives numpy arrays of all
        rows.
      journal: of the run, for what was decided about its data; None: nothing was, and nothing is written down.

    Raises:
      DataError: the batch does not divide over the sharding, or the processes of the job resolved different data.
    """
    _check_same_everywhere(resolved.fingerprint)
    if cfg.data.stream.kind != "none":
        from maxtext.data.stream import StreamBatches  # here, because few runs need it

        return StreamBatches(cfg, resolved, sharding, journal)
    return Batches(cfg, resolved, sharding, journal)


def _check_same_everywhere(fingerprint: str) -> None:
    """Refuses processes that would read different batches: other files, or another packing on another kind of CPU."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(fingerprint), np.uint8)
    all_PF = all_values(mine)
    other = [process for process, theirs in enumerate(all_PF) if not np.array_equal(theirs, all_PF[0])]
    if other:
        raise DataError(f"processes {', '.join(map(str, other))} resolved other data than process 0 (fingerprint): all "
                        "must see the same files; with data.packing best_fit on different CPUs write "
                        "data.packing_ties: stable, or let them share output_dir")


def fingerprint(batch: Batch) -> jax.Array:
    """An order-sensitive sum of the batch's tokens modulo 2^32: equal batches, and only they, have equal ones.

    The weight of a place depends on the place in the global batch, so that the sum is the same on every mesh.

    Returns:
      uint32 scalar, for use inside or outside jit.
    """
    B, T = batch.tokens_BT.shape
    rows_B1 = jax.lax.iota(jnp.uint32, B)[:, None]
    columns_1T = jax.lax.iota(jnp.uint32, T)[None, :]
    weights_BT = _odd_weights(rows_B1 * np.uint32(T) + columns_1T)
    return jnp.sum(batch.tokens_BT.astype(jnp.uint32) * weights_BT, dtype=jnp.uint32)


def fingerprint_numpy(tokens_BT: np.ndarray) -> np.uint32:
    """`fingerprint` of tokens in host memory, shape (B, T)."""
    places = np.arange(tokens_BT.size, dtype=np.uint32).reshape(tokens_BT.shape)
    return (tokens_BT.astype(np.uint32) * _odd_weights(places)).sum(dtype=np.uint32)


def _odd_weights(places: Any) -> Any:
    """A pseudo-random odd number for each place: the 32-bit finalizer of MurmurHash3, lowest bit set.

    Weights that grow evenly would not see two rows of equal sums change places.
    """
    x = places ^ (places >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    x = x ^ (x >> np.uint32(16))
    return x | np.uint32(1)
