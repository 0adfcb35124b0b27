"""Which instances form the global batch of a step: a pure function of (data, seed, step), as in OLMo-core's loader.

Epoch e (from 1) is the index 0..N-1 shuffled by numpy's PCG64(seed + e); batch k of the epoch is row k of it, and the
incomplete last row is dropped. Hosts, devices, workers and restarts have no part in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.data import DataError

# Above this many instances the permutation is a memory-mapped file: computed once, and shared by the worker processes.
IN_MEMORY_INSTANCES = 1_000_000
EPOCHS_KEPT = 2


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
    """

    def __init__(self, n_instances: int, batch: int, seed: int, fingerprint: str, cache_dir: str | Path):
        if not batch <= n_instances < 2**32:
            raise DataError(f"{n_instances:,} instances: one epoch must hold at least one batch of {batch:,} instances "
                            "and fewer than 2^32 instances")
        self.n_instances = n_instances
        self.batch = batch
        self.seed = seed
        self._fingerprint = fingerprint
        self._cache_dir = Path(cache_dir)
        self._epochs: dict[int, np.ndarray] = {}
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
        row = (step - 1) % self.batches_per_epoch
        return np.array(self._order(self.epoch(step))[row * self.batch:(row + 1) * self.batch])

    def _order(self, epoch: int) -> np.ndarray:
        with self._lock:
            if epoch not in self._epochs:
                while len(self._epochs) >= EPOCHS_KEPT:
                    del self._epochs[min(self._epochs, key=lambda old: (old > epoch, old))]
                self._epochs[epoch] = (self._cached(epoch) if self.n_instances > IN_MEMORY_INSTANCES
                                       else instance_order(self.n_instances, self.seed, epoch))
            return self._epochs[epoch]

    def cache_file(self, epoch: int) -> Path:
        """The file that keeps one epoch's permutation: raw little-endian uint32."""
        return self._cache_dir / f"order_{self._fingerprint[:16]}_n{self.n_instances}_seed{self.seed}_epoch{epoch}.u32"

    def _cached(self, epoch: int) -> np.ndarray:
        path = self.cache_file(epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            order = self._open(path)
            if order is None:
                _write_atomically(path, instance_order(self.n_instances, self.seed, epoch))
                order = self._open(path)
        if order is None:
            raise DataError(f"{path}: was written but does not hold a permutation of {self.n_instances:,} instances; "
                            "is the disk full?")
        return order

    def _open(self, path: Path) -> np.ndarray | None:
        """The memory-mapped permutation; None when there is none, or when it is not whole."""
        if not path.is_file() or path.stat().st_size != 4 * self.n_instances:
            return None
        order = np.memmap(path, np.dtype("<u4"), "r")
        whole = int(order.sum(dtype=np.uint64)) == self.n_instances * (self.n_instances - 1) // 2
        return order if whole else None

    def __getstate__(self) -> dict[str, Any]:
        # A worker process computes or maps the permutation itself: it is not sent through the pickle.
        return {key: value for key, value in self.__dict__.items() if key not in ("_epochs", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epochs, self._lock = {}, threading.Lock()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time per file: the others wait for its result instead of computing it again."""
    with open(f"{path}.lock", "w") as lock:
        # Some network file systems have no locks; the atomic rename alone keeps the file whole.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_atomically(path: Path, order: np.ndarray) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            order.astype("<u4", copy=False).tofile(file)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot write the order of instances ({error.strerror or error})") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
