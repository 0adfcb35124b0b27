"""Which instances form the global batch of a step: a pure function of (data, seed, step), as in OLMo-core's loader.

Epoch e (from 1) is the index 0..N-1 shuffled by numpy's PCG64(seed + e); batch k of the epoch is row k of it, and the
incomplete last row is dropped. Hosts, devices, workers and restarts have no part in it.

Memory: numpy's shuffle needs the whole uint32 index at once. For a large data set one process holds it (4 N bytes, 2.9
GB for 724 million instances) while it writes the cache file; after that every process maps the file and touches only
the rows that it reads.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO, Any

import numpy as np

from maxtext.data import DataError
from maxtext.data.cache import open_or_make

# Above this many instances the permutation is a memory-mapped file: computed once, and shared by the worker processes.
IN_MEMORY_INSTANCES = 1_000_000
EPOCHS_KEPT = 2
CHECK_BLOCK = 1 << 22


def instance_order(n_instances: int, seed: int, epoch: int) -> np.ndarray:
    """The order of all instances in one epoch.

    Args:
      n_instances: N, below 2^32.
      seed: the data seed.
      epoch: counted from 1; the generator's seed is `seed + epoch`.

    Returns:
      uint32 permutation, shape (N,). Source: OLMo-core `data/data_loader.py`, `_get_global_indices`; the array's type
      matters, because numpy's shuffle is reproduced only with the same calls.
    """
    order = np.arange(n_instances, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order


class GlobalOrder:
    """The instances of every step.

    Args:
      n_instances: N, instances in one epoch.
      batch: B, instances in one global batch.
      seed: the data seed.
      fingerprint: identity of the data, part of the cache files' names.
      cache_dir: where the permutations of large data sets are kept.
      chunk: consecutive instances that stay together: it is their blocks that are shuffled.
    """

    def __init__(self, n_instances: int, batch: int, seed: int, fingerprint: str, cache_dir: str | Path,
                 chunk: int = 1):
        if not batch <= n_instances < 2**32:
            raise DataError(f"{n_instances:,} instances: one epoch must hold at least one batch of {batch:,} instances "
                            "and fewer than 2^32 instances")
        assert n_instances % chunk == 0, "every part of an epoch consists of whole blocks"
        self.n_instances = n_instances
        self.batch = batch
        self._chunk = chunk
        self._blocks = n_instances // chunk
        self.seed = seed
        self._fingerprint = fingerprint
        self._cache_dir = Path(cache_dir)
        self._epochs: dict[int, np.ndarray] = {}
        self._checked: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def batches_per_epoch(self) -> int:
        return self.n_instances // self.batch

    def epoch(self, step: int) -> int:
        """Epoch, from 1, of the update `step`, from 1."""
        return (step - 1) // self.batches_per_epoch + 1

    def instance_ids(self, step: int) -> np.ndarray:
        """Instances of update `step` (from 1), uint32, shape (B,), in the order of the batch's rows."""
        if step < 1:
            raise DataError(f"step {step}: updates are counted from 1")
        begin = (step - 1) % self.batches_per_epoch * self.batch
        places = np.arange(begin, begin + self.batch, dtype=np.int64)
        blocks = np.asarray(self._order(self.epoch(step)))[places // self._chunk].astype(np.int64)
        return (blocks * self._chunk + places % self._chunk).astype(np.uint32)

    def in_sequence(self, first: int, count: int) -> np.ndarray:
        """Instances `first` to `first + count - 1`, from 0, of all epochs one after another, uint32, shape (count,)."""
        assert self._chunk == 1
        places, found = np.arange(first, first + count, dtype=np.int64), np.empty(count, np.uint32)
        for epoch in range(first // self.n_instances, (first + count - 1) // self.n_instances + 1):
            mine = places // self.n_instances == epoch
            found[mine] = np.asarray(self._order(epoch + 1))[places[mine] % self.n_instances]
        return found

    def prepare(self, step: int) -> None:
        """Works out or maps the order that `step` needs, before worker processes would all do so at the same time."""
        self._order(self.epoch(step))

    def _order(self, epoch: int) -> np.ndarray:
        with self._lock:
            if epoch not in self._epochs:
                while len(self._epochs) >= EPOCHS_KEPT:
                    del self._epochs[min(self._epochs, key=lambda old: (old > epoch, old))]
                self._epochs[epoch] = (self._cached(epoch) if self._blocks > IN_MEMORY_INSTANCES
                                       else instance_order(self._blocks, self.seed, epoch))
            return self._epochs[epoch]

    def cache_file(self, epoch: int) -> Path:
        """The file that keeps one epoch's permutation: raw little-endian uint32."""
        return self._cache_dir / f"order_{self._fingerprint[:16]}_n{self._blocks}_seed{self.seed}_epoch{epoch}.u32"

    def _cached(self, epoch: int) -> np.ndarray:
        def write(file: IO[bytes]) -> None:
            instance_order(self._blocks, self.seed, epoch).astype("<u4", copy=False).tofile(file)

        return open_or_make(self.cache_file(epoch), self._open, write)

    def _open(self, path: Path) -> np.ndarray | None:
        """The memory-mapped permutation; None when there is none, or when it is not whole."""
        if not path.is_file() or path.stat().st_size != 4 * self._blocks:
            return None
        if path.stat().st_mtime_ns != self._checked.get(path.name) and not self._whole(path):
            return None
        # Sent to worker processes, so that they need not read the whole file again.
        self._checked[path.name] = path.stat().st_mtime_ns
        return np.memmap(path, np.dtype("<u4"), "r")

    def _whole(self, path: Path) -> bool:
        """Whether the file's sum is that of a permutation; read in blocks, because mapped pages would stay with us."""
        total = 0
        with open(path, "rb") as file:
            for _ in range(0, self._blocks, CHECK_BLOCK):
                total += int(np.fromfile(file, "<u4", CHECK_BLOCK).sum(dtype=np.uint64))
        return total == self._blocks * (self._blocks - 1) // 2

    def __getstate__(self) -> dict[str, Any]:
        # A worker process computes or maps the permutation itself: it is not sent through the pickle.
        return {key: value for key, value in self.__dict__.items() if key not in ("_epochs", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epochs, self._lock = {}, threading.Lock()
