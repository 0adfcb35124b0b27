"""One picture of a run for a terminal: its state, how far it is, its newest numbers, and what happened to it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maxtext.config.wording import counted
from maxtext.report.curves import short, smooth
from maxtext.watch.signs import Signs, State

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS: dict[State, str] = {"running": "green", "finished": "blue", "stalled": "bold yellow", "stopped": "cyan",
                             "failed": "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
_SPENT = {"compile": "compiling", "restore": "restoring", "checkpoint": "saving", "eval": "evaluating"}
_MOST_EVENTS, _MOST_SETS, _CURVE = 6, 6, 48


def frame(signs: Signs, state: State, why: str) -> RenderableType:
    """The picture, for rich."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((state, COLOURS[state]), f"  {why}")
    parts: list[Any] = [head]
    if signs.steps:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=1)
        row.add_column(justify="right")
        row.add_row(ProgressBar(signs.steps, min(signs.step, signs.steps), pulse=False), _progress(signs, state))
        parts.append(row)
    grid = Table.grid(padding=(0, 3))
    for label, value in _numbers(signs):
        grid.add_row(Text(label, style="dim"), Text(value))
    parts.append(grid)
    parts += [Text(line, style="dim") for line in _events(signs)]
    return Panel(Group(*parts), title=Text(signs.name, style="bold"), subtitle=Text(signs.folder, style="dim"),
                 title_align="left", subtitle_align="left")


def sparkline(values: Sequence[float], width: int = _CURVE) -> str:
    """The values as a line of bars, each of the mean of its stretch."""
    if not values:
        return ""
    count = min(width, len(values))
    stretches = [values[i * len(values) // count:(i + 1) * len(values) // count] for i in range(count)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(means), max(means)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0]
                   for value in means)


def clock(seconds: float) -> str:
    """Seconds as `12 s`, `3 min`, `5 h 02 min` or `2 d 04 h`."""
    minutes = round(seconds / 60)
    if seconds < 99:
        return f"{max(seconds, 0):.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else \
        f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def _progress(signs: Signs, state: State) -> str:
    text = f"update {signs.step:,} of {signs.steps:,}"
    if state == "running" and signs.update_seconds and signs.steps:
        text += f", {clock(signs.update_seconds * (signs.steps - signs.step))} left"
    return text


def _numbers(signs: Signs) -> list[tuple[str, str]]:
    rows = []
    losses = [float(one["train/CE loss"]) for one in signs.records if _finite(one.get("train/CE loss"))]
    if losses:
        rows.append(("loss", f"{losses[-1]:.4f}  mean {smooth(losses)[-1]:.4f}  {sparkline(losses)}"))
    for label, metric, form, unit in (
            ("grad norm", "optim/total grad norm", ".3f", ""), ("learning rate", "optim/LR (group 0)", ".3e", ""),
            ("MFU", "throughput/device/MFU", ".1f", " %"), ("host memory", "memory/host (GiB)", ".1f", " GiB"),
            ("waiting for data", "throughput/device/data loading (%)", ".1f", " %")):
        value = signs.newest(metric)
        if value is not None:
            rows.append((label, f"{value:{form}}{unit}"))
    rate, tokens = signs.tokens_per_second, signs.newest("throughput/total tokens")
    if rate is not None and tokens is not None:
        rows.append(("tokens", f"{short(tokens)}, {rate:,.0f} a second, {signs.update_seconds:.2f} s an update"))
    skipped = [event["step"] for event in signs.events if event["event"] == "skip" and "step" in event]
    if skipped:
        rows.append(("skipped updates", f"{len(skipped)}, the last one {skipped[-1]:,}"))
    sets = dict.fromkeys(name for one in signs.records for name in one
                         if name.startswith("eval/lm/") and name.endswith("/CE loss"))
    for name in list(sets)[:_MOST_SETS]:
        rows.append((f"held out, {name.split('/')[2]}", f"{signs.newest(name):.4f}"))
    beat = signs.beat or {}
    if beat.get("saved") is not None:
        rows.append(("newest checkpoint", f"update {beat['saved']:,}"))
    spent = [f"{word} {clock(seconds)}" for event, word in _SPENT.items()
             if (seconds := sum(float(one.get("seconds", 0)) for one in signs.events if one["event"] == event)) >= 1]
    if spent:
        rows.append(("beside updates", ", ".join(spent)))
    if signs.heard_seconds < float("inf"):
        rows.append(("last seen", f"{clock(signs.heard_seconds)} ago"))
    return rows


def _events(signs: Signs) -> list[str]:
    """The newest events that a person wants to know of."""
    told = []
    for event in signs.events:
        kind, at = event["event"], datetime.datetime.fromtimestamp(event["time"], datetime.UTC)
        words = {
            "begin": f"an attempt begins on {counted(event.get('devices', '?'), 'device')} of {event.get('host', '?')}",
            "lost": f"{event.get('updates', '?')} updates after {event.get('step', '?')} are done again",
            "back": str(event.get("why")), "failure": f"failure: {event.get('why')}",
            "stop": f"end: {event.get('why')}", "corruption": f"bits differ: {event.get('why')}",
        }.get(kind)
        if words is not None:
            told.append(f"{at:%m-%d %H:%M:%S} UTC  {words}")
    return told[-_MOST_EVENTS:]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")
