"""Reading metrics.jsonl: one JSON object a line, {"step": n, "metric name": number, ...}, in ascending steps.

JSON has no NaN or infinity, so these stand as the strings "NaN", "Infinity" and "-Infinity" (as in proto3's JSON):
every JSON reader accepts the file, and float(...), Number(...) and pandas.to_numeric give the number back.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

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
