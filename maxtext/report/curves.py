"""Arithmetic on curves before they are drawn: smoothing, thinning, value ranges and round tick values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Points = tuple[list[float], list[float]]  # x and y, of equal length


def smooth(ys: Sequence[float]) -> list[float]:
    """Mean weighted by 2^(-distance / (n/150)) to both sides, so that the curve does not lag behind its points."""
    keep = 0.5 ** (1 / max(len(ys) / 150, 1))

    def one_sided(values: Sequence[float]) -> list[tuple[float, float]]:
        sums, total, weight = [], 0.0, 0.0
        for value in values:
            total, weight = keep * total + value, keep * weight + 1
            sums.append((total, weight))
        return sums

    past, future = one_sided(ys), one_sided(ys[::-1])[::-1]
    return [(a + b - y) / (v + w - 1) for y, (a, v), (b, w) in zip(ys, past, future, strict=True)]


def thin(xs: Sequence[float], ys: Sequence[float], most: int = 1200) -> Points:
    """At most about `most` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(xs) <= most:
        return list(xs), list(ys)
    buckets = most // 2
    kept = {0, len(xs) - 1}
    for i in range(buckets):
        stretch = range(i * len(xs) // buckets, (i + 1) * len(xs) // buckets)
        kept |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def value_range(ys: Sequence[float], from_zero: bool = False) -> tuple[float, float]:
    """Lowest and highest value to show; a few far outliers above are cut off rather than flatten all the rest."""
    ordered = sorted(ys)
    low, high = ordered[0], ordered[-1]
    first, last = ordered[len(ordered) // 100], ordered[len(ordered) - 1 - len(ordered) // 100]
    if len(ordered) >= 100 and high > last + 4 * (last - first) > last:
        high = last + (last - first)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= 1e-4 * abs(high):  # a constant, but for rounding
        margin = abs(high) * 0.1 or 1.0
        return (low if from_zero else low - margin), high + margin
    margin = (high - low) * 0.05
    return (low if from_zero else low - margin), high + margin


def linear_ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999), default=10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2 and 5 times them when there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0 ** p for p in powers for f in factors if low <= f * 10.0 ** p <= high]
        if len(ticks) >= 3:
            break
    return ticks


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """`short` of each; where two of them would read the same, all with the digits that tell them apart."""
    texts = [short(tick) for tick in ticks]
    if len(set(texts)) == len(texts):
        return texts
    step = min(after - before for before, after in itertools.pairwise(ticks))
    return [f"{tick:,.{max(0, -math.floor(math.log10(step * 1.001)))}f}" for tick in ticks]


def short(value: float) -> str:
    """A number for an axis or a legend: `0.81`, `2.9e-5`, `5,120`, `1.2M`."""
    size = abs(value)
    if value == 0:
        return "0"
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"
