"""Signs of life of a run, read from its directory, and what they say: running, stalled, stopped, failed or finished.

The process that trains writes three kinds of files: metrics.jsonl (a line an update), events.jsonl (what it did beside
updates, and how it ended) and the heartbeat of its lease (every few seconds, with the phase that it is in and for how
long). All of them may lie on a disk that another machine writes; times of files are compared with this machine's clock.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from typing import Any, Literal

import yaml

from maxtext.checkpoint import lease
from maxtext.report.run_files import EVENTS, Record, parse_line, read_events, tokens_per_second

State = Literal["running", "stalled", "stopped", "failed", "finished"]
SILENT_SECONDS = 15.0  # without a heartbeat: they come every lease.BEAT_SECONDS
STILL_SECONDS = 15.0  # in one update, unless updates take long
STILL_UPDATES = 5.0  # in one update, in units of the last ones
LONG_SECONDS = 600.0  # in another phase, such as a compilation
DEAD_SECONDS = 600.0  # without a heartbeat, after which nobody will come back
_TAIL_BYTES = 1 << 16
_NAMES = {"step": "training", "data": "waiting for data", "eval": "evaluating", "checkpoint": "saving",
          "restore": "restoring", "compile": "compiling", "init": "starting", "samples": "sampling",
          "comparison": "comparing devices", "profile": "writing the profile",
          "snapshot": "copying the state", "gradient log": "keeping the gradient"}


@dataclasses.dataclass(frozen=True)
class Signs:
    """What the files of a run say.

    Attributes:
      folder: the run directory.
      config: its resolved config, empty where there is none.
      events: of the ledger.
      records: metrics of the newest updates, in ascending steps.
      beat: the newest heartbeat, or None.
      holder: who writes it.
      beat_seconds: age of the heartbeat.
      heard_seconds: age of whatever was written last.
    """

    folder: str
    config: dict[str, Any]
    events: list[Record]
    records: list[Record]
    beat: dict[str, Any] | None
    holder: lease.Holder | None
    beat_seconds: float
    heard_seconds: float

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or os.path.basename(os.path.abspath(self.folder)))

    @property
    def step(self) -> int:
        """The last update whose metrics were written, or that a ledger without metrics (of a sweep) names; 0 before."""
        if self.records:
            return int(self.records[-1]["step"])
        return max((int(event["step"]) for event in self.events if event.get("step") is not None), default=0)

    @property
    def steps(self) -> int | None:
        """Updates that the run is to have; None where nothing says."""
        planned = (self.config.get("train") or {}).get("steps")
        begun = [event["steps"] for event in self.events if event["event"] == "begin" and "steps" in event]
        return planned if isinstance(planned, int) else begun[-1] if begun else None

    def newest(self, metric: str) -> float | None:
        """The last value of a metric among the newest updates."""
        return next((float(one[metric]) for one in reversed(self.records) if metric in one), None)

    @property
    def update_seconds(self) -> float | None:
        """Median seconds of the newest updates."""
        seconds = [float(one["time/step (s)"]) for one in self.records[-20:] if one.get("time/step (s)")]
        return statistics.median(seconds) if seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the newest updates, of all devices."""
        rates = [rate for one in self.records[-20:] if (rate := tokens_per_second(one["step"], one)) is not None]
        return statistics.median(rates) if rates else None


