"""What the trials of the campaign came to: a file that grows with them, and the table made of it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.fault_ground import Row, Trial
from benchmarks.measured_page import RELIABILITY

KEPT = RELIABILITY.with_name("faults.json")
MARK = "faults: written by python benchmarks/faults.py"
COLUMNS = ("row", "fault", "trials", "passed", "to the next update, p50 s", "p99 s", "updates done again, at most")


class Results:
    """The trials of one seed, by row and number of the run that they were made in.

    With a path they are kept there after each run, and those that it holds already count as done.
    """

    def __init__(self, seed: int, path: Path | None = None) -> None:
        self.path, here = path, {"seed": seed, "python": platform.python_version(), "jax": version("jax")}
        self.kept: dict[str, Any] = here | {"date": "", "rows": {}}
        if path is not None and path.exists():
            self.kept = json.loads(path.read_text())
            if other := [f"{name} {self.kept[name]}, not {value}" for name, value in here.items()
                         if self.kept[name] != value]:
                raise ValueError(f"{path} holds results of {', '.join(other)}: give another --json FILE to begin anew")

    def missing(self, row: Row, trials: int) -> list[tuple[int, int]]:
        """The runs of a row that are not done, as (number, how many faults it injects)."""
        found = []
        for number, start in enumerate(range(0, trials, row.at_once)):
            faults = min(row.at_once, trials - start)
            if self.runs(row.name).get(str(number), {"trials": 0})["trials"] != faults:
                found.append((number, faults))
        return found

    def runs(self, row: str) -> dict[str, Any]:
        return self.kept["rows"].setdefault(row, {})

    def add(self, row: str, number: int, trial: Trial, seconds: float) -> None:
        self.kept["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.runs(row)[str(number)] = {
            "trials": trial.faults, "passed": max(0, trial.faults - len(trial.failures)),
            "recoveries": [round(one, 3) for one in trial.recoveries], "lost": trial.lost, "seconds": round(seconds, 1),
            "failures": [failure[:1500] for failure in trial.failures]}
        if self.path is not None:
            staged = self.path.with_suffix(".tmp")
            staged.write_text(json.dumps(self.kept, indent=1) + "\n")
            os.replace(staged, self.path)


def summary(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Of the runs of one row."""
    recoveries = sorted(one for run in runs.values() for one in run["recoveries"])
    return {"trials": sum(run["trials"] for run in runs.values()),
            "passed": sum(run["passed"] for run in runs.values()),
            "p50": statistics.median(recoveries) if recoveries else None,
            "p99": recoveries[min(len(recoveries) - 1, int(0.99 * len(recoveries)))] if recoveries else None,
            "lost": max((run["lost"] for run in runs.values()), default=0),
            "seconds": sum(run["seconds"] for run in runs.values()),
            "failures": [f"{number}: {failure}" for number, run in runs.items() for failure in run["failures"]]}


def table(kept: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A sentence on where the results come from, and a Markdown table of them."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    trials = passed = 0
    for row in rows:
        if not kept["rows"].get(row.name):
            continue
        of = summary(kept["rows"][row.name])
        trials, passed = trials + of["trials"], passed + of["passed"]
        lines.append((row.name, row.doc, str(of["trials"]), str(of["passed"]),
                      *("" if of[name] is None else f"{of[name]:.1f}" for name in ("p50", "p99")), str(of["lost"])))
    head = (f"Seed {kept['seed']}, {kept['date']}, Python {kept['python']}, jax {kept['jax']}: {passed:,} of "
            f"{trials:,} trials passed.")
    return head + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
