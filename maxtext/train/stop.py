"""When a run stops before its last update: a signal or a time budget, in any process of the job."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.parallel.mesh import batch_devices
from maxtext.parallel.sharding import sharding

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MEMBERS = "a change of members"  # of an elastic run: it goes on at once, in another attempt
# What processes vote, the largest wins: nothing, new members, a signal's number (from 2 on), a spent time budget,
# trouble with saving. Twice that, plus 1 from who wants to try again to save.
_GO_ON, _MEMBERS, _BUDGET, _TROUBLE = 0, 1, 100, 101


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what happened and what to do."""


class Stopper:
    """Remembers that the run should stop; the loop asks after every update.

    A first SIGTERM or SIGINT only sets a flag, so that the update in progress ends and is saved. A second one acts as
    it would without this class, for a person who does not want to wait.

    Attributes:
      trouble: says why the run cannot go on, or None.
    """

    trouble: Callable[[], str | None] = staticmethod(lambda: None)

    def __init__(self, started: float, max_seconds: float | None) -> None:
        """`started` is the `time.monotonic()` from which `max_seconds` (None: no budget) counts."""
        self._deadline = None if max_seconds is None else started + max_seconds
        self._max_seconds = max_seconds
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # whatever signal.signal returned

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came, if any."""
        return self._signal

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        around = getattr(self._previous.get(self._signal), "__self__", None)
        if isinstance(around, Stopper):  # of a sweep that trains its members one by one: it stops too
            around._signal = self._signal
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def reason(self) -> str | None:
        """Why the run should stop now, or None."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"time budget of {self._max_seconds:g} s (train.max_seconds)"
        return self.trouble()


class Votes:
    """Lets the processes of a job stop after the same update, whichever of them was told to.

    Each process puts its vote into the inputs of an update; the update returns the largest. All processes read it at
    the same place of the loop, so that none waits for the others outside of the updates that they share.
    """

    def __init__(self, stopper: Stopper, mesh: Mesh) -> None:
        self._stopper, self._several = stopper, jax.process_count() > 1
        self._shape, self._sharding = (batch_devices(mesh),), sharding(mesh, "batch")
        self._heard, self._retry, self._heard_retry = _GO_ON, False, False

    def cast(self) -> tuple[jax.Array, ...]:
        """The vote to give to the next update: (batch devices,) int32; nothing in a job of one process."""
        if not self._several:
            return ()
        vote = 2 * self._code() + self._retry
        return (jax.make_array_from_callback(self._shape, self._sharding, lambda index: np.full(
            self._shape, vote, np.int32)[index]),)

    def hear(self, vote: int) -> None:
        """Takes in what an update returned."""
        self._heard, self._heard_retry = max(self._heard, vote // 2), vote == 1

    def retry(self, wanted: bool) -> bool:
        """Whether all processes try again now to save, because one of them wants to."""
        if not self._several:
            return wanted
        heard, self._heard_retry = self._heard_retry, False
        self._retry = wanted and not heard
        return heard

    def reason(self) -> str | None:
        """Why the run stops now, in every process alike; None: it goes on."""
        if not self._several:
            return self._stopper.reason()
        if not self._heard:
            return None
        if self._heard == _TROUBLE:
            return self._stopper.trouble() or "trouble with saving in another process, whose log says which"
        named = {_MEMBERS: MEMBERS, _BUDGET: "a time budget (train.max_seconds)"}
        return named.get(self._heard) or signal.Signals(self._heard).name

    def _code(self) -> int:
        reason = self._stopper.reason()
        if reason is None:
            return _GO_ON
        if reason == MEMBERS:
            return _MEMBERS
        received = self._stopper.received
        if received is not None:
            return int(received)
        return _TROUBLE if self._stopper.trouble() else _BUDGET
