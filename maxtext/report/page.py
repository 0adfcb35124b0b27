"""The report page: one HTML file with everything inside, readable without network, scripts or a wide screen."""

from __future__ import annotations

import datetime
import html
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.report.against import section as against_section
from maxtext.report.chart import Curve, Marks, chart
from maxtext.report.curves import short
from maxtext.report.environment import section as environment_section
from maxtext.report.events import event_marks
from maxtext.report.events import section as events_section
from maxtext.report.experts import expert_charts, load_map
from maxtext.report.goodput import section as goodput_section
from maxtext.report.overlay import Overlay, section
from maxtext.report.profile import section as profile_section
from maxtext.report.run_files import RunFiles
from maxtext.report.tasks import task_charts, tasks_table

_HERE = Path(__file__).parent
TOKENS_OF = "data/tokens/"  # before the name of a source, in metrics.jsonl
_AVERAGES = ("macro", "micro")
_SAMPLES = 5  # of each prompt


def render(run: RunFiles, overlay: Overlay | None = None, others: Sequence[RunFiles] = ()) -> str:
    """Return the whole page of a run, with its curve over a reference's and beside other runs if there are any."""
    sections = [_header(run), _tiles(run), section(overlay, run) if overlay else "", against_section(run, others),
                f'<div class="charts">{"".join(charts(run))}</div>', _held_out(run), tasks_table(run), load_map(run),
                goodput_section(run), events_section(run), profile_section(run.folder), _samples(run),
                environment_section(run), _config(run)]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(run.name)}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<style>\n{(_HERE / 'page.css').read_text()}</style></head>\n<body>\n{chr(10).join(sections)}\n"
            f"<script>\n{(_HERE / 'page.js').read_text()}</script>\n</body></html>\n")


def charts(run: RunFiles) -> list[str]:
    """Return the charts of whatever the run recorded."""
    skipped = [step for step, value in zip(*run.series("optim/step skipped"), strict=True) if value]
    rates = [Curve(f"group {i}", *run.series(f"optim/LR (group {i})")) for i in (0, 1)]
    if rates[0].ys == rates[1].ys:
        rates = [Curve("learning rate", rates[0].xs, rates[0].ys)]
    held_out = [chart(title, [Curve(name, *run.series(f"eval/lm/{name}/{kind}"), dots=True)
                              for name in _domains(run, kind)], note=note)
                for kind, title, note in (("BPB", "Held-out bits per byte", "per domain"),
                                          ("CE loss", "Held-out loss", "per domain, nats per token"))]
    found = [
        chart("Training loss", [Curve("cross-entropy", *run.series("train/CE loss"), smoothed=True)],
              note="nats per token", marks=event_marks(run), wide=True),
        *held_out,
        *task_charts(run),
        *expert_charts(run),
        chart("Learning rate", rates, from_zero=True),
        chart("Gradient norm", [Curve("before clipping", *run.series("optim/total grad norm"), smoothed=True)],
              marks=[Marks("skipped updates", skipped)], log=True),
        chart("Throughput", [Curve("tokens/s", *run.rates(), smoothed=True)], note="all devices",
              from_zero=True),
        chart("Model FLOPs utilisation", [Curve("MFU, %", *run.series("throughput/device/MFU"), smoothed=True)],
              note="of the device's peak", from_zero=True),
        chart("Memory of the host", [Curve("GiB", *run.series("memory/host (GiB)"))], note="process 0", from_zero=True),
        chart("Data shares", _data_shares(run), note="% of the tokens read so far", from_zero=True),
        chart("Waiting for data", [Curve("% of the update", *run.series("throughput/device/data loading (%)"),
                                         smoothed=True)], from_zero=True),
    ]
    return [figure for figure in found if figure]


def _data_shares(run: RunFiles) -> list[Curve]:
    """Each source's part of the tokens, where the run counts them."""
    names = dict.fromkeys(name for record in run.records for name in record if name.startswith(TOKENS_OF))
    curves = []
    for name in names:
        pairs = [(int(record["step"]), 100 * record.get(name, 0) / total) for record in run.records
                 if (total := sum(record.get(one, 0) for one in names))]
        curves.append(Curve(name.removeprefix(TOKENS_OF), [step for step, _ in pairs], [y for _, y in pairs]))
    return curves


def _domains(run: RunFiles, kind: str) -> list[str]:
    """Held-out sets without the averages over them."""
    return [name for name in run.eval_sets(kind) if name not in _AVERAGES]


def _header(run: RunFiles) -> str:
    first, last = (_date(run.records[i].get("time/unix (s)")) for i in (0, -1))
    dates = f"{first} to {last}" if first and last else ""
    planned = _get(run, "train", "steps")
    step = run.records[-1]["step"]
    state = f"update {step:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")
    if isinstance(planned, int) and step >= planned:
        state = f"complete, {planned:,} updates"
    lines = [str(run.config.get("description") or ""), " · ".join(part for part in (state, dates) if part)]
    text = "".join(f"<p{' class=soft' if i else ''}>{html.escape(line)}</p>" for i, line in enumerate(lines) if line)
    return f"<header><h1>{html.escape(run.name)}</h1>{text}</header>"


