"""Work on the pieces of a corpus: by several processes, each result kept on disk, so that a killed run goes on.

A piece is some consecutive units of one source. What a piece gives does not depend on who works on it, or when.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from maxtext.data import DataError
from maxtext.data.corpus import read_units
from maxtext.data.reader import begin_worker
from maxtext.data.special_tokens import LITERAL, SpecialTokens
from maxtext.data.text_source import UNIT_BYTES, Bad, Document, Source, Unit

Result = TypeVar("Result")
PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive units of a source; pieces of all sources are numbered from 0 in reading order."""

    number: int
    source: str
    units: tuple[Unit, ...]
    special: SpecialTokens = LITERAL

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(unit.size for unit in self.units)

    def read(self) -> Iterator[Document | Bad]:
        """Its documents in order, and the records that are none."""
        return self.special.applied(read_units(self.units, self.source))

    def identity(self) -> str:
        """Hex identity of what is read, without reading it: ranges, and sizes and times of the files."""
        rows: list[Any] = [self.source]
        if self.special.policy != "literal":
            rows.append(dataclasses.astuple(self.special))
        for unit in self.units:
            rows.append(dataclasses.astuple(unit))
            if os.path.exists(unit.path):
                status = os.stat(unit.path)
                rows.append([status.st_size, status.st_mtime_ns])
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def cut(sources: Sequence[Source], special: SpecialTokens = LITERAL) -> list[Piece]:
    """The units of each source, gathered to pieces of at least UNIT_BYTES but for its last."""
    pieces: list[Piece] = []
    for source in sources:
        gathered: list[Unit] = []
        size = 0
        for place, unit in enumerate(source.units):
            gathered.append(unit)
            size += unit.size
            if size >= UNIT_BYTES or place == len(source.units) - 1:
                pieces.append(Piece(len(pieces), source.name, tuple(gathered), special))
                gathered, size = [], 0
    return pieces


class Progress:
    """Says on standard error how far a stage is, every few seconds; stages that are done before say nothing."""

    def __init__(self, stage: str, total: int):
        self._stage, self._total, self._done = stage, max(1, total), 0
        self._begin = self._said = time.monotonic()

    def add(self, size: int) -> None:
        """Counts bytes as done."""
        self._done += size
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS and self._done < self._total:
            self._said = now
            rate = self._done / (now - self._begin)
            print(f"{self._stage}: {self._done / self._total:.0%} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} "
                  f"MB/s, {(self._total - self._done) / rate:,.0f} s left", file=sys.stderr, flush=True)


def each(work: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], workers: int, stage: str) -> list[Result]:
    """`work(*task)` of every task, whose first argument is a piece; results in the order of the tasks.

    Args:
      work: a function of a module; leaves its result on disk and returns it when it is there already.
      workers: processes; 1 works in this one.

    Raises:
      DataError: that of the first piece which failed.
    """
    progress = Progress(stage, sum(task[0].size for task in tasks))
    results: dict[int, Result] = {}
    if workers <= 1 or len(tasks) <= 1:
        for task in tasks:
            results[task[0].number] = work(*task)
            progress.add(task[0].size)
        return list(results.values())
    # Started afresh and not forked: the caller may hold the threads of an accelerator.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(tasks)), context, _begin, (workers,)) as pool:
        futures = {pool.submit(work, *task): task[0] for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                results[futures[future].number] = future.result()
                progress.add(futures[future].size)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise DataError("a worker process was killed (out of memory?); the same command goes on, with --workers "
                            f"{max(1, workers // 2)} it needs half of the memory") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [results[task[0].number] for task in tasks]


def _begin(workers: int) -> None:
    """Set-up of a worker process: one core each."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begin_worker(0, workers)


@contextlib.contextmanager
def workshop(out: Path) -> Iterator[Path]:
    """The folder beside `out` in which the work is done; it stays after a kill, for the same command to go on.

    An error removes it, unless pieces of token files are in it.

    Raises:
      DataError: it cannot be made, or another process works in it.
    """
    folder = out.parent / f".{out.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 (held to the end)
    except OSError as error:
        raise DataError(f"{out}: cannot be made ({error.strerror}); give --out a place that you may write") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{out}: another process is preparing it; wait for it, or give another --out") from error
        except OSError:
            pass  # some network file systems have no locks
        try:
            yield folder
        except DataError:
            if not any(folder.glob("tokens-*/result.json")):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
