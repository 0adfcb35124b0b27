"""Tables of measurements are written from records, each of which says where its figures come from."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import checkpoint, elastic, sweep
from benchmarks.measured_page import DOCS, WRITTEN, keep, markdown, records, write
from tests.runs import ROOT

RECORDS = records()
# Tables with figures that nobody measured, by how their first line begins, and what they hold instead.
_CODE, _WORDS = "what the code gives; tests/model/test_page_numbers.py compares", "words, settings and examples"
NOT_MEASURED = {
    "| mode | on the device | on the host |": _CODE,
    "| name | what it is | bytes a token |": _CODE,
    "| sequence | devices | window | block |": _CODE,
    "| update of a model with N weights | bytes |": "the sum of the arrays that are saved",
    "| | sum form |": "formulas",
    "| | bytes a weight and update |": "sizes of files; tests/train/test_gradient_log.py compares",
    "| platform | back end |": _WORDS,
    "| word | what it is here |": _WORDS,
    "| key | default | meaning |": _WORDS,
    "| kind | values | scale | sums |": "the formats of eight bits",
    "| setting | the same bits |": _WORDS,
    "| fault | how it is noticed | what happens |": _WORDS,
    "| config | list | files | tokens used |": "of the reference's lists of files",
    "| | weights | moments, Adam count |": "what passes from stage to stage; tests/end_to_end/test_reproduce_page.py",
    "| the question | our answer |": _WORDS,
    "| it says | why | what to do |": _WORDS,
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_holds_what_its_record_gives(name: str, tmp_path: Path):
    page = RECORDS[name]["page"]
    shutil.copy(DOCS / page, tmp_path)
    write(name, RECORDS[name], tmp_path)
    assert (tmp_path / page).read_text() == (DOCS / page).read_text(), "run python benchmarks/measured_page.py"


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_says_where_its_figures_come_from(record: dict):
    assert record["how"] in ("Measured", "Compiled")
    assert datetime.date.fromisoformat(record["measured"] if "measured" in record else record["noted"])
    by_a_benchmark = {"measured", "machine", "versions", "command"} <= set(record)
    assert "transcribed" in record or by_a_benchmark
    assert not {"transcribed", "raw"} <= set(record), "what a benchmark writes is not transcribed"


def test_every_mark_has_a_record():
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert sorted(re.findall(rf"<!-- (\w+): {WRITTEN} -->", pages)) == sorted(RECORDS)


def tables_by_hand(text: str) -> list[str]:
    """The first lines of all tables of a page that have figures in them and stand between no marks."""
    text = re.sub(r"<!-- (\w+): written by .*?<!-- \1: end -->", "", text, flags=re.S)
    found = []
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, _, *rows = table.splitlines()
        cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
        if any(re.search(r"(?<![\w.])\d", re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", cell)) for cell in cells):
            found.append(head)
    return found


def test_no_table_of_figures_is_written_by_hand():
    by_hand = {head: page.name for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
               if "<!-- written by python -m maxtext.config.page" not in page.read_text()
               for head in tables_by_hand(page.read_text())}
    named = {head: start for head in by_hand for start in NOT_MEASURED if head.startswith(start)}
    assert {head: page for head, page in by_hand.items() if head not in named} == {}
    assert set(NOT_MEASURED) == set(named.values()), "no page has these any more"


def test_the_reader_of_tables():
    table = "| {} | s |\n|---|---|\n| 1 | {} |\n\n".format
    text = (table("a", "2") + table("b", "`x=2`") + table("c", "[2](x2.md)") + table("d", "v5p")
            + "<!-- e: written by x -->\n" + table("e", "5") + "<!-- e: end -->\n" + table("f", "0.1"))
    assert tables_by_hand(text) == ["| a | s |", "| f | s |"]


# ---- benchmarks that write records


def test_what_was_measured_is_kept_and_shown(tmp_path: Path):
    (tmp_path / "measured").mkdir()
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- x: {WRITTEN} -->\nold\n<!-- x: end -->\nafter\n")
    keep("x", "page.md", ("a", "b", "c"), [("d", 1234, 0.5), ("e", None, 1e-6)], machine="a machine", what="a thing",
         command="python x.py", raw={"f": [1, 2]}, formats={"c": ".1e"}, docs=tmp_path)
    kept = json.loads((tmp_path / "measured" / "x.json").read_text())
    today = datetime.date.today().isoformat()
    assert (kept["raw"], kept["measured"]) == ({"f": [1, 2]}, today)
    assert kept["rows"] == [["d", 1234, 0.5], ["e", None, 1e-6]]
    jax = kept["versions"]["jax"]
    assert page.read_text() == "\n".join((
        f"before\n<!-- x: {WRITTEN} -->\n", "| a | b | c |", "| --- | --- | --- |", "| d | 1,234 | 5.0e-01 |",
        "| e |  | 1.0e-06 |\n", f"Measured {today}: a thing; a machine; jax {jax}; `python x.py`.\n",
        "<!-- x: end -->\nafter\n"))


def test_what_is_not_known_is_not_told():
    record = {"how": "Compiled", "noted": "2026-01-02", "versions": {"a": "1", "b": "2"}, "columns": ["x"],
              "rows": [[2.5]]}
    assert markdown(record) == "| x |\n| --- |\n| 2.5 |\n\nCompiled (noted 2026-01-02): a 1, b 2."


def test_the_tables_of_benchmarks():
    of = {"members": 4, "updates": 9, "own_cpu_seconds": 6.0, "sweep_cpu_seconds": 2.0, "speedup_of_cpu": 3.0,
          "own_seconds": 5.0, "sweep_seconds": 2.0, "speedup": 2.5, "own_update_seconds": 0.4,
          "sweep_update_seconds": 0.1, "speedup_of_updates": 4.0}
    assert sweep.table(of) == [("4 members: CPU seconds", 6.0, 2.0, 3.0), ("4 members: wall seconds", 5.0, 2.0, 2.5),
                               ("4 members: seconds of updates 2 to 9", 0.4, 0.1, 4.0)]
    drills = [elastic.Recovery(0.125 * i, 0.5, 1.0, 2.0 * i, i, "disk") for i in (1, 4, 2)]
    assert elastic.table(drills)[0][1:] == (0.25, 0.5)
    assert elastic.table(drills)[-1] == ("updates done again, with a snapshot every 10", 2, 4)
    found = {"bytes": [2e9], **{name: [2.0, 4.0, 5.0] for name in (
        "held", "save", "tidied", "copy", "read", "restore", "snapshot", "sealed")}} | {"save": [4.0, 4.0, 20.0]}
    rows = {row[0]: row[1:] for row in checkpoint.table(found)}
    assert rows["save: written, hashed, committed"] == (4.0, 0.5, "50% of a plain copy's rate")
    for columns, table in ((sweep.COLUMNS, sweep.table(of)), (elastic.COLUMNS, elastic.table(drills)),
                           (checkpoint.COLUMNS, checkpoint.table(found))):
        assert {len(row) for row in table} == {len(columns)}
    assert [row[0] for row in RECORDS["checkpoint"]["rows"]] == list(rows)
    assert [row[0] for row in RECORDS["recoveries"]["rows"]] == list(elastic.ROWS.values())
