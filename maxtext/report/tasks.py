"""Downstream tasks on the report page: their mean as curves, and each task in a table.

Shown are the metrics that count whole answers, which OLMo-core names `... v2`.
"""

from __future__ import annotations

import html
import re

from maxtext.report.chart import Curve, chart
from maxtext.report.run_files import RunFiles

_NAME = re.compile(r"eval/downstream/(.+) \((BPB|(?:length-normalized )?accuracy) v2\)")


def task_metrics(run: RunFiles) -> dict[str, tuple[str, str]]:
    """Metric name -> (task, kind), in the order of their recording."""
    names = dict.fromkeys(name for record in run.records for name in record)
    return {name: (match[1], match[2]) for name in names if (match := _NAME.fullmatch(name))}


def task_charts(run: RunFiles) -> list[str]:
    """The mean over tasks of bits per byte, and of accuracy; empty charts where nothing was recorded."""
    metrics = task_metrics(run)
    return [_mean(run, [name for name, (_, kind) in metrics.items() if kind == "BPB"], "Downstream bits per byte"),
            _mean(run, [name for name, (_, kind) in metrics.items() if kind != "BPB"], "Downstream accuracy")]


def _mean(run: RunFiles, names: list[str], title: str) -> str:
    """At the steps where all tasks were scored: a mean over fewer would jump."""
    series = [dict(zip(*run.series(name), strict=True)) for name in names]
    steps = sorted(set.intersection(*map(set, series))) if series else []
    values = [sum(values[step] for values in series) / len(series) for step in steps]
    return chart(title, [Curve(f"{len(names)} tasks", steps, values, dots=True)], note="mean over tasks")


def tasks_table(run: RunFiles) -> str:
    """Each task at its first, best and last evaluation; empty when no task was scored."""
    rows = []
    for name, (task, kind) in task_metrics(run).items():
        steps, values = run.series(name)
        if values:
            best = (min if kind == "BPB" else max)(range(len(values)), key=values.__getitem__)
            cells = (task, kind, f"{values[0]:.4f}", f"{values[best]:.4f} at {steps[best]:,}", f"{values[-1]:.4f}")
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{cell}</th>" for cell in ("task", "metric", "first", "best", "last"))
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return f'<section><h2>Downstream tasks</h2><div class="scroll">{table}</div></section>'
