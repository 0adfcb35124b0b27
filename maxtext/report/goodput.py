"""Where a run's time went, from its ledger (events.jsonl) and its metrics: goodput, failures and recoveries."""

from __future__ import annotations

import dataclasses
import html
import statistics

from maxtext.report.run_files import Record, RunFiles

# Share -> the events whose seconds it adds up; productive, data and lost come from the updates.
_SPENT = {"start-up": ("init",), "compile": ("compile",), "restore": ("restore",), "save": ("checkpoint",),
          "evaluation": ("eval", "samples"), "checks": ("comparison", "profile")}
_COLOURS = {"productive": "var(--c0)", "data": "var(--c1)", "compile": "var(--c3)", "start-up": "var(--c4)",
            "save": "var(--c2)", "evaluation": "var(--c5)", "lost": "var(--bad)", "idle": "var(--rule)"}


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds from the first event to the last, each counted once, and what broke.

    Attributes:
      seconds: by share: productive, data, compile, start-up, restore, save, evaluation, checks, lost (updates done
        again or skipped), idle (between attempts, and whatever nothing accounts for).
      failures: what ended an attempt, or sent it back, against its will, in order.
      recoveries: seconds from each failure to the next update that was begun.
      lost_updates: updates that were done again, or skipped.
    """

    seconds: dict[str, float]
    attempts: int
    failures: list[str]
    recoveries: list[float]
    lost_updates: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def goodput(run: RunFiles) -> Goodput | None:
    """The account of a run; None when it has no ledger."""
    events = run.events
    starts = [i for i, event in enumerate(events) if event["event"] == "begin"]
    if not starts:
        return None
    records = [record for record in run.records if record.get("time/step (s)")]
    skipped = [record for record in records if record.get("optim/step skipped")]
    kept = [record for record in records if not record.get("optim/step skipped")]
    seconds = {
        "productive": _sum(kept, "time/step (s)") - _sum(kept, "throughput/device/data loading (s)"),
        "data": _sum(kept, "throughput/device/data loading (s)"),
        **{name: sum(event.get("seconds", 0.0) for event in events if event["event"] in kinds)
           for name, kinds in _SPENT.items()},
        "lost": _sum(skipped, "time/step (s)") + sum(e.get("seconds", 0.0) for e in events if e["event"] == "lost"),
    }
    ends = [_end(events[begin:after], run, events[after]["time"] if after < len(events) else None)
            for begin, after in zip(starts, [*starts[1:], len(events)], strict=True)]
    total = max(ends) - events[starts[0]]["time"]
    seconds["idle"] = max(total - sum(seconds.values()), 0.0)
    failures, recoveries = _failures(events, starts, ends)
    lost = len(skipped) + sum(event.get("updates", 0) for event in events if event["event"] == "lost")
    return Goodput(seconds, len(starts), failures, recoveries, lost)


def section(run: RunFiles) -> str:
    """The part of the report page; empty without a ledger."""
    found = goodput(run)
    if found is None or not found.total:
        return ""
    rows = "".join(f"<tr><td>{_dot(name)}{html.escape(name)}</td><td>{seconds:,.1f} s</td>"
                   f"<td>{100 * seconds / found.total:.1f}%</td></tr>" for name, seconds in found.seconds.items())
    told = [f"{found.attempts} attempt{'s' if found.attempts > 1 else ''}, {len(found.failures)} failures, "
            f"{found.lost_updates} updates done again or skipped"]
    if found.recoveries:
        told.append(f"from a failure to the next update: median {statistics.median(found.recoveries):.1f} s, longest "
                    f"{max(found.recoveries):.1f} s")
    told += [f"failure: {why}" for why in found.failures[-10:]]
    lines = "".join(f"<p class=soft>{html.escape(line)}</p>" for line in told)
    bar = "".join(f'<i style="width:{100 * part / found.total:.2f}%;background:{_COLOURS.get(name, "var(--soft)")}" '
                  f'title="{name}"></i>' for name, part in found.seconds.items() if part)
    table = f"<table><tr><th>time went to</th><th>seconds</th><th>share</th></tr>{rows}</table>"
    return (f'<section><h2>Goodput</h2><div class="bar">{bar}</div><div class="scroll">{table}</div>{lines}'
            "</section>")


def _dot(name: str) -> str:
    return f'<i class="dot" style="background:{_COLOURS.get(name, "var(--soft)")}"></i>'


def _sum(records: list[Record], metric: str) -> float:
    return sum(float(record.get(metric, 0.0)) for record in records)


def _end(events: list[Record], run: RunFiles, limit: float | None) -> float:
    """When an attempt was last heard of: in the ledger, or in the metrics of its updates, those in vain included."""
    begun = events[0]["time"]
    heard = [event["time"] for event in events]
    told = [record.get("time/unix (s)", 0.0) for record in run.records]
    told += [event["until"] for event in run.events if event["event"] == "lost" and event.get("until")]
    return max([*heard, *(time for time in told if time >= begun and (limit is None or time < limit))])


def _failures(events: list[Record], starts: list[int], ends: list[float]) -> tuple[list[str], list[float]]:
    """What went wrong, and how long each recovery took."""
    moments: list[tuple[float, str]] = []
    for begin, after, end in zip(starts, [*starts[1:], len(events)], ends, strict=True):
        inside = events[begin:after]
        moments += [(event["time"], event["why"]) for event in inside if event["event"] in ("failure", "back")]
        if after < len(events) and inside[-1]["event"] not in ("stop", "failure"):
            moments.append((end, "ended without a word (killed, or the machine went down)"))
    begun = [event["time"] for event in events if event["event"] == "init"]  # written when the first update begins
    moments.sort()
    recoveries = [min(later) - time for time, _ in moments if (later := [one for one in begun if one > time])]
    return [why for _, why in moments], recoveries
