"""Where a run ran, as the attempts in its ledger say: machine, devices, mesh, versions, flags."""

from __future__ import annotations

import html
from typing import Any

from maxtext.report.run_files import Record, RunFiles


def section(run: RunFiles) -> str:
    """A table of the last attempt, with what was different in earlier ones; empty where no attempt says."""
    told = [_flat(event) for event in run.events if event["event"] == "begin" and event.get("environment")]
    if not told:
        return ""
    rows = []
    for name, value in told[-1].items():
        before = dict.fromkeys(one[name] for one in told[:-1] if one.get(name, value) != value)
        note = f" <small>before: {html.escape(', '.join(before))}</small>" if before else ""
        rows.append(f"<tr><td>{html.escape(name)}</td><td class=left>{html.escape(value)}{note}</td></tr>")
    return (f'<section><h2>Environment <small>of the last of {len(told)} '
            f"attempt{'s' if len(told) > 1 else ''}</small></h2>"
            f'<div class="scroll"><table>{"".join(rows)}</table></div></section>')


def _flat(event: Record) -> dict[str, str]:
    found = {"host": str(event.get("host", "")), "devices": str(event.get("devices", ""))}
    for name, value in dict(event["environment"]).items():
        if name == "versions":
            found |= {f"{package}": str(version) for package, version in value.items()}
        else:
            found[name] = "one device" if name == "mesh" and not value else _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items()) or "-"
    return str(value)
