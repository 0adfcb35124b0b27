"""A plain run that keeps snapshots in the hosts' memory too (`checkpoint.snapshots`): see `checkpoint.tiers`.

A process that dies leaves them in /dev/shm, and the next one on the same machine goes on from there if they are newer
than the newest checkpoint on disk. They belong to the run by an id that lies in its folder, so that a run which was
removed and begun anew finds none of them. A run that ends as it should takes them with it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.lease import Lease
from maxtext.checkpoint.manager import Checkpoints, Restored
from maxtext.checkpoint.processes import from_process_0
from maxtext.checkpoint.provenance import versions
from maxtext.checkpoint.tiers import Snapshots, memory_folder, memory_prefix
from maxtext.config.load import to_yaml
from maxtext.config.schema import Config
from maxtext.parallel.exchange import all_values
from maxtext.train.attendance import Attendance
from maxtext.train.console import warn_once
from maxtext.train.gradient_log import LoggedStep, Memory
from maxtext.train.lock import run_lock
from maxtext.train.resume import check_same_run
from maxtext.train.step import Gradient

PyTree = Any
ID = ".snapshots"  # the file in the run directory that holds the id


class RememberingAttendance(Attendance):
    """Waits as a plain run does, and keeps snapshots."""

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._root = cfg, os.path.join(memory_folder(), f"{memory_prefix(cfg.run_dir)}plain")
        self._lease: Lease | None = None
        self._memory: Memory | None = None
        self._origin = {"config": to_yaml(cfg), "versions": versions()}
        self._restored = False

    @contextmanager
    def lock(self, run_dir: str) -> Iterator[Lease | None]:
        with run_lock(run_dir) as self._lease:
            yield self._lease

    def opened(self, checkpoints: Checkpoints) -> None:
        """Takes the run's id, and the number of this attempt: the token of the lease, which grows with each."""
        path = os.path.join(self._cfg.run_dir, ID)

        def number() -> int:
            os.makedirs(self._cfg.run_dir, exist_ok=True)
            if not os.path.exists(path):
                with open(path, "w") as file:
                    file.write(uuid.uuid4().hex[:12])
            return 0 if self._lease is None else self._lease.token

        generation = from_process_0(number)
        with open(path) as file:
            run = file.read()
        snapshots = Snapshots(self._root, jax.process_index(), run, generation, None, self._told)
        self._memory = Memory(snapshots, lambda topic, words: all_words(words), self.fetch)

    def snapshot_due(self, cfg: Config, step: int) -> bool:
        return step % cfg.checkpoint.snapshot_every == 0 and step < cfg.train.steps

    def snapshot(self, step: int, state: PyTree, extra: dict[str, Any], wait: bool) -> bool:
        assert self._memory is not None
        self._memory.snapshots.take(step, state, {**extra, **self._origin})
        return not wait or self._memory.snapshots.wait()

    def logs(self, step: LoggedStep) -> None:
        assert self._memory is not None
        self._memory.logs(step)

    def keep_gradient(self, step: int, gradient: Gradient, extra: dict[str, Any]) -> None:
        assert self._memory is not None
        self._memory.keep(step, gradient, {**extra, **self._origin})

    def restore(self, abstract_state: PyTree, newer_than: int) -> Restored | None:
        assert self._memory is not None
        if self._restored:  # the run goes back, and what is in memory is of the branch that it leaves
            self.forget()
            return None
        self._restored = True
        found = self._memory.restore(abstract_state, newer_than)
        if found is None:
            return None
        at, how = found
        check_same_run(self._cfg, at.extra["config"], at.id.step, self._told)
        return Restored(at.id.step, at.state, at.extra, at.extra["config"], at.extra["versions"], how)

    def forget(self) -> None:
        assert self._memory is not None
        self._memory.forget()

    def ended(self) -> None:
        if self._memory is not None:
            self._memory.wait()  # else it would be written after what is removed here
        shutil.rmtree(self._root, ignore_errors=True)

    def _told(self, text: str) -> None:
        warn_once(text, key=text)


def all_words(mine: str) -> list[str]:
    """What every process says, by rank."""
    words = mine.encode()
    sizes = all_values(np.int32([len(words)]))[:, 0]
    padded = np.zeros(max(sizes.max(), 1), np.uint8)
    padded[:len(words)] = np.frombuffer(words, np.uint8)
    return [bytes(row[:size]).decode() for row, size in zip(all_values(padded), sizes, strict=True)]
