"""The ledger of a run, `events.jsonl`: what its time went to beside its updates, and what happened to it.

One JSON object a line, {"time": seconds since 1970, "event": name, ...}, appended as it happens and never rewritten:
begin (an attempt), init, compile, restore, checkpoint, eval, samples, comparison, profile (with `seconds`), lost
(updates that are done again), skip, back, corruption, failure, stop. Seconds of updates are in metrics.jsonl.
`maxtext.report.goodput` adds it all up.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maxtext.config.reason import reason
from maxtext.report.run_files import EVENTS, read_metrics
from maxtext.train.console import warn_once


class Ledger:
    """Writes the events of one attempt; into nothing when `run_dir` is None."""

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir, self._begun = run_dir, False

    def begin(self, steps: int, devices: int, environment: dict[str, Any] | None = None) -> None:
        """An attempt of this process begins, in an environment that the report shows; nothing is written before."""
        self._begun = True
        self.write("begin", steps=steps, devices=devices, host=socket.gethostname(), pid=os.getpid(),
                   environment=environment or {})

    def write(self, event: str, **fields: Any) -> None:
        """One event. A ledger that cannot be written is a warning: the run is worth more."""
        if self._run_dir is None or not self._begun:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **{
            name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}})
        try:
            os.makedirs(self._run_dir, exist_ok=True)
            with open(os.path.join(self._run_dir, EVENTS), "ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                torn = b"\n" if end and file.read(1) != b"\n" else b""
                file.write(torn + line.encode() + b"\n")
        except OSError as error:
            warn_once(f"the ledger of the run cannot be written: {reason(error)}", key="ledger")

    def lost(self, kept: int) -> None:
        """Notes the updates after `kept` that an earlier attempt, or a branch that was left, has made in vain.

        Called before the lines of these updates leave metrics.jsonl.
        """
        path = os.path.join(self._run_dir or "", "metrics.jsonl")
        if self._run_dir is None or not os.path.isfile(path):
            return
        try:
            gone = [record for record in read_metrics(path) if record["step"] > max(kept, 0)]
        except (OSError, ValueError):
            return
        if gone:
            self.write("lost", updates=len(gone), step=kept, until=gone[-1].get("time/unix (s)"),
                       seconds=float(sum(record.get("time/step (s)", 0.0) for record in gone)))

    @contextmanager
    def ending(self, change: type[BaseException]) -> Iterator[None]:
        """Notes why the attempt ends if it ends in an exception; `change` is the one that is no failure."""
        try:
            yield
        except change:
            self.write("stop", why="a change of members")
            raise
        except BaseException as error:
            self.write("failure", why=f"{type(error).__name__}: {reason(error)}"[:500])
            raise
