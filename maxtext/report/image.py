"""loss.png: the training loss and the held-out curves of a run in one picture."""

from __future__ import annotations

from typing import Any

from maxtext.report.curves import smooth, thin, value_range
from maxtext.report.run_files import RunFiles

_COLOURS = ("#2563eb", "#d9680a", "#0f8a5f", "#9333ea", "#0891b2", "#be185d")
_INK, _SOFT, _RULE = "#1b2330", "#667085", "#e3e7ed"


def draw(run: RunFiles, path: str) -> None:
    """Write the picture; the right half (bits per byte, or loss where bytes are unknown) needs an evaluation."""
    # matplotlib takes most of a second to import, which the start of a run should not pay for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind, label = ("BPB", "Held-out bits per byte") if run.eval_sets("BPB") else ("CE loss", "Held-out loss")
    sets = [name for name in run.eval_sets(kind) if name not in ("macro", "micro")]
    figure = Figure(figsize=(11 if sets else 7.5, 4.2), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if sets else 1, squeeze=False)[0]
    figure.suptitle(run.name, color=_INK, fontsize=13, fontweight="bold", x=0.01, ha="left")

    steps, losses = run.series("train/CE loss")
    if losses:
        raw = len(losses) >= 20
        axes[0].plot(*thin(steps, losses), color=_COLOURS[0], lw=0.8 if raw else 2, alpha=0.35 if raw else 1,
                     marker="o" if len(losses) == 1 else None)
        if raw:
            axes[0].plot(*thin(steps, smooth(losses)), color=_COLOURS[0], lw=2)
        axes[0].set_ylim(*value_range(losses))
    _dress(axes[0], "Training loss (nats per token)")
    for i, name in enumerate(sets):
        axes[1].plot(*run.series(f"eval/lm/{name}/{kind}"), color=_COLOURS[i % 6], lw=2, marker="o", ms=4, label=name)
    if sets:
        _dress(axes[1], label)
        axes[1].legend(frameon=False, labelcolor=_INK, fontsize=9)
    figure.savefig(path, format="png")


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, color=_INK, fontsize=11, loc="left")
    axis.set_xlabel("update", color=_SOFT, fontsize=9)
    axis.tick_params(colors=_SOFT, labelsize=9, length=0)
    axis.grid(axis="y", color=_RULE, lw=0.8)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_RULE)
