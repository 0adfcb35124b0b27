"""A run's curve over a reference's: the gap at each step that both logged, and whether it stays within a tolerance.

A reference is a CSV export with a step column and a value column (Weights & Biases names the value `<run> - <metric>`
and adds columns that end in `__MIN` and `__MAX`), another run's folder, or its metrics.jsonl.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import math
import os
from collections.abc import Sequence

from maxtext.report.chart import Curve, chart
from maxtext.report.curves import smooth
from maxtext.report.run_files import ReportError, RunFiles, read_metrics

STEP_COLUMNS = ("step", "_step", "global_step", "trainer/global_step")
_SPREAD = ("__MIN", "__MAX", "__min", "__max")


@dataclasses.dataclass(frozen=True)
class Overlay:
    """Two curves of one metric.

    Attributes:
      metric: its name in the run.
      name: what the reference is called.
      reference_steps, reference: the reference's whole curve.
      steps, ours, theirs, gaps: where both are known; gap = ours - theirs.
      smoothed: mean gap around each of those steps.
      tolerance: largest gap, up or down, that passes; at every step, or of the smoothed mean when `by_mean`.
    """

    metric: str
    name: str
    reference_steps: list[int]
    reference: list[float]
    steps: list[int]
    ours: list[float]
    theirs: list[float]
    gaps: list[float]
    smoothed: list[float]
    tolerance: float
    by_mean: bool

    @property
    def judged(self) -> list[float]:
        return self.smoothed if self.by_mean else self.gaps

    @property
    def worst(self) -> int:
        """Place of the largest gap; one that is no number counts as the largest."""
        return max(range(len(self.steps)), key=lambda i: math.inf if math.isnan(self.judged[i]) else
                   abs(self.judged[i]))

    @property
    def passed(self) -> bool:
        return abs(self.judged[self.worst]) <= self.tolerance  # False for NaN


def compare(run: RunFiles, reference: str, metric: str, tolerance: float, by_mean: bool = False) -> Overlay:
    """Lays the run's metric over the reference's.

    Raises:
      ReportError: the reference cannot be read, or has no such values; the run has none; no step is in both.
    """
    theirs = read_reference(reference, metric)
    # Not RunFiles.series: a value of ours that is not finite must fail, not go missing.
    ours = {int(record["step"]): float(record[metric]) for record in run.records if metric in record}
    if not ours:
        raise ReportError(f"{run.folder} has no values of {metric!r}; its metrics are {_some(_metrics(run.records))}")
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise ReportError(f"no step is in both: {run.folder} has {_range(ours)}, {reference} has {_range(theirs)}")
    gaps = [ours[step] - theirs[step] for step in steps]
    order = sorted(theirs)
    return Overlay(metric, os.path.basename(os.path.abspath(reference)), order, [theirs[step] for step in order], steps,
                   [ours[step] for step in steps], [theirs[step] for step in steps], gaps, smooth(gaps), tolerance,
                   by_mean)


def read_reference(path: str, metric: str) -> dict[int, float]:
    """Finite values of the metric by step. Raises ReportError when there are none, saying what there is."""
    try:
        if os.path.isdir(path):
            return _from_records(os.path.join(path, "metrics.jsonl"), metric)
        return _from_records(path, metric) if path.endswith(".jsonl") else _from_csv(path, metric)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: is no text file ({error.reason} at byte {error.start})") from None


def _from_records(path: str, metric: str) -> dict[int, float]:
    try:
        records = read_metrics(path)
    except ValueError as error:
        raise ReportError(str(error)) from None
    values = {int(r["step"]): float(r[metric]) for r in records if math.isfinite(float(r.get(metric, math.nan)))}
    if not values:
        raise ReportError(f"{path} has no values of {metric!r}; its metrics are {_some(_metrics(records))}")
    return values


def _from_csv(path: str, metric: str) -> dict[int, float]:
    """A later row of the same step wins, as after a restart; rows without a value are another metric's."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        at_step, at_value = _step_column(path, header), _value_column(path, header, metric)
        values: dict[int, float] = {}
        for row in rows:
            if len(row) <= max(at_step, at_value) or not row[at_value].strip():
                continue
            try:
                step, value = float(row[at_step]), float(row[at_value])
                if step != int(step):
                    raise ValueError
            except (ValueError, OverflowError):
                raise ReportError(f"{path}:{rows.line_num}: step {row[at_step]!r} and value {row[at_value]!r} are not "
                                  "a whole number and a number") from None
            if math.isfinite(value):
                values[int(step)] = value
    if not values:
        raise ReportError(f"{path} has no values in its column {header[at_value]!r}")
    return values


