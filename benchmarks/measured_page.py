"""Puts what a benchmark has measured between its marks on a page of the docs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELIABILITY = ROOT / "docs" / "reliability.md"


def marks(name: str, script: str) -> tuple[str, str]:
    """The lines between which the page holds what a script writes."""
    return f"<!-- {name}: written by python benchmarks/{script} -->", f"<!-- {name}: end -->"


def write_page(page: Path, between: tuple[str, str], text: str) -> None:
    """Replaces what stands between the marks. AssertionError when the page has none."""
    begin, end = between
    before, _, rest = page.read_text().partition(begin)
    assert end in rest, f"{page} has no {begin}"
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")
