"""Other runs laid over a run: `maxtext report RUN --compare RUN2 ...`."""

from __future__ import annotations

import dataclasses
import html
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext.report.chart import Curve, chart
from maxtext.report.curves import short, smooth
from maxtext.report.run_files import RunFiles

LOSS = "train/CE loss"
_MOST_KEYS = 30
_TELLS_NOTHING = ("description", "output_dir", "run_name", "log.", "profile.")  # settings that change no number


def section(run: RunFiles, others: Sequence[RunFiles]) -> str:
    """Curves of all runs, the gaps to the first, their last numbers, and the settings in which they differ."""
    if not others:
        return ""
    named = _named([run, *others])
    rows = "".join(_row(one, run) for one in named)
    head = "".join(f"<th>{name}</th>" for name in (
        "run", "update", "loss, last", f"mean gap to {html.escape(run.name)}", "bits/byte", "tokens", "tokens/s"))
    return (f'<section><h2>Beside other runs</h2><div class="charts">{"".join(_charts(named))}</div>'
            f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div></section>{_settings(named)}')


def _charts(runs: Sequence[RunFiles]) -> Iterator[str]:
    yield chart("Training loss of all", [Curve(one.name, *one.series(LOSS), smoothed=True) for one in runs],
                note="nats per token", wide=True)
    yield chart("Gap", [Curve(one.name, steps, gaps) for one in runs[1:]
                        for steps, gaps in [smoothed_gap(runs[0], one)] if steps],
                note=f"smoothed; of each run to {runs[0].name}, at the updates of both", wide=True)
    kind = "BPB" if all(one.eval_sets("BPB") for one in runs) else "CE loss"
    shared = [name for name in runs[0].eval_sets(kind) if all(name in one.eval_sets(kind) for one in runs[1:])]
    for name in [one for one in shared if one not in ("macro", "micro")][:6]:
        yield chart(f"Held out: {name}", [Curve(one.name, *one.series(f"eval/lm/{name}/{kind}"), dots=True)
                                          for one in runs], note="bits per byte" if kind == "BPB" else "nats per token")


def smoothed_gap(run: RunFiles, other: RunFiles, metric: str = LOSS) -> tuple[list[int], list[float]]:
    """Updates that both have, and the mean around each of them of the other's value minus the run's."""
    ours, theirs = (dict(zip(*one.series(metric), strict=True)) for one in (run, other))
    steps = sorted(ours.keys() & theirs.keys())
    return steps, smooth([theirs[step] - ours[step] for step in steps]) if steps else []


def _row(one: RunFiles, run: RunFiles) -> str:
    steps, losses = one.series(LOSS)
    gaps = smoothed_gap(run, one)[1]
    bits = [one.series(f"eval/lm/{name}/BPB")[1] for name in one.eval_sets("BPB") if name == "micro"] or \
           [one.series(f"eval/lm/{name}/BPB")[1] for name in one.eval_sets("BPB")[:1]]
    tokens = one.series("throughput/total tokens")[1]
    rates = one.rates()[1]
    cells = (one.name, f"{steps[-1]:,}" if steps else "-", f"{losses[-1]:.4f}" if losses else "-",
             f"{gaps[-1]:+.4f}" if gaps and one is not run else "-", f"{bits[0][-1]:.4f}" if bits and bits[0] else "-",
             short(tokens[-1]) if tokens else "-", short(statistics.median(rates)) if rates else "-")
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _settings(runs: Sequence[RunFiles]) -> str:
    """The settings in which the configs differ."""
    trees = [dict(_flat(one.config)) for one in runs]
    keys = [key for key in dict.fromkeys(key for tree in trees for key in tree)
            if not key.startswith(_TELLS_NOTHING) and len({repr(tree.get(key)) for tree in trees}) > 1]
    if not keys:
        return "<section><h2>Settings that differ</h2><p class=soft>None that changes a number.</p></section>"
    head = "<th>key</th>" + "".join(f"<th>{html.escape(one.name)}</th>" for one in runs)
    rows = "".join(f"<tr><td>{html.escape(key)}</td>" + "".join(
        f"<td>{html.escape(str(tree.get(key, '-')))}</td>" for tree in trees) + "</tr>" for key in keys[:_MOST_KEYS])
    more = f"<p class=soft>and {len(keys) - _MOST_KEYS} more</p>" if len(keys) > _MOST_KEYS else ""
    return (f'<section><h2>Settings that differ</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
            f"{more}</section>")


def _named(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """The runs under names that tell them apart: their folder where two are called the same."""
    names = [one.name for one in runs]
    return [one if names.count(one.name) == 1 else dataclasses.replace(one, config={
        **one.config, "run_name": f"{one.name} ({os.path.normpath(one.folder)})"}) for one in runs]


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
