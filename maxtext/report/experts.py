"""Experts on the report page: how even their loads are over time, and a map of each expert's share at the end."""

from __future__ import annotations

import html
import os
import re

from maxtext.report.chart import Curve, chart
from maxtext.report.run_files import RunFiles, read_metrics

_IMBALANCE = re.compile(r"train/block (\d+)/load imbalance")
_MOST_CURVES = 6  # as many as there are colours


def expert_charts(run: RunFiles) -> list[str]:
    """Largest load over the mean one, and the routers' entropy; empty charts where there are no experts."""
    blocks = sorted(match[1] for name in run.records[-1] if (match := _IMBALANCE.fullmatch(name)))
    names = [("all layers", "")] if len(blocks) > _MOST_CURVES else [(f"layer {int(b)}", f"block {b}/") for b in blocks]
    return [
        chart("Expert load", [Curve(name, *run.series(f"train/{block}load imbalance"), smoothed=True)
                              for name, block in names], note="largest over mean; 1 is even"),
        chart("Router entropy", [Curve(name, *run.series(f"train/{block}router entropy"), smoothed=True)
                                 for name, block in names], note="nats; of the scores of one token"),
    ] if blocks else []


def load_map(run: RunFiles) -> str:
    """A table of each layer's experts, the darker the busier, at the last recorded update; empty without experts."""
    path = os.path.join(run.folder, "experts.jsonl")
    try:
        records = read_metrics(path) if os.path.isfile(path) else []
    except ValueError as error:
        return f'<section><h2>Load of each expert</h2><p class="soft">{html.escape(str(error))}</p></section>'
    if not records:
        return ""
    last = records[-1]
    blocks = {name: shares for name, shares in last.items() if name.startswith("block ")}
    rows = "".join(f"<tr><td>layer {int(name.split()[1])}</td>{''.join(map(_cell, range(len(shares)), _even(shares)))}"
                   "</tr>" for name, shares in blocks.items())
    experts = max(map(len, blocks.values()))
    return (f'<section><h2>Load of each expert <small>update {last["step"]:,}; {experts} experts from left to right; a '
            'full cell has twice an even share or more</small></h2><div class="scroll"><table class="loads">'
            f"{rows}</table></div></section>")


def _even(shares: list[float]) -> list[float]:
    """Loads in units of an even share."""
    return [share * len(shares) for share in shares]


def _cell(expert: int, load: float) -> str:
    ink = round(100 * min(load / 2, 1))
    return (f'<td style="background:color-mix(in srgb,var(--c0) {ink}%,var(--page))" '
            f'title="expert {expert}: {load:.2f} of an even share"></td>')
