"""Experts on the report page: curves of each layer, and the map of loads at the last recorded update."""

import json
import re

import pytest

from maxtext.report.write import write_report
from tests.report.test_report import Page, curves, make_run, record


def routed(step, layers=2):
    blocks = {f"train/block {layer:02d}/{name}": value + layer for layer in range(layers)
              for name, value in (("load imbalance", 1.5 + step / 100), ("router entropy", 2.0))}
    return record(step, **blocks, **{"train/load imbalance": 3.0, "train/router entropy": 2.5})


def page_of(folder, layers, experts=None):
    run = make_run(folder, [routed(step, layers) for step in range(10)])
    if experts is not None:
        (folder / "experts.jsonl").write_text(experts)
    return Page(write_report(run)[0])


def test_curves_of_each_layer_and_a_map_of_the_last_loads(tmp_path):
    lines = [{"step": 1, "block 00": [0.25] * 4, "block 01": [0.25] * 4},
             {"step": 9, "block 00": [0.75, 0.25, 0.0, 0.0], "block 01": [0.25, 0.2502, 0.2498, 0.25]}]
    page = page_of(tmp_path / "run", 2, "".join(json.dumps(line) + "\n" for line in lines))
    assert curves(page, "Expert load")["layer 1"][9] == pytest.approx(2.59)
    assert set(curves(page, "Router entropy")) == {"layer 0", "layer 1"}
    assert "Load of each expert update 9; 4 experts from left to right" in page.words
    cells = re.findall(r'--c0\) (\d+)%,var\(--page\)\)" title="expert (\d): ([\d.]+) of an even share', page.source)
    assert cells[:4] == [("100", "0", "3.00"), ("50", "1", "1.00"), ("0", "2", "0.00"), ("0", "3", "0.00")]
    assert len(cells) == 8


def test_many_layers_are_one_curve(tmp_path):
    assert set(curves(page_of(tmp_path / "run", 7), "Expert load")) == {"all layers"}


def test_a_run_without_experts_and_a_damaged_file(tmp_path):
    plain = Page(write_report(make_run(tmp_path / "plain", [record(step) for step in range(3)]))[0])
    assert "Expert load" not in plain.charts
    assert "Load of each expert" not in plain.words
    assert "experts.jsonl:1: not a metrics line" in page_of(tmp_path / "run", 2, "nonsense\n{}\n").words
