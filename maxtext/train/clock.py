"""Where a run is and how long it has been there, for its metrics, its watchdog and its ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from maxtext.train.ledger import Ledger

# What the ledger notes; waiting for data and the updates themselves are in the metrics.
LEDGERED = ("init", "compile", "checkpoint", "restore", "eval", "samples", "comparison", "profile")


class Phases:
    """The phase that a run is in: init, then step, with others inside.

    Attributes:
      mark: changes whenever the run enters or leaves a phase, or begins an update.
    """

    def __init__(self, ledger: Ledger, inner: Callable[[str], AbstractContextManager[None]] = nullcontext) -> None:
        """`inner` is entered with each phase too."""
        self._ledger, self._inner = ledger, inner
        self._names, self._began = ["init"], time.perf_counter()
        self.mark, self.update, self._marked = 0, 0, time.perf_counter()

    def _moved(self) -> None:
        self.mark, self._marked = self.mark + 1, time.perf_counter()

    def doing(self) -> dict[str, str | int | float]:
        """What a heartbeat says of the run: its phase, the update that was dispatched last, and since when."""
        return {"phase": self.name, "update": self.update,
                "still_seconds": round(time.perf_counter() - self._marked, 1)}

    @property
    def name(self) -> str:
        return self._names[-1]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The run is in phase `name` inside."""
        self._names.append(name)
        self._moved()
        began = time.perf_counter()
        try:
            with self._inner(name):
                yield
        finally:
            self._names.pop()
            self._moved()
            seconds = time.perf_counter() - began
            if self._names[0] == "init":
                self._began += seconds  # counted once, under its own name
            if name in LEDGERED:
                self._ledger.write(name, step=self.update, seconds=seconds)

    def progress(self, update: int) -> None:
        """Update `update` was dispatched."""
        if self._names[0] == "init":
            self._names[0] = "step"
            self._ledger.write("init", seconds=time.perf_counter() - self._began)
        self.update = update
        self._moved()

    def again(self) -> None:
        """The run begins again within this process."""
        self._names, self._began = ["init"], time.perf_counter()
        self._moved()


class Clock:
    """Seconds of each update, with start, compilation, evaluation and saving counted apart: each second once."""

    def __init__(self, phase: Callable[[str], AbstractContextManager[None]] = nullcontext) -> None:
        """`phase` is entered with the name of what is counted apart."""
        self._phase = phase
        self._mark = time.perf_counter()
        self._apart: dict[str, float] = {}

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Counts what runs inside under `name` and not as part of an update."""
        began = time.perf_counter()
        try:
            with self._phase(name):
                yield
        finally:
            spent = time.perf_counter() - began
            self._mark += spent
            self._apart[name] = self._apart.get(name, 0.0) + spent

    def lap(self, name: str | None = None) -> float:
        """Seconds since the last lap without what was counted apart; with a name they too are counted apart."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if name is not None:
            self._apart[name] = self._apart.get(name, 0.0) + seconds
        return seconds

    def take_apart(self) -> dict[str, float]:
        """What was counted apart since the last call, as metrics."""
        apart, self._apart = self._apart, {}
        return {f"time/{name} (s)": seconds for name, seconds in apart.items()}
