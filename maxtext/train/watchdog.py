"""A run that hangs is worse than one that ends: the watchdog names the phase, writes all stacks down, and ends it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

import jax

from maxtext.config.guards import WatchdogConfig
from maxtext.config.reason import reason
from maxtext.train.clock import Phases
from maxtext.train.ledger import Ledger

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: what schedulers take for a failure that another attempt may not meet
_SETTINGS = {"checkpoint": "save", "snapshot": "save", "gradient log": "save", "samples": "eval",
             "comparison": "eval"}  # where names differ
_TICK_SECONDS = 1.0


class Watchdog:
    """Watches, in a thread, that no phase takes longer than its limit; use it as a context.

    Time is counted in ticks of this thread, so that neither a clock that jumps nor a process that was stopped for a
    while looks like a hang.
    """

    def __init__(self, cfg: WatchdogConfig, run_dir: str, phases: Phases, ledger: Ledger) -> None:
        self._cfg, self._run_dir, self._phases, self._ledger = cfg, run_dir, phases, ledger
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._end.set()

    def _watch(self) -> None:
        limits = [self._limit(phase) for phase in ("init", "compile", "data", "step", "save", "restore", "eval")]
        tick = min(_TICK_SECONDS, min(limits) / 10)
        seen, spent, before = -1, 0.0, time.monotonic()
        while not self._end.wait(tick):
            now = time.monotonic()
            mark, name = self._phases.mark, self._phases.name
            spent = 0.0 if mark != seen else spent + min(now - before, 2 * tick)
            seen, before = mark, now
            if spent > self._limit(name):
                self._give_up(name, spent)

    def _limit(self, phase: str) -> float:
        return getattr(self._cfg, f"{self._setting(phase)}_seconds")

    def _setting(self, phase: str) -> str:
        """The setting that bounds a phase; one without its own is bounded like an update."""
        name = _SETTINGS.get(phase, phase)
        return name if hasattr(self._cfg, f"{name}_seconds") else "step"

    def _give_up(self, phase: str, spent: float) -> None:
        process = f"_{jax.process_index()}" if jax.process_index() else ""
        path = os.path.join(self._run_dir, f"stuck_in_{phase}{process}.txt")
        stacks = f"the stacks of all threads are in {path}"
        try:
            with open(path, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            stacks = f"the stacks could not be written to {path} ({reason(error)})"
        setting = f"watchdog.{self._setting(phase)}_seconds"
        self._ledger.write("failure", why=f"stuck in {phase}", seconds=spent, step=self._phases.update)
        print(f"training stopped: stuck in phase {phase} after update {self._phases.update}, for more than "
              f"{self._limit(phase):g} s ({setting}); {stacks}. The same command goes on from the newest checkpoint.",
              file=sys.stderr, flush=True)
        os._exit(TRY_AGAIN)  # whatever hangs would hang an orderly end too