def _tiles(run: RunFiles) -> str:
    tiles = []
    steps, losses = run.series("train/CE loss")
    if losses:
        best = min(range(len(losses)), key=losses.__getitem__)
        lowest = f"lowest {losses[best]:.3f} at {steps[best]:,}"
        tiles.append(("training loss, last update", f"{losses[-1]:.3f}", lowest))
    domains = _domains(run, "BPB")
    for name in domains if len(domains) <= 3 else run.eval_sets("BPB")[len(domains):]:
        values = run.series(f"eval/lm/{name}/BPB")[1]
        if values:
            tiles.append((f"bits per byte, {name}", f"{values[-1]:.3f}", _change(values)))
    _, tokens = run.series("throughput/total tokens")
    if tokens:
        tiles.append(("training tokens", short(tokens[-1]), _sources(run) or f"{int(tokens[-1]):,}"))
    _, rates = run.rates()
    if rates:
        tiles.append(("tokens/s, median", short(statistics.median(rates)), "all devices"))
    waited, spent = (run.series(name)[1] for name in ("throughput/device/data loading (s)", "time/step (s)"))
    if waited and sum(spent):
        tiles.append(("waited for data", f"{sum(waited) / sum(spent):.2%}", "of the time of updates"))
    timed = ("time/step (s)", "time/compile (s)", "time/checkpoint (s)", "time/samples (s)",
             "throughput/in-loop eval time (s)")
    seconds = sum(sum(run.series(name)[1]) for name in timed)
    if seconds:
        tiles.append(("time at work", _hours(seconds), "updates, evaluations, saves"))
    _, parameters = run.series("model/parameters")
    if parameters:
        tiles.append(("parameters", short(parameters[-1]), f"{int(parameters[-1]):,}"))
    skipped = int(sum(run.series("optim/step skipped")[1]))
    if skipped:
        tiles.append(("updates skipped", f"{skipped:,}", "outliers in loss or gradient norm"))
    cells = (f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
             f"<span>{html.escape(detail)}</span></div>" for label, value, detail in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _sources(run: RunFiles) -> str:
    """The share of each source in the tokens so far; empty when there is but one."""
    newest = next((record for record in reversed(run.records) if "throughput/total tokens" in record), {})
    counts = {name.removeprefix(TOKENS_OF): float(newest[name]) for name in newest if name.startswith(TOKENS_OF)}
    total = sum(counts.values())
    return ", ".join(f"{name} {count / total:.1%}" for name, count in counts.items()) if len(counts) > 1 else ""


def _held_out(run: RunFiles) -> str:
    """A table of every held-out set at its first, best and last evaluation."""
    rows = []
    for name in run.eval_sets("CE loss"):
        steps, losses = run.series(f"eval/lm/{name}/CE loss")
        if not losses:
            continue
        best = min(range(len(losses)), key=losses.__getitem__)
        bits, perplexities = (run.series(f"eval/lm/{name}/{kind}")[1] for kind in ("BPB", "PPL"))
        tokens = run.series(f"eval/lm/{name}/tokens")[1]
        rows.append([name, f"{losses[0]:.3f}", f"{losses[best]:.3f} at {steps[best]:,}", f"{losses[-1]:.3f}",
                     f"{perplexities[-1]:,.2f}" if perplexities else "", f"{bits[0]:.3f}" if bits else "",
                     f"{bits[-1]:.3f}" if bits else "", _change(bits) if bits else "",
                     f"{int(tokens[-1]):,}" if tokens else ""])
    if not rows:
        return ""
    head = ["held-out set", "loss, first", "best", "last", "perplexity", "bits/byte, first", "last", "change", "tokens"]
    body = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    table = f"<table><tr>{_cells(head, 'th')}</tr>{body}</table>"
    return f'<section><h2>Held-out evaluation</h2><div class="scroll">{table}</div></section>'


def _samples(run: RunFiles) -> str:
    """What the model added to each prompt, at a few steps from the first to the last."""
    by_prompt: dict[str, list[tuple[int, str]]] = {}
    for one in run.samples:
        by_prompt.setdefault(str(one.get("prompt")), []).append((one["step"], one["text"]))
    rows = []
    for prompt, found in by_prompt.items():
        shown = sorted({round(i * (len(found) - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)})
        for step, text in (found[i] for i in shown):
            rows.append(f"<tr><td>{step:,}</td><td><b>{html.escape(prompt)}</b>{html.escape(text)}</td></tr>")
    if not rows:
        return ""
    table = f"<table class=samples><tr>{_cells(['update', 'text'], 'th')}</tr>{''.join(rows)}</table>"
    return f'<section><h2>Samples</h2><div class="scroll">{table}</div></section>'


def _config(run: RunFiles) -> str:
    if not run.config_text:
        return "<section><h2>Config</h2><p class=soft>This run has no config.yml.</p></section>"
    lines = []
    for line in run.config_text.splitlines():
        text, mark, origin = line.partition("  # ")
        lines.append(html.escape(text) + (f"<em>{html.escape(mark + origin)}</em>" if mark else ""))
    text = "\n".join(lines)
    return ("<section><details><summary>Config, with the origin of each value</summary>"
            f"<pre>{text}</pre></details></section>")


def _cells(values: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)


def _change(values: Sequence[float]) -> str:
    if len(values) < 2 or not values[0]:
        return "one evaluation"
    return f"{100 * (values[-1] / values[0] - 1):+.1f}% from {values[0]:.3f}"


def _hours(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _date(seconds: float | None) -> str:
    if not seconds:
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _get(run: RunFiles, section: str, key: str) -> Any:
    part = run.config.get(section)
    return part.get(key) if isinstance(part, dict) else None
