"""One chart as HTML: an SVG that stretches to any width, with labels in HTML so that they keep their size on a phone.

Colours are CSS variables of the page, so light and dark need no second drawing. Coordinates inside the SVG are 0..1000
in both directions; strokes do not scale with it.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Callable, Sequence

from maxtext.report.curves import linear_ticks, log_ticks, short, smooth, thin, tick_labels, value_range

_SIZE = 1000.0


@dataclasses.dataclass(frozen=True)
class Curve:
    """A named line; `smoothed` draws its moving average and the values themselves faintly behind it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    smoothed: bool = False
    dots: bool = False


@dataclasses.dataclass(frozen=True)
class Marks:
    """Steps that get a tick below the curves; those outside of the curves' range are left out."""

    name: str
    xs: Sequence[float]
    colour: str = "var(--bad)"


def chart(title: str, curves: Sequence[Curve], *, note: str = "", marks: Sequence[Marks] = (), log: bool = False,
          from_zero: bool = False, wide: bool = False) -> str:
    """Draw `curves` over the same steps, with `marks` below. Empty if no curve has points."""
    curves = [curve for curve in curves if curve.xs]
    if not curves:
        return ""
    values = [y for curve in curves for y in curve.ys]
    log = log and min(values) > 0 and max(values) > 20 * sorted(values)[len(values) // 2]
    low, high = (min(values) / 1.2, max(values) * 1.2) if log else value_range(values, from_zero)
    bounds = [y for curve in curves if len(curve.ys) == 2 for y in curve.ys]  # such as a tolerance: no outliers
    low, high = min([low, *bounds]), max([high, *bounds])
    x_low = min(min(curve.xs) for curve in curves)
    x_high = max(max(curve.xs) for curve in curves)
    if x_high == x_low:
        x_low, x_high = x_low - 1, x_high + 1

    def to_x(x: float) -> float:
        return (x - x_low) / (x_high - x_low) * _SIZE

    def to_y(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if log else (y - low) / (high - low)
        return (1 - min(share, 1.0)) * _SIZE  # outliers that the range leaves out touch the upper edge

    ticks_y = log_ticks(low, high) if log else linear_ticks(low, high)
    ticks_x = [x for x in linear_ticks(x_low, x_high) if x == int(x)]
    drawn, legend, data = [], [], []
    for index, curve in enumerate(curves):
        colour = f"var(--c{index % 6})"
        if curve.smoothed and len(curve.xs) >= 20:
            drawn.append(_line(*thin(curve.xs, curve.ys), to_x, to_y, colour, "raw"))
            ys = [math.exp(y) for y in smooth([math.log(y) for y in curve.ys])] if log else smooth(curve.ys)
            xs, ys = thin(curve.xs, ys)
        else:
            xs, ys = thin(curve.xs, curve.ys)
        drawn.append(_line(xs, ys, to_x, to_y, colour, "line"))
        if curve.dots or len(xs) == 1:
            drawn.append(_dots(xs, ys, to_x, to_y, colour))
        legend.append(f'<span><i style="background:{colour}"></i>{html.escape(curve.name)} '
                      f"<b>{short(curve.ys[-1])}</b></span>")  # as the console, the tiles and the tables say it
        data.append({"name": curve.name, "x": xs, "y": [float(f"{y:.5g}") for y in ys]})
    for mark in marks:
        inside = [x for x in mark.xs if x_low <= x <= x_high]
        if inside:
            ticks = "".join(f"M{to_x(x):.1f} 1000v-45" for x in inside)
            drawn.append(f'<path class="mark" style="stroke:{mark.colour}" d="{ticks}"/>')
            legend.append(f'<span><i class="mark" style="background:{mark.colour}"></i>{html.escape(mark.name)} '
                          f"<b>{len(inside)}</b></span>")
    grid = "".join(f"M0 {to_y(y):.1f}h1000" for y in ticks_y)
    labels = "".join(f'<span class="y" style="top:{to_y(y) / 10:.2f}%">{text}</span>'
                     for y, text in zip(ticks_y, tick_labels(ticks_y), strict=True))
    labels += "".join(f'<span class="x" style="left:{to_x(x) / 10:.2f}%">{text}</span>'
                      for x, text in zip(ticks_x, tick_labels(ticks_x), strict=True))
    payload = json.dumps({"x": [x_low, x_high], "curves": data}).replace("<", "\\u003c")
    suffix = f" <small>{html.escape(note)}</small>" if note else ""
    return (f'<figure{" class=wide" if wide else ""}><figcaption><h2>{html.escape(title)}{suffix}</h2>'
            f'<div class="legend">{"".join(legend)}</div></figcaption><div class="plot">'
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">'
            f'<path class="grid" d="{grid}"/>{"".join(drawn)}</svg>{labels}<div class="cursor"></div></div>'
            f'<script type="application/json">{payload}</script></figure>')


def _line(xs: Sequence[float], ys: Sequence[float], to_x: Callable[[float], float], to_y: Callable[[float], float],
          colour: str, kind: str) -> str:
    points = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="{kind}" style="stroke:{colour}" points="{points}"/>'


def _dots(xs: Sequence[float], ys: Sequence[float], to_x: Callable[[float], float], to_y: Callable[[float], float],
          colour: str) -> str:
    """Round caps of lines without length: circles would be stretched with the SVG."""
    path = "".join(f"M{to_x(x):.1f} {to_y(y):.1f}h0" for x, y in zip(xs, ys, strict=True))
    return f'<path class="dots" style="stroke:{colour}" d="{path}"/>'
