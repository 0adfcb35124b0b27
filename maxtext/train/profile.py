"""`profile.steps`: a trace of some updates for XProf, and what it says in short: profile.json, which the report shows.

Every process writes its trace below `<run>/profile/`, as jax.profiler lays it out; process 0 sums its own up.
Operations of a device are those of a plane of its own (TPU, GPU), or of the hosts' threads that run them (CPU). The
time of a device is split into computing, communication that nothing hides, and neither of both.
"""

from __future__ import annotations

import glob
import json
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from maxtext.config.logs import ProfileConfig
from maxtext.config.reason import reason
from maxtext.report.profile import PROFILE
from maxtext.train.console import warn_once

MOST = 20  # operations that are named
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|ppermute|\bsend|\brecv|nccl", re.I)
_SOURCE = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', re.M)


class Operation(NamedTuple):
    """One execution of an operation, in nanoseconds."""

    start: float
    end: float
    name: str


class Profile:
    """Traces the updates that the config names."""

    def __init__(self, cfg: ProfileConfig, run_dir: str, primary: bool) -> None:
        self._first, self._last = cfg.steps or (0, -1)
        self._run_dir, self._primary, self._on = run_dir, primary, False
        self._traced = 0  # the newest update

    def begins(self, update: int) -> bool:
        """Whether the trace begins before this update; all that was dispatched must be done then."""
        return update == self._first and not self._on

    def ends(self, update: int) -> bool:
        """Whether the trace ends with this update; it must be done then."""
        return self._on and update >= self._last

    def start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow down the dispatches that are to be measured
        try:
            jax.profiler.start_trace(os.path.join(self._run_dir, "profile"), profiler_options=options)
        except (RuntimeError, OSError) as error:
            warn_once(f"no profile is written: {reason(error)}")
            return
        self._on = True

    def update(self, number: int) -> AbstractContextManager[Any]:
        """Around the dispatch of an update: XProf shows the trace by these marks."""
        self._traced = number
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if self._on else nullcontext()

    def stop(self, program: str) -> str | None:
        """Ends the trace and writes profile.json; `program` is the text of the compiled update.

        Returns the summary in one line; None where there is none.
        """
        if not self._on:
            return None
        self._on = False
        try:
            jax.profiler.stop_trace()
            files = glob.glob(os.path.join(self._run_dir, "profile", "plugins", "profile", "*", "*.xplane.pb"))
            if not self._primary or not files:
                return None
            newest = max(files, key=os.path.getmtime)
            found = summary(read_operations(newest), (self._first, self._traced), program)
            found["trace"] = os.path.relpath(newest, self._run_dir)
            with open(os.path.join(self._run_dir, PROFILE), "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
        except (RuntimeError, OSError, ValueError) as error:
            warn_once(f"the profile is not complete: {reason(error)}")
            return None
        shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in found["shares"].items())
        return (f"profile of updates {self._first} to {self._traced}: {shares}; the trace is for XProf: xprof "
                f"{os.path.join(self._run_dir, 'profile')}")

    def abandon(self) -> None:
        """Ends a trace whose last update does not come."""
        if self._on:
            self.stop("")


def read_operations(path: str) -> dict[str, list[Operation]]:
    """The operations of each device in a trace of XProf (`*.xplane.pb`), without those that only hold others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types
        planes = list(jax.profiler.ProfileData.from_file(path).planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:") and "CUSTOM" not in plane.name]
        found: dict[str, list[Operation]] = {}
        for plane in devices or [plane for plane in planes if plane.name == "/host:CPU"]:
            lines = list(plane.lines)
            named = [line for line in lines if line.name == "XLA Ops"]  # of TPUs; others nest steps and modules
            for line in named or lines:
                by_device: dict[str, list[Operation]] = {}
                for event in line.events:
                    stats = dict(event.stats)
                    if event.duration_ns <= 0 or not (named or "hlo_op" in stats):
                        continue
                    device = f"device {stats.get('device_ordinal', 0)}" if plane.name == "/host:CPU" else plane.name
                    by_device.setdefault(device, []).append(Operation(
                        event.start_ns, event.start_ns + event.duration_ns, str(stats.get("hlo_op", event.name))))
                for device, operations in by_device.items():
                    found.setdefault(device, []).extend(_leaves(operations))
    return found


def summary(operations: dict[str, list[Operation]], steps: tuple[int, int], program: str = "") -> dict[str, Any]:
    """What profile.json holds.

    Returns:
      steps; devices; seconds (from the first operation to the last, mean over devices); shares of them: computing,
      communication (that no computation hides), idle; operations: name, seconds (of all devices), share of all
      operations' time, count, source (where the program says so), the longest first.

    Raises ValueError when there is no operation.
    """
    if not operations:
        raise ValueError("the trace holds no operation of a device")
    whole = computing = busy = 0.0
    for found in operations.values():
        whole += max(one.end for one in found) - min(one.start for one in found)
        computing += _covered((one.start, one.end) for one in found if not _COLLECTIVE.search(one.name))
        busy += _covered((one.start, one.end) for one in found)
    totals: dict[str, tuple[float, int]] = {}
    for one in (one for found in operations.values() for one in found):
        seconds, count = totals.get(one.name, (0.0, 0))
        totals[one.name] = (seconds + (one.end - one.start) / 1e9, count + 1)
    every = sum(seconds for seconds, _ in totals.values())
    sources = dict(_SOURCE.findall(program))
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:MOST]
    return {
        "steps": list(steps), "devices": len(operations), "seconds": whole / len(operations) / 1e9,
        "shares": {"computing": computing / whole, "communication": (busy - computing) / whole,
                   "idle": (whole - busy) / whole},
        "operations": [{"name": name, "seconds": seconds, "share": seconds / every, "count": count,
                        "source": sources.get(name, "")} for name, (seconds, count) in longest]}


def _leaves(operations: list[Operation]) -> list[Operation]:
    """Those of one line that hold no other one: a loop is what runs inside of it."""
    ordered = sorted(operations, key=lambda one: (one.start, -one.end))
    return [one for one, after in zip(ordered, [*ordered[1:], None], strict=True)
            if after is None or after.start >= one.end or after.end > one.end]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