def is_run(folder: str) -> bool:
    """Whether a directory is that of a run: it has metrics or a ledger."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("metrics.jsonl", EVENTS))


def read_signs(folder: str, tail_bytes: int = _TAIL_BYTES) -> Signs:
    """Reads the files of a run directory; of its metrics no more than the last `tail_bytes`."""
    metrics, ledger = os.path.join(folder, "metrics.jsonl"), os.path.join(folder, EVENTS)
    token = lease.newest_token(folder)
    beat = lease.beat_of(folder, token) if token else None
    events, records = read_events(ledger), _tail(metrics, tail_bytes)
    # Times after contents: a network file system asks its server anew when a file is opened.
    ages = {path: _age(path) for path in (metrics, ledger, lease.beat_path(folder, token))}
    return Signs(folder, _config(folder), events, records, beat, lease.holder(folder),
                 ages[lease.beat_path(folder, token)], min(ages.values()))


def judge(signs: Signs) -> tuple[State, str]:
    """The state of a run and one clause that says why."""
    ended = _ended(signs)
    if ended is not None:
        return ended
    beat, who = signs.beat, signs.holder
    silent = signs.beat_seconds > 2 * lease.BEAT_SECONDS  # a process of another container is not seen, but heard
    if beat is None or beat.get("released") or (silent and who is not None and _gone(who)):
        if signs.heard_seconds < 3 * lease.BEAT_SECONDS and (beat is None or beat.get("released")):
            return "running", "between two attempts"
        return "failed", "ended without a word (killed, or the machine went down)"
    if signs.beat_seconds > DEAD_SECONDS:
        return "failed", f"no sign of life since {_span(signs.beat_seconds)} ({who or 'of an unknown process'})"
    if signs.beat_seconds > SILENT_SECONDS:
        return "stalled", f"no sign of life since {_span(signs.beat_seconds)} ({who or 'of an unknown process'})"
    phase, still = str(beat.get("phase", "step")), float(beat.get("still_seconds", 0.0))
    still += 0.0 if silent else signs.beat_seconds  # of a silent process it is not known whether it stands still
    doing = _NAMES.get(phase, phase)
    if still > _patience(signs, phase):
        return "stalled", f"{doing} since {_span(still)}, without an end ({who or 'an unknown process'})"
    return "running", doing if phase in ("step", "data") or still < lease.BEAT_SECONDS else f"{doing}, {_span(still)}"


def _ended(signs: Signs) -> tuple[State, str] | None:
    """How the last attempt ended, by its own words; None while it has not."""
    for event in reversed(signs.events):
        if event["event"] == "begin":
            return None
        if event["event"] == "failure":
            return "failed", str(event.get("why", "unknown"))
        if event["event"] == "stop":
            why = str(event.get("why", ""))
            if why == "complete":
                return "finished", f"{signs.step:,} updates"
            return None if why == "a change of members" else ("stopped", f"by {why}")
    if signs.beat is None and signs.steps is not None and signs.step >= signs.steps:
        return "finished", f"{signs.step:,} updates"  # a run of before there were ledgers
    return None


def _patience(signs: Signs, phase: str) -> float:
    """Seconds that a phase may take before the run counts as stalled."""
    if phase in ("step", "data"):
        return max(STILL_SECONDS, STILL_UPDATES * (signs.update_seconds or 0.0))
    longest = max((float(event.get("seconds", 0.0)) for event in signs.events if event["event"] == phase), default=0.0)
    return max(LONG_SECONDS, 3 * longest)


def _gone(who: lease.Holder) -> bool:
    """Whether a process of this machine is no more; of another machine nobody can tell."""
    if who.machine != lease.this_machine():
        return False
    try:
        os.kill(who.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else \
        f"{seconds / 3600:.1f} h"


def _config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "config.yml")
    return _read_config(path, _modified(path))


@functools.lru_cache(maxsize=1)
def _read_config(path: str, modified: float | None) -> dict[str, Any]:
    """Once for each version of the file: `watch` looks every second, and YAML takes tens of milliseconds."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _modified(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _age(path: str) -> float:
    """Seconds since a file was written; infinite where there is none."""
    modified = _modified(path)
    return float("inf") if modified is None else max(time.time() - modified, 0.0)


def _tail(path: str, most_bytes: int) -> list[Record]:
    """The records at the end of a metrics file, one a step; what is torn or not there is left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - most_bytes, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = [record for line in (lines if size <= most_bytes else lines[1:]) if (record := parse_line(line))]
    merged: dict[int, Record] = {}
    for record in found:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]
