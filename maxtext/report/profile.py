"""The profile of a run on the report page, from profile.json (written by train/profile.py)."""

from __future__ import annotations

import html
import json
import os
from typing import Any

PROFILE = "profile.json"
_MOST = 12


def section(folder: str) -> str:
    """Shares and the longest operations; empty when nothing was profiled."""
    path = os.path.join(folder, PROFILE)
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        body = _shares(found) + _operations(found)
        first, last = found["steps"]
        head = f"updates {first:,} to {last:,}; {found['devices']} devices; {found['seconds']:.3g} s"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f'<section><h2>Profile</h2><p class="soft">{PROFILE} cannot be read.</p></section>'
    return (f"<section><h2>Profile <small>{head}</small></h2>{body}<p class=soft>The trace is for XProf: "
            f"{html.escape(str(found.get('trace', '')))}</p></section>")


def _shares(found: dict[str, Any]) -> str:
    """One bar in parts, with their shares below."""
    colours = {"computing": "var(--c0)", "communication": "var(--c1)", "idle": "var(--rule)"}
    parts = "".join(f'<i style="width:{100 * share:.2f}%;background:{colours[name]}"></i>'
                    for name, share in found["shares"].items())
    legend = "".join(f'<span><i style="background:{colours[name]}"></i>{name} <b>{100 * share:.1f}%</b></span>'
                     for name, share in found["shares"].items())
    return f'<div class="bar">{parts}</div><div class="legend">{legend}</div>'


def _operations(found: dict[str, Any]) -> str:
    rows = "".join(f"<tr><td>{html.escape(one['name'])}</td><td>{100 * one['share']:.1f}%</td><td>{one['count']:,}</td>"
                   f"<td>{1e3 * one['seconds']:,.1f} ms</td><td class=left>{html.escape(one['source'])}</td></tr>"
                   for one in found["operations"][:_MOST])
    return ('<div class="scroll"><table><tr><th>operation</th><th>of all operations</th><th>times</th><th>time</th>'
            f"<th class=left>where in the program</th></tr>{rows}</table></div>")