def _step_column(path: str, header: Sequence[str]) -> int:
    found = [i for i, name in enumerate(header) if name.lower() in STEP_COLUMNS]
    if len(found) != 1:
        raise ReportError(f"{path}: {'more than one' if found else 'none'} of its columns {_some(header)} is a step "
                          f"column; call exactly one of them {STEP_COLUMNS[0]}")
    return found[0]


def _value_column(path: str, header: Sequence[str], metric: str) -> int:
    """The column named as the metric; else the one that ends in it; else the only one beside the step."""
    columns = [i for i, name in enumerate(header) if name.lower() not in STEP_COLUMNS and not name.endswith(_SPREAD)]
    exact = [i for i in columns if header[i] == metric]
    ending = [i for i in columns if header[i].endswith((f" {metric}", f"/{metric}"))]
    for found in (exact, ending, columns):
        if len(found) == 1:
            return found[0]
        if found:
            raise ReportError(f"{path}: its columns {_some([header[i] for i in found])} may all be {metric!r}; leave "
                              "one of them, or say which with --metric")
    raise ReportError(f"{path}: its columns {_some(header)} hold no values beside the step")


def lines(overlay: Overlay) -> list[str]:
    """A line for each step that both logged, then the verdict."""
    form = "step {:>9,}  ours {:>11.6f}  reference {:>11.6f}  gap {:>+11.6f}  mean gap {:>+11.6f}"
    rows = [form.format(*row) for row in zip(overlay.steps, overlay.ours, overlay.theirs, overlay.gaps,
                                             overlay.smoothed, strict=True)]
    return [*rows, verdict(overlay)]


def verdict(overlay: Overlay) -> str:
    """One sentence: pass or fail, the largest gap and where, and how much was compared."""
    worst = overlay.worst
    kind = "mean gap" if overlay.by_mean else "gap"
    mean = sum(overlay.gaps) / len(overlay.gaps)
    return (f"{'pass' if overlay.passed else 'FAIL'}: {overlay.metric} against {overlay.name}: largest {kind} "
            f"{overlay.judged[worst]:+.6f} at step {overlay.steps[worst]:,}, tolerance {overlay.tolerance:g}; mean "
            f"{mean:+.6f} over {len(overlay.steps):,} steps ({overlay.steps[0]:,} to {overlay.steps[-1]:,}) of the "
            f"reference's {len(overlay.reference_steps):,}")


def section(overlay: Overlay, run: RunFiles) -> str:
    """The overlay as a part of the report page: both curves, and their gap."""
    edge = [overlay.steps[0], overlay.steps[-1]]
    finite = [(step, gap, mean) for step, gap, mean in zip(overlay.steps, overlay.gaps, overlay.smoothed, strict=True)
              if math.isfinite(gap) and math.isfinite(mean)]
    steps = [step for step, _, _ in finite]
    figures = [
        chart(f"{overlay.metric} over the reference", [
            Curve(run.name, *run.series(overlay.metric)),
            Curve(overlay.name, overlay.reference_steps, overlay.reference)], wide=True),
        chart("Gap", [Curve("ours - reference", steps, [gap for _, gap, _ in finite]),
                      Curve("mean", steps, [mean for _, _, mean in finite]),
                      Curve("tolerance", edge, [overlay.tolerance] * 2),
                      Curve("-tolerance", edge, [-overlay.tolerance] * 2)], note="at the steps that both logged",
              wide=True),
    ]
    return (f"<section><h2>Against a reference</h2><p>{html.escape(verdict(overlay))}</p>"
            f'<div class="charts">{"".join(figures)}</div></section>')


def _metrics(records: Sequence[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record if name != "step"))


def _some(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def _range(values: dict[int, float]) -> str:
    return f"{len(values):,} steps from {min(values):,} to {max(values):,}"
