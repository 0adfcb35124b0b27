"""The table of numerics gates is what was measured, every gate is in it, and all are within their bounds."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from maxtext.compare.command import GROUPS, compare
from maxtext.config.load import load
from maxtext.config.validate import least_devices, mesh_problems

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gates", ROOT / "benchmarks/gates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_every_gate_as_it_was_measured(gates: ModuleType, tmp_path: Path):
    results = json.loads((ROOT / "docs/gates.json").read_text())
    assert list(results) == list(gates.GATES)
    for name, gate in gates.GATES.items():
        assert (results[name]["option"], results[name]["bound"]) == (list(gate.option), gate.bound), name
        assert gates.passes(results[name]), name
    page = Path(shutil.copy(ROOT / "docs/performance.md", tmp_path))
    gates.write(page, results)
    assert page.read_text() == (ROOT / "docs/performance.md").read_text(), "run python benchmarks/gates.py"


def test_every_gate_is_a_config(gates: ModuleType):
    for gate in gates.GATES.values():
        cfg = load(str(ROOT / gate.config), [*gate.both, *gate.option])
        assert mesh_problems(cfg, least_devices(cfg.mesh)) == []


@pytest.mark.parametrize(("bound", "change", "good"), [(0.0, 0, True), (0.0, 1e-7, False), (1e-5, 1e-6, True),
                                                       (1e-5, 1e-4, False)])
def test_a_gate_is_as_strict_as_its_bound(gates: ModuleType, bound: float, change: float, good: bool):
    side = {f"{group} x": np.ones(4, np.float32) for group in GROUPS}
    other = side | {"gradient x": np.float32([1, 1, 1, 1 + change])}
    found = gates.result(gates.Gate(("a.b=c",), bound), compare(side, other))
    assert gates.passes(found) == good
    assert gates.cells("x", found)[-1] == ("byte-identical, 5 arrays" if change == 0 else
                                           "within" if good else "NOT within")
