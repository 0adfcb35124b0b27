"""Drawings of plans: cost over the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maxtext.plan.simulate import Scale
from maxtext.plan.topology import PlanError


def draw_scale(rows: Sequence[Scale], title: str, path: Path) -> None:
    """Device-hours a trillion tokens, over their first value, and MFU, against devices; .svg or .png.

    Raises:
      PlanError: for another kind of file.
    """
    if path.suffix not in (".svg", ".png"):
        raise PlanError(f"--plot {path}: write a name that ends in .svg or .png")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "plan", "svg.fonttype": "none"}):
        figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
        devices = [row.devices for row in rows]
        upper.plot(devices, [row.device_hours / rows[0].device_hours for row in rows], marker="o")
        upper.set_ylabel("cost of a token")
        lower.plot(devices, [row.mfu for row in rows], marker="o", label="MFU, %")
        lower.plot(devices, [100 * row.waiting for row in rows], marker="o", label="waiting, %")
        lower.set_ylim(bottom=0)
        lower.set_xscale("log", base=2)
        lower.set_xticks(devices, [f"{count:,}" for count in devices], rotation=45)
        lower.minorticks_off()
        lower.set_xlabel("devices")
        lower.legend()
        upper.set_title(title)
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
