"""When a run stops before its last update: a signal, or a time budget."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """Remembers that the run should stop; the loop asks after every update.

    A first SIGTERM or SIGINT only sets a flag, so that the update in progress ends and is saved. A second one acts as
    it would without this class, for a person who does not want to wait.
    """

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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def reason(self) -> str | None:
        """Why the run should stop now, or None."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"time budget of {self._max_seconds:g} s (train.max_seconds)"
        return None
