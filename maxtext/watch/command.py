"""`maxtext watch RUN`: a run in a terminal, as it goes on. `maxtext runs DIR`: all runs below a folder, a line each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext.config.runs import no_run
from maxtext.watch.signs import Signs, State, is_run, judge, read_signs

WATCH_BYTES = 1 << 20  # of metrics.jsonl, for the curve: about the last thousand updates
ENDED: tuple[State, ...] = ("finished", "stopped", "failed")
_DEPTH, _LONGEST = 3, 80
_COLUMNS = ("run", "state", "update", "loss", "tokens/s", "last seen", "why")


def watch(argv: Sequence[str]) -> int:
    """Runs `maxtext watch`; returns 0 when the run finished or stopped, 3 when it failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="maxtext watch", description="Follow a run in the terminal until it ends, from the files of its "
        "directory, which another machine may write. Into a file or a pipe: one frame.")
    parser.add_argument("run", metavar="RUN", help="a run directory, <output_dir>/<run_name>")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    options = parser.parse_args(argv)
    if options.every <= 0:
        parser.error(f"--every {options.every:g}: give seconds above 0")
    if not is_run(options.run):
        print(f"{no_run(options.run, 'metrics.jsonl and no events.jsonl')}; give the folder of a run, "
              "<output_dir>/<run_name>; `maxtext runs DIR` lists those below a folder", file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console()
    if options.once or not console.is_terminal:
        state = _frame_of(options.run, console)
    else:
        state = _follow(options.run, options.every, console)
    return 3 if state == "failed" else 0


def _frame_of(folder: str, console: Any) -> State:
    from maxtext.watch.frame import frame

    signs = read_signs(folder, WATCH_BYTES)
    state, why = judge(signs)
    console.print(frame(signs, state, why))
    return state


def _follow(folder: str, every: float, console: Any) -> State:
    from rich.live import Live

    from maxtext.watch.frame import frame

    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            signs = read_signs(folder, WATCH_BYTES)
            state, why = judge(signs)
            live.update(frame(signs, state, why), refresh=True)
            if state in ENDED:
                return state
            try:
                time.sleep(every)
            except KeyboardInterrupt:
                return state


def runs(argv: Sequence[str]) -> int:
    """Runs `maxtext runs`; returns 0, or 2 where there are none."""
    parser = argparse.ArgumentParser(prog="maxtext runs", description="The runs below a folder, and how they do.")
    parser.add_argument("folder", metavar="DIR", nargs="?", default="runs", help="an output_dir (runs)")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    options = parser.parse_args(argv)
    found = [read_signs(folder) for folder in _below(options.folder, _DEPTH)]
    if not found:
        print(f"{no_run(options.folder, 'run')}; give a folder of runs, the output_dir of a config", file=sys.stderr)
        return 2
    rows = [_row(signs) for signs in sorted(found, key=lambda one: one.heard_seconds)]
    if options.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        print("\n".join(_table(rows)))
    return 0


def _below(folder: str, depth: int) -> Iterator[str]:
    """The run directories at and below a folder; none lies inside of another."""
    if is_run(folder):
        yield folder
        return
    if depth:
        try:
            inner = sorted(entry.path for entry in os.scandir(folder)
                           if entry.is_dir() and not entry.name.startswith("."))
        except OSError:
            return
        for path in inner:
            yield from _below(path, depth - 1)


def _row(signs: Signs) -> dict[str, Any]:
    state, why = judge(signs)
    loss, rate = signs.newest("train/CE loss"), signs.tokens_per_second
    return {"run": signs.name, "folder": signs.folder, "state": state, "step": signs.step, "steps": signs.steps,
            "loss": loss if loss is not None and abs(loss) < float("inf") else None,  # JSON has no other numbers
            "tokens_per_second": None if rate is None else round(rate, 1),
            "last_seen_seconds": round(signs.heard_seconds, 1), "why": why}


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    from maxtext.watch.frame import clock

    cells = [_COLUMNS] + [(
        row["run"], row["state"], f"{row['step']:,}" + (f"/{row['steps']:,}" if row["steps"] else ""),
        "-" if row["loss"] is None else f"{row['loss']:.4f}",
        "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
        f"{clock(row['last_seen_seconds'])} ago", textwrap.shorten(row["why"], _LONGEST)) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    right = {2, 3, 4}
    return ["  ".join(f"{cell:>{width}}" if i in right else f"{cell:<{width}}" for i, (cell, width)
                      in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
