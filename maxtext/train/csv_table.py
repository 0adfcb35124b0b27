"""metrics.csv: metrics.jsonl as a table, for spreadsheets and whatever reads no JSON lines.

A row a step, a column a metric in the order of their first appearance, empty where a step has none. Numbers that are
not finite stand as in metrics.jsonl. The table follows metrics.jsonl: at the start of an attempt, and when a metric
appears for the first time, it is written again in whole from there; else rows are appended.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from maxtext.report.run_files import Record, parse_line


class CsvTable:
    """The table beside a metrics.jsonl, to which each step is written first."""

    def __init__(self, path: str, jsonl: str) -> None:
        """Writes the table anew from the lines that are there. Raises OSError."""
        self._path, self._jsonl = path, jsonl
        self._columns: dict[str, int] = {}
        self._last = -1
        self._file: TextIO | None = None
        self._rewrite()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """A row more; raises OSError, after which the table is not to be written to any more."""
        if step == self._last or any(name not in self._columns for name in values):
            self._rewrite()
            return
        if self._file is None:
            self._file = open(self._path, "a", newline="", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._row(csv.writer(self._file), {"step": step, **values})
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _rewrite(self) -> None:
        self.close()
        self._columns = dict.fromkeys(["step", *(name for record in self._records() for name in record)], 0)
        with open(self._path + ".tmp", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            for record in self._records():
                self._row(writer, record)
        os.replace(self._path + ".tmp", self._path)

    def _row(self, writer: Any, record: Mapping[str, Any]) -> None:
        writer.writerow([_cell(record.get(name, "")) for name in self._columns])
        self._last = int(record["step"])

    def _records(self) -> Iterator[Record]:
        with open(self._jsonl, "rb") as file:
            for line in file:
                if (record := parse_line(line)) is not None:
                    yield record


def _cell(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value
