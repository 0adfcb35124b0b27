"""What a person sees while training: a summary, one greppable line a step, evaluations, notes, and warnings once.

On a terminal a progress bar stays below the lines; into a file or a pipe go plain lines only. Metrics are read under
the names that metrics.jsonl has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from maxtext.config.reason import reason
from maxtext.report.run_files import tokens_per_second

Metrics = Mapping[str, float]

_warned: set[str] = set()
_GIB = 1 << 30


def warn_once(message: str, key: str | None = None) -> None:
    """Print a warning to stderr, unless one with the same key (by default the message) was printed before."""
    key = message if key is None else key
    if key not in _warned:
        _warned.add(key)
        print(f"warning: {message}", file=sys.stderr, flush=True)


def host_memory_gib() -> float:
    """Return the resident memory of this process in GiB (its peak where the system only tells that)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024 / _GIB
    except OSError:
        pass
    import resource  # not on Windows, which has no /proc either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB


def duration(seconds: float) -> str:
    """Format seconds: `8s`, `1m12s`, `3h05m`, `2d04h`; `n/a` when unknown (NaN or infinite)."""
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "n/a"
    total = max(round(seconds), 0)
    for unit, (big, small) in {86400: ("d", "h"), 3600: ("h", "m"), 60: ("m", "s")}.items():
        if total >= unit:
            rest = {"h": 3600, "m": 60, "s": 1}[small]
            return f"{total // unit}{big}{total % unit // rest:02d}{small}"
    return f"{total}s"


def step_line(step: int, total_steps: int, metrics: Metrics, eta_seconds: float | None = None) -> str:
    """Format the metrics of one step, such as `step 120/400 | loss 3.214 | grad_norm 0.81 | ... | eta 1m12s`.

    tok/s counts all devices; what is not among the metrics shows as `n/a`; a skipped step ends in `skipped`.
    """
    def show(name: str, form: str, unit: str = "") -> str:
        return f"{metrics[name]:{form}}{unit}" if name in metrics else "n/a"

    rate = tokens_per_second(step, metrics)
    parts = [
        f"step {step}/{total_steps}",
        f"loss {show('train/CE loss', '.3f')}",
        f"grad_norm {show('optim/total grad norm', '.2f')}",
        f"lr {show('optim/LR (group 0)', '.1e')}",
        f"tok/s {'n/a' if rate is None else format(rate, ',.0f')}",
        f"mfu {show('throughput/device/MFU', '.1f', '%')}",
        f"mem {show('memory/host (GiB)', '.1f', ' GiB')}",
        f"data {show('throughput/device/data loading (%)', '.1f', '%')}",
        f"eta {'n/a' if eta_seconds is None else duration(eta_seconds)}",
    ]
    return " | ".join(parts + ["skipped"] * bool(metrics.get("optim/step skipped")))


def evaluation_line(step: int, scores: Metrics, seconds: float | None = None) -> str:
    """Format held-out scores, such as `eval 100 | code loss 2.101 ppl 8.17 bpb 1.940 | prose ... | 1.3s`.

    Downstream tasks stand as their mean: `26 tasks bpb 1.204 accuracy 0.513`.
    """
    sets: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        if name.startswith("eval/lm/"):
            label, _, kind = name.removeprefix("eval/lm/").rpartition("/")
            sets.setdefault(label, {})[kind] = value
    shown = (("loss", "CE loss", ".3f"), ("ppl", "PPL", ",.2f"), ("bpb", "BPB", ".3f"))
    parts = [f"{label} " + " ".join(f"{short} {values[kind]:{form}}" for short, kind, form in shown if kind in values)
             for label, values in sets.items()]
    tasks = {name.split(" (")[0] for name in scores if name.startswith("eval/downstream/")}
    if tasks:
        means = []
        for short, ending in (("bpb", " (BPB v2)"), ("accuracy", "accuracy v2)")):
            values = [value for name, value in scores.items() if name.endswith(ending)]
            means += [f"{short} {sum(values) / len(values):.3f}"] if values else []
        parts.append(f"{len(tasks)} tasks {' '.join(means)}")
    return " | ".join([f"eval {step}", *parts, *([] if seconds is None else [f"{seconds:.1f}s"])])


def table_text(title: str, rows: Sequence[tuple[str, str]], width: int = 120) -> str:
    """Format labelled rows under a title; values that are too long go on, indented, on the next line."""
    label_width = max((len(label) for label, _ in rows), default=0)
    indent = " " * (label_width + 4)
    lines = [title]
    for label, value in rows:
        lines += textwrap.wrap(value or "-", max(width, 40), initial_indent=f"  {label:<{label_width}}  ",
                               subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


class Console:
    """Prints for one run; on other processes than the primary it prints nothing."""

    def __init__(self, *, primary: bool = True, stream: TextIO | None = None, progress: bool | None = None) -> None:
        """Write to `stream` (stdout); `progress` says whether to draw the bar, by default only on a terminal."""
        self._stream = sys.stdout if stream is None else stream
        self._primary = primary
        self._wants_bar = self._is_terminal() if progress is None else progress
        self._bar: Any = None
        self._first: tuple[int, float] | None = None  # step and time of the first step line, for the time left

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print labelled rows under a title."""
        width = shutil.get_terminal_size().columns if self._wants_bar else 120
        self._print(table_text(title, rows, width))

    def step(self, step: int, total_steps: int, metrics: Metrics) -> None:
        """Print the line of one step and move the bar."""
        if not self._primary:
            return
        eta = self._seconds_left(step, total_steps, metrics)
        self._print(step_line(step, total_steps, metrics, eta))
        if self._wants_bar:
            self._move_bar(step, total_steps, eta)

    def evaluation(self, step: int, scores: Metrics, seconds: float | None = None) -> None:
        """Print held-out scores."""
        self._print(evaluation_line(step, scores, seconds))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Print what the model adds to a prompt, such as `sample 100 | "The list" -> " is empty.\\n"`."""
        shown = (json.dumps(part, ensure_ascii=False) for part in (prompt, text))
        self._print(f"sample {step} | {' -> '.join(shown)}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def warn_once(self, message: str, key: str | None = None) -> None:
        """Print a warning to stderr, once a process."""
        if self._primary:
            warn_once(message, key)

    def close(self) -> None:
        """Take the bar away; calling it again does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _is_terminal(self) -> bool:
        return self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def _print(self, text: str) -> None:
        if not self._primary:
            return
        try:
            if self._bar is None:
                print(text, file=self._stream, flush=True)
            else:
                self._bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        except OSError as error:  # a closed pipe, as of `| head`, is no reason to stop training
            warn_once(f"the console cannot be written: {reason(error)}", key="console")

    def _seconds_left(self, step: int, total_steps: int, metrics: Metrics) -> float | None:
        """By the wall clock since the first line, so that evaluations and saves count."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            each = metrics.get("time/step (s)")
        else:
            each = (now - self._first[1]) / (step - self._first[0])
        return None if each is None else each * (total_steps - step)

    def _move_bar(self, step: int, total_steps: int, eta_seconds: float | None) -> None:
        if self._bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

            # Redrawn with each line only: a refresh thread would take CPU time from the steps.
            self._bar = Progress(BarColumn(bar_width=None), TaskProgressColumn(), MofNCompleteColumn(),
                                 TextColumn("eta {task.fields[eta]}"), transient=True, expand=True, auto_refresh=False,
                                 console=RichConsole(file=self._stream, force_terminal=True))
            self._bar.add_task("", total=total_steps, eta="n/a")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, total=total_steps, refresh=True,
                         eta="n/a" if eta_seconds is None else duration(eta_seconds))
