"""The table of docs/hardware.md, from plans that were really compiled.

`maxtext plan ... --json docs/plans/NAME.json` makes a record; `python -m maxtext.plan.page` writes the table of all of
them between the marks of the page, and the table of published runs between its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxtext.plan import published
from maxtext.plan.topology import GIB

BEGIN, END = "<!-- plans: written by python -m maxtext.plan.page -->", "<!-- plans: end -->"
PUBLISHED = "<!-- published: written by python -m maxtext.plan.page -->", "<!-- published: end -->"
COLUMNS = ("run", "target", "mesh", "remat", "arguments / temporaries / all of a device's memory, GiB",
           "compiled / model FLOPs", "cycles, M (in matmuls)", "kernels", "collectives of a step", "step, s", "MFU",
           "compiled")
LEAST_BYTES = 1 << 24  # collectives that move less are left out


def records(folder: Path) -> list[dict[str, Any]]:
    """All plans of a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(plans: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table, one row a plan."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(plan) for plan in plans)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one plan, in the order of COLUMNS."""
    batch = f"{plan['tokens_per_step']:,} tokens of {plan['sequence_length']:,}"
    given = "".join(f" `{one}`" for one in plan.get("overrides", ()))  # older records have none
    head = (f"{plan['run_name']}, {plan['parameters'] / 1e9:.2f} B, {batch}{given and ';'}{given}",
            f"{plan['topology']} ({plan['devices']})")
    remat, program, memory = plan["remat"], plan["program"], plan["memory"]
    kept = remat["mode"] if remat["mode"] != "names" else " ".join(remat["save"])
    if program is None:
        return (*head, "-", kept, f"refused: needs {memory['needed'] / GIB:.1f} of {memory['capacity'] / GIB:.0f}",
                *("-",) * 7)
    mesh = ", ".join(f"{axis} {size}" for axis, size in program["mesh"].items() if size > 1)
    parts, guess = program["memory"], plan["estimate"]
    sizes = (f"{parts['arguments'] / GIB:.2f} / {parts['temporaries'] / GIB:.1f} / {memory['needed'] / GIB:.1f} of "
             f"{memory['capacity'] / GIB:.0f}{'' if plan['fits'] else ': does not fit'}")
    cycles = "-"
    if program["cycles"]:
        cycles = f"{program['cycles'] / 1e6:,.0f} ({program['matmul_cycles'] / program['cycles']:.0%})"
    named = program.get("kernel_names") or {}  # older records have none
    kernels = ", ".join(f"{count:,} {name}" for name, count in named.items()) or "-"
    moved = "; ".join(
        f"{one['count']:,} {one['kind']} over {one['axes']}, {one['bytes_sent'] / GIB:.2f} GiB"
        f"{', asynchronous' if one['asynchronous'] else ''}"
        for one in program["traffic"] if one["bytes_sent"] >= LEAST_BYTES)
    step, mfu = ("n/a", "n/a") if guess["mfu"] is None else (f"{guess['step_seconds']:.3g}", f"{guess['mfu']:.0f}%")
    ratio = f"{plan['flops']['ratio']:.2f}"
    if program["unknown_loops"]:  # what is computed in them is not known, and so is the step
        step, mfu, ratio = "n/a", "n/a", f"{ratio}, {len(program['unknown_loops'])} loops counted once"
    versions = ", ".join(f"{name} {number}" for name, number in program["versions"].items() if name != "jaxlib")
    versions += "".join(f"; `{flag}`" for flag in program["flags"])
    return (*head, mesh or "one device", kept, sizes, ratio, cycles, kernels,
            moved or "-", step, mfu,
            f"{program['date']}, {program['compile_seconds']:,.0f} s; {versions}")


def write(page: Path, folder: Path) -> None:
    """Puts the table of a folder's plans, and that of published runs, between the marks of a page."""
    text = page.read_text()
    for (begin, end), written in (((BEGIN, END), table(records(folder))), (PUBLISHED, published.table())):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{written}\n\n{end}{rest.split(end)[1]}"
    page.write_text(text)


if __name__ == "__main__":
    docs = Path(__file__).resolve().parents[2] / "docs"
    write(docs / "hardware.md", docs / "plans")
    sys.exit(0)
