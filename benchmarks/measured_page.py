"""Tables of measurements on the pages of the docs, each written from what was recorded of it.

    python benchmarks/measured_page.py

writes the table of each record, docs/measured/NAME.json, between its marks `<!-- NAME: written by ... -->` and
`<!-- NAME: end -->` on its page. A record holds

  page          the file in docs/
  how           "Measured", or "Compiled" where only a compiler ran
  measured      the day (YYYY-MM-DD); or, where that is not known, `noted`: since when the figures stand on the page
  transcribed   where figures came from that no benchmark wrote; else absent
  what, machine, versions, command   of what the figures are, what ran it, in which versions, by which words; each may
                be absent
  columns, rows                the table: a number, a text or null (an empty cell)
  formats       of a column's numbers with a fraction, as of Python's `format`: `{"share": ".0%"}`; may be absent
  raw           what the rows were made of, as a benchmark measured it; may be absent

Benchmarks make records with `keep`. Records of other forms (docs/gates.json, peers.json, faults.json) are written by
their own benchmarks, through `write_page` as well.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
RELIABILITY = DOCS / "reliability.md"
WRITTEN = "written by python benchmarks/measured_page.py"
Cell = str | int | float | None


def write_page(page: Path, mark: str, text: str) -> None:
    """Puts text between `<!-- MARK -->` and `<!-- NAME: end -->`, where NAME is the mark up to its colon.

    Raises:
      ValueError: the page does not have each of the two marks once.
    """
    begin, end = f"<!-- {mark} -->\n", f"<!-- {mark.partition(':')[0]}: end -->"
    whole = page.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1:
        raise ValueError(f"{page}: {begin.strip()} and {end} must each stand there once")
    before, rest = whole.split(begin)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}")


def records(docs: Path = DOCS) -> dict[str, dict[str, Any]]:
    """All records, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((docs / "measured").glob("*.json"))}


def markdown(record: Mapping[str, Any]) -> str:
    """The table of a record, and a line on where its figures come from."""
    return f"{shown(record['columns'], record['rows'], record.get('formats'))}\n\n{_origin(record)}"


def shown(columns: Sequence[str], rows: Sequence[Sequence[Cell]], formats: Mapping[str, str] | None = None) -> str:
    """A Markdown table; `formats` as in a record."""
    kinds = [(formats or {}).get(column, ",") for column in columns]
    cells = [[_cell(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells))


def _cell(value: Cell, kind: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:{kind if isinstance(value, float) else ','}}"


def _origin(record: Mapping[str, Any]) -> str:
    """`Measured 2026-12-01: 2 CPU cores, jax 0.10.2, ...`: what of a record's facts is known."""
    day = record.get("measured") or f"(noted {record['noted']})"
    facts = [record.get("what"), record.get("machine"),
             ", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items()),
             f"`{record['command']}`" if "command" in record else None]
    return f"{record['how']} {day}: {'; '.join(filter(None, facts))}."


def write(name: str, record: Mapping[str, Any], docs: Path = DOCS) -> None:
    """Puts the table of a record between its marks."""
    write_page(docs / record["page"], f"{name}: {WRITTEN}", markdown(record))


def machine() -> str:
    """The cores of this machine, and how busy they were in the last minute: to be asked before a measurement."""
    return f"{os.cpu_count()} cores of {processor()}, load average {os.getloadavg()[0]:.1f} before"


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def keep(name: str, page: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, what: str, machine: str,
         command: str, raw: Any = None, formats: Mapping[str, str] | None = None, docs: Path = DOCS) -> None:
    """Records what was measured just now, in place of what was there under the name, and writes its table."""
    record = {"page": page, "how": "Measured", "measured": datetime.date.today().isoformat(), "what": what,
              "machine": machine, "versions": {"jax": version("jax")}, "command": command, "columns": columns,
              "formats": formats, "rows": rows, "raw": raw}
    record = {name: value for name, value in record.items() if value is not None}
    (docs / "measured" / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    write(name, record, docs)


if __name__ == "__main__":
    for one, found in records().items():
        write(one, found)
    sys.exit(0)
