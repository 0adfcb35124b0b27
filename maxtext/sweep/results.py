"""What came of a sweep: a row for each member, read from the run directories; as a table, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.report.curves import smooth, thin, value_range
from maxtext.report.run_files import ReportError, read_run
from maxtext.sweep.grid import Member

TRAINED, HELD_OUT = "train/CE loss", "eval/lm/macro/CE loss"
FILES = ("sweep.csv", "sweep.json", "sweep.png")


@dataclasses.dataclass(frozen=True)
class Row:
    """One member.

    Attributes:
      loss: training loss at the last update, the end of `curve`; None before the first update.
      held_out: mean held-out loss at the last evaluation; None without one.
      parted: what its own run would have done and this one did not; empty: nothing.
      curve: updates, and the training loss at each, smoothed and thinned as in reports.
    """

    name: str
    settings: Mapping[str, str]
    update: int
    loss: float | None
    held_out: float | None
    skipped: int
    parted: str = ""
    curve: tuple[Sequence[float], Sequence[float]] = ((), ())

    @property
    def score(self) -> float:
        """What members are ranked by: held-out loss where there is one."""
        value = self.loss if self.held_out is None else self.held_out
        return math.inf if value is None or math.isnan(value) else value


def read_rows(members: Sequence[Member], parted: Mapping[str, str]) -> list[Row]:
    """The members, the best first. One that has not trained yet stands last."""
    return sorted((_row(member, parted.get(member.name, "")) for member in members), key=lambda row: row.score)


def _row(member: Member, parted: str) -> Row:
    try:
        run = read_run(member.cfg.run_dir)
    except ReportError:
        return Row(member.name, member.settings, 0, None, None, 0, parted)
    (steps, losses), held_out = run.series(TRAINED), run.series(HELD_OUT)[1]
    smoothed = smooth(losses)
    skipped = sum(bool(record.get("optim/step skipped")) for record in run.records)
    return Row(member.name, member.settings, int(run.records[-1]["step"]), smoothed[-1] if smoothed else None,
               held_out[-1] if held_out else None, skipped, parted, thin(steps, smoothed))


def table(rows: Sequence[Row]) -> str:
    """The rows as text, and below them the mean over seeds of each combination that has several."""
    keys = list(rows[0].settings)
    head = [*keys, "update", "loss", "held-out", "skipped"]
    body = [[*row.settings.values(), str(row.update), _number(row.loss), _number(row.held_out),
             str(row.skipped) + " *" * bool(row.parted)] for row in rows]
    text = _columns(head, body)
    if any(row.parted for row in rows):
        text += "\n* alone it would have gone back: " + "; ".join(f"{r.name} at {r.parted}" for r in rows if r.parted)
    means = _over_seeds(rows)
    if means:
        text += "\n\nover seeds\n" + _columns([*[key for key in keys if key != "seed"], "seeds", "mean", "deviation"],
                                              means)
    return text


def write_results(folder: str, rows: Sequence[Row]) -> list[str]:
    """Writes sweep.csv, sweep.json and sweep.png, each at once in whole; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, name) for name in FILES]
    with open(paths[0] + ".tmp", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", *rows[0].settings, "update", "loss", "held_out", "skipped", "parted"])
        writer.writerows([row.name, *row.settings.values(), row.update, row.loss, row.held_out, row.skipped, row.parted]
                         for row in rows)
    with open(paths[1] + ".tmp", "w", encoding="utf-8") as file:
        json.dump({"members": [_plain(row) for row in rows]}, file, indent=1, allow_nan=False)
    draw(rows, paths[2] + ".tmp")
    for path in paths:
        os.replace(path + ".tmp", path)
    return paths


def draw(rows: Sequence[Row], path: str) -> None:
    """Loss curves of all members on the left; on the right the last loss over the swept number with most values."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    swept = _swept_number(rows)
    figure = Figure(figsize=(11 if swept else 7.5, 4.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if swept else 1, squeeze=False)[0]
    shown: list[float] = []
    for i, row in enumerate(rows):
        if row.curve[1]:
            axes[0].plot(*row.curve, color=colormaps["viridis"](i / max(len(rows) - 1, 1)), lw=1.5,
                         label=row.name if len(rows) <= 12 else None)
            shown += row.curve[1]
    if shown:
        axes[0].set_ylim(*value_range(shown))
    _dress(axes[0], "Training loss, the best darkest", "update")
    if shown and len(rows) <= 12:
        axes[0].legend(frameon=False, fontsize=7)
    if swept:
        _draw_swept(axes[1], swept, rows)
    figure.savefig(path, format="png")


def _draw_swept(axis: Any, swept: str, rows: Sequence[Row]) -> None:
    """A line for each combination of the other settings, the mean over seeds; each member is a dot."""
    lines: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in rows:
        if math.isfinite(row.score):
            rest = tuple(f"{k.rpartition('.')[2]} {v}" for k, v in row.settings.items() if k not in (swept, "seed"))
            lines.setdefault(rest, {}).setdefault(float(row.settings[swept]), []).append(row.score)
    for rest, points in sorted(lines.items()):
        xs = sorted(points)
        line = axis.plot(xs, [statistics.fmean(points[x]) for x in xs], lw=1.5, label=", ".join(rest) or None)[0]
        axis.plot([x for x in xs for _ in points[x]], [y for x in xs for y in points[x]], "o", ms=4,
                  color=line.get_color())
    values = sorted({x for points in lines.values() for x in points})
    if values and values[0] > 0 and values[-1] >= 4 * values[0]:
        axis.set_xscale("log")
    held_out = any(row.held_out is not None for row in rows)
    _dress(axis, "Held-out loss at the end" if held_out else "Training loss at the end", swept)
    if any(lines) and len(lines) <= 8:
        axis.legend(frameon=False, fontsize=8)


def _dress(axis: Any, title: str, below: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(below, fontsize=9)
    axis.grid(axis="y", color="#e3e7ed", lw=0.8)
    axis.set_axisbelow(True)


def _swept_number(rows: Sequence[Row]) -> str | None:
    """The swept key with most values, all of them numbers; seeds do not count."""
    counts = {key: len({row.settings[key] for row in rows}) for key in rows[0].settings
              if key != "seed" and all(_is_number(row.settings[key]) for row in rows)}
    best = max(counts, key=lambda key: counts[key], default=None)
    return best if best is not None and counts[best] > 1 else None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _over_seeds(rows: Sequence[Row]) -> list[list[str]]:
    """Settings, seeds, mean score and its deviation, the best first; nothing where each combination has one seed."""
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        found.setdefault(tuple(v for k, v in row.settings.items() if k != "seed"), []).append(row.score)
    if all(len(scores) < 2 for scores in found.values()):
        return []
    ranked = sorted(found.items(), key=lambda item: statistics.fmean(item[1]))
    return [[*settings, str(len(scores)), _number(statistics.fmean(scores)),
             _number(statistics.stdev(scores) if len(scores) > 1 and math.isfinite(sum(scores)) else None)]
            for settings, scores in ranked]


def _columns(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in (head, *body))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _plain(row: Row) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(row).items() if name != "curve"}
