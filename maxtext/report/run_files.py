"""Reading a run directory: metrics.jsonl, samples.jsonl and config.yml.

metrics.jsonl has one JSON object a line, {"step": n, "metric name": number, ...}, in ascending steps. JSON has no NaN
or infinity, so these stand as the strings "NaN", "Infinity" and "-Infinity" (as in proto3's JSON): every JSON reader
accepts the file, and float(...), Number(...) and pandas.to_numeric give the number back.

samples.jsonl, of runs with generate.prompts, has one JSON object for each prompt and step that it was completed at,
{"step": n, "prompt": text, "text": what the model added}, in ascending steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from maxtext.config.runs import no_run

SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
Record = dict[str, Any]  # metric -> number, and step -> int

_LINE = re.compile(rb'\{"step": (\d+)[,}]')
_NOT_FINITE = {"NaN", "Infinity", "-Infinity"}
_TAIL_BYTES = 1 << 16


def read_metrics(path: str) -> list[Record]:
    """Read a metrics file, leaving out a last line that was cut off while it was written.

    Raises ValueError with the line's number for any other line that is no metrics object, OSError when unreadable.
    """
    records = []
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    torn = lines.pop()  # empty when the file ends with a newline, as it does unless its writer was killed
    for number, line in enumerate(lines, start=1):
        record = parse_line(line)
        if record is None:
            raise ValueError(f"{path}:{number}: not a metrics line: {line[:60]!r}; remove it to read the rest")
        records.append(record)
    whole = parse_line(torn)
    return records if whole is None else [*records, whole]


def parse_line(line: bytes) -> Record | None:
    """Return the object of one line, or None when it is torn or no metrics line."""
    if not _LINE.match(line):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return {name: float(value) if isinstance(value, str) and value in _NOT_FINITE else value
            for name, value in record.items()}


def step_of(line: bytes) -> int | None:
    """Return the step of a line that begins and ends like a metrics line, without reading the rest of it."""
    match = _LINE.match(line)
    return int(match[1]) if match and line.rstrip().endswith(b"}") else None


def last_step(run_dir: str) -> int:
    """Return the step of the last whole line of the run's metrics.jsonl; -1 when there is none."""
    path = os.path.join(run_dir, "metrics.jsonl")
    if not os.path.exists(path):
        return -1
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        reach = _TAIL_BYTES
        while True:
            file.seek(max(size - reach, 0))
            lines = file.read().split(b"\n")
            for line in reversed(lines if reach >= size else lines[1:]):  # the first of a tail may be half a line
                record = parse_line(line)
                if record is not None:
                    return int(record["step"])
            if reach >= size:
                return -1
            reach *= 8


def tokens_per_second(step: int, metrics: Mapping[str, float]) -> float | None:
    """Tokens per second over all devices, from the metrics of one step; None when they do not tell."""
    seconds, tokens = metrics.get("time/step (s)"), metrics.get("throughput/total tokens")
    if not seconds or not tokens or step < 1:
        return metrics.get("throughput/device/TPS")
    return tokens / step / seconds


class ReportError(ValueError):
    """The run directory holds nothing that a report can be made of."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a run directory holds: one record a step in ascending steps, and the resolved config."""

    folder: str
    records: list[Record]
    config_text: str  # empty when there is no config.yml
    config: dict[str, Any]
    samples: list[Record] = dataclasses.field(default_factory=list)  # lines of samples.jsonl
    events: list[Record] = dataclasses.field(default_factory=list)  # lines of events.jsonl

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or os.path.basename(os.path.abspath(self.folder)))

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was recorded and is finite."""
        pairs = [(int(r["step"]), float(r[metric])) for r in self.records if math.isfinite(r.get(metric, math.nan))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def rates(self) -> tuple[list[int], list[float]]:
        """Steps and tokens per second over all devices."""
        pairs = [(int(r["step"]), rate) for r in self.records if (rate := tokens_per_second(r["step"], r)) is not None]
        return [step for step, _ in pairs], [rate for _, rate in pairs]

    def eval_sets(self, kind: str) -> list[str]:
        """Names of the held-out sets that have the metric `eval/lm/<set>/<kind>`, in the order of their recording."""
        names = dict.fromkeys(name for record in self.records for name in record
                              if name.startswith("eval/lm/") and name.endswith(f"/{kind}"))
        return [name[len("eval/lm/"):-len(kind) - 1] for name in names]


def read_run(run_dir: str) -> RunFiles:
    """Read metrics.jsonl and config.yml of a run directory.

    Raises ReportError when there is no metrics.jsonl, when it is damaged, or when no step is in it yet.
    """
    path = os.path.join(run_dir, "metrics.jsonl")
    if not os.path.isfile(path):
        raise ReportError(f"{no_run(run_dir, 'file metrics.jsonl')}; give the folder of a run, "
                          "<output_dir>/<run_name>, that has trained for at least one update")
    try:
        records = read_metrics(path)
    except ValueError as error:
        raise ReportError(str(error)) from None
    merged: dict[int, Record] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    if not merged:
        raise ReportError(f"{path} holds no step yet; train for at least one update, then run "
                          f"`maxtext report {run_dir}` again")
    try:
        with open(os.path.join(run_dir, "config.yml"), encoding="utf-8") as file:
            text = file.read()
        tree = yaml.safe_load(text)
    except FileNotFoundError:
        text, tree = "", {}
    except yaml.YAMLError as error:
        tree = {}
        text = f"# config.yml is not YAML: {error}\n{text}"
    return RunFiles(run_dir, [merged[step] for step in sorted(merged)], text, tree if isinstance(tree, dict) else {},
                    read_samples(os.path.join(run_dir, SAMPLES)), read_events(os.path.join(run_dir, EVENTS)))


def read_samples(path: str) -> list[Record]:
    """Read the whole lines of a samples file; none when there is no file."""
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        return [json.loads(line) for line in file if line.endswith(b"\n") and step_of(line) is not None]


def read_events(path: str) -> list[Record]:
    """Read the whole lines of a ledger (train/ledger.py), in the order of their writing; none when there is no file."""
    if not os.path.isfile(path):
        return []
    events = []
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            if isinstance(event, dict) and "event" in event and "time" in event:
                events.append(event)
    return events
