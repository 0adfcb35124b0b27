"""What happened to a run, from its ledger: marks for its curves, and a table."""

from __future__ import annotations

import bisect
import datetime
import html
import itertools
from collections.abc import Callable

from maxtext.config.wording import counted
from maxtext.report.chart import Marks
from maxtext.report.run_files import Record, RunFiles

_MOST = 40
_BAD = ("failure", "back", "corruption")


def event_marks(run: RunFiles) -> list[Marks]:
    """Saves, failures, and the updates after which attempts went on: by themselves, or where one had been stopped."""
    told = _told(run)
    saves = [int(event["step"]) for event in run.events if event["event"] == "checkpoint" and event.get("step")]
    return [Marks("saves", sorted(set(saves)), "var(--c2)"),
            Marks("resumes", [step for _, kind, step, _ in told if kind == "resumed"], "var(--c3)"),
            Marks("recoveries", [step for _, kind, step, _ in told if kind == "recovered"], "var(--c1)"),
            Marks("failures", [step for _, kind, step, _ in told if kind == "failure"], "var(--bad)")]


def section(run: RunFiles) -> str:
    """The events that a person wants to know of, the newest last; empty without a ledger."""
    found = _told(run)
    if not found:
        return ""
    rows = "".join(
        f"<tr{' class=bad' if kind == 'failure' else ''}><td>{_date(at)}</td><td>{step:,}</td>"
        f"<td class=left>{html.escape(words)}</td></tr>" for at, kind, step, words in found[-_MOST:])
    left_out = f" <small>the last {_MOST} of {len(found)}</small>" if len(found) > _MOST else ""
    return (f"<section><h2>Events{left_out}</h2><div class=scroll><table><tr><th>time (UTC)</th><th>update</th>"
            f"<th class=left>what</th></tr>{rows}</table></div></section>")


def _told(run: RunFiles) -> list[tuple[float, str, int, str]]:
    """(time, kind, update that the run had reached, words) of each event that is no part of every run's course."""
    found: list[tuple[float, str, int, str]] = []
    open_since: Record | None = None  # the attempt that has not said how it ended
    reached = _reached(run)
    for event in run.events:
        kind, at = event["event"], float(event["time"])
        step = int(event.get("step") or reached(at))
        if kind == "begin":
            if open_since is not None:
                found.append((at, "failure", step, "the attempt before had ended without a word"))
            where = f" on {event['host']}" if event.get("host") else ""
            why = "begin" if not found else "recovered" if found[-1][1] == "failure" else "resumed"
            found.append((at, why, step, f"an attempt begins{where}, {counted(event.get('devices', '?'), 'device')}"))
            open_since = event
        elif kind in _BAD:
            found.append((at, "failure", step, str(event.get("why"))))
            open_since = event if kind == "back" else None
        elif kind == "stop":
            found.append((at, "stop", step, f"end: {event.get('why')}"))
            open_since = None
        elif kind == "lost":
            found.append((at, "lost", step, f"{event.get('updates')} updates after this one are done again"))
        elif kind == "skip":
            found.append((at, "skip", step, "skipped: an outlier, or not finite"))
    return found


def _reached(run: RunFiles) -> Callable[[float], int]:
    """The last update that was written by a time."""
    written = sorted((one["time/unix (s)"], int(one["step"])) for one in run.records if "time/unix (s)" in one)
    times = [at for at, _ in written]
    last = list(itertools.accumulate((step for _, step in written), max, initial=0))
    return lambda at: last[bisect.bisect_right(times, at)]


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
