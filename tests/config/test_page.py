"""docs/configs.md is the schema of now, and what it says of a key is what loading does with it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from maxtext.config.field import field
from maxtext.config.load import ConfigError, load
from maxtext.config.page import _row, page
from maxtext.config.schema import Config
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "configs.md").read_text()
ROWS = {key: cells for key, *cells in re.findall(r"(?m)^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.*) \|$", PAGE)}


def test_the_page_is_written_from_the_schema():
    assert page() == PAGE, "run python -m maxtext.config.page"


def test_every_key_of_a_resolved_config_has_a_row_and_no_other():
    def keys(node, prefix=""):
        for one in dataclasses.fields(node):
            value = getattr(node, one.name)
            yield prefix + one.name
            if dataclasses.is_dataclass(value):
                yield from keys(value, f"{prefix}{one.name}.")

    sections = {one.name for one in dataclasses.fields(Config)} - {"description", "run_name", "output_dir", "seed"}
    named = {key for key in ROWS if key.startswith(("data.sources.NAME.", "eval.sets.NAME."))}
    assert set(ROWS) - named == set(keys(load("quickstart"))) - sections
    assert len(named) > 8


def test_loading_refuses_what_is_beyond_a_bound_of_the_page():
    tried = 0
    for key, (kind, default, _) in ROWS.items():
        if ".NAME." in key or default in ("", "required"):
            continue
        for bound, beyond in (("at least", -1), ("at most", 1)):
            if found := re.search(rf"{bound} (-?[\d.]+)", kind):
                number = float(found[1]) + beyond
                text = f"{number:.0f}" if number.is_integer() else str(number)
                value = {"[": f"[{text}, {text}]", "l": f"[{text}]"}.get(kind[0], text)  # a pair, a list of any length
                with pytest.raises(ConfigError, match=rf"{re.escape(key)}.*out of range; it must be {bound}"):
                    load("quickstart", [f"{key}={value}"])
                tried += 1
    assert tried > 60


@pytest.mark.parametrize(("kind", "made", "cells"), [
    (int | None, field("Says.", None, also=("x",), minimum=1),
     ("integer, at least 1, or null", "`null`", "Says. Elsewhere: `x`.")),
    (tuple[float, float], field("Says.", (0.5, 1e-9), above=0),
     ("[number, number], above 0", "`[0.5, 1e-09]`", "Says.")),
    (dict[str, float], field("Says.", {}), ("names to: number", "`{}`", "Says.")),
    (str, field("A | b."), ("text", "required", "A | b.")),
])
def test_a_row(kind, made, cells):
    made.name = "n"
    assert _row("a.n", made, kind) == ("`a.n`", *cells)
