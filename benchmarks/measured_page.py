"""Puts what a benchmark has measured between its marks on a page of the docs."""

from __future__ import annotations

from pathlib import Path

RELIABILITY = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


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
