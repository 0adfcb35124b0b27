"""The pictures of docs/parallelism.md show what the code does."""

from __future__ import annotations

import re

import pytest

from maxtext.parallel.sharding import RULES
from scripts import draw_parallelism
from tests.runs import ROOT


def test_the_page_shows_what_is_drawn_now():
    drawn = draw_parallelism.pictures()
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert kept == drawn, "run python scripts/draw_parallelism.py"
    page = (ROOT / "docs" / "parallelism.md").read_text()
    assert set(re.findall(r"\(pictures/(\S+)\)", page)) == set(drawn)


def test_a_picture_follows_the_rules(monkeypatch: pytest.MonkeyPatch):
    before = draw_parallelism.mesh()
    monkeypatch.setitem(RULES, "stage", ())
    assert draw_parallelism.mesh() != before


@pytest.mark.parametrize(("stages", "rounds", "micro_batches"), [(2, 1, 4), (4, 1, 4), (4, 2, 4), (2, 3, 2)])
def test_the_schedule_is_that_of_the_pipeline(stages: int, rounds: int, micro_batches: int):
    """Each micro-batch passes all runs of layers in their order, one a tick, and no stage has two at a time."""
    table = draw_parallelism.schedule(stages, rounds, micro_batches)
    assert {len(row) for row in table} == {rounds * micro_batches + stages - 1}
    for micro in range(micro_batches):
        ticks = sorted((tick, stage) for stage, row in enumerate(table) for tick, one in enumerate(row) if one == micro)
        assert [stage for _, stage in ticks] == [*range(stages)] * rounds
        assert all(tick == ticks[i - stage][0] + stage for i, (tick, stage) in enumerate(ticks))
