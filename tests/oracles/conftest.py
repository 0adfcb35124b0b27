"""Gives each test of this folder every training case of the reference."""

import json
from pathlib import Path

import pytest

LONG = 60  # steps from which on a case counts as slow
# Of the short ones, those that are replayed with every version of JAX: documents and YaRN, two data ranks, experts.
EVERY_PASS = ("f2_packed_yarn", "g_moe_dropless")


def pytest_generate_tests(metafunc):
    if "oracle_case" in metafunc.fixturenames:
        given = metafunc.config.getoption("--oracle-cases")
        folder = Path(given or Path(__file__).parent / "cases")
        cases = sorted(path.parent for path in folder.glob("*/record.json"))
        if given and not cases:
            raise pytest.UsageError(f"--oracle-cases {folder}: no folder in it has a record.json")
        metafunc.parametrize("oracle_case", [_parameter(case) for case in cases], scope="session")


def _parameter(case: Path):
    steps = len(json.loads((case / "record.json").read_text())["steps"])
    marks = [pytest.mark.slow] * (steps >= LONG)
    marks += [pytest.mark.one_pass] * (case.name not in EVERY_PASS)
    return pytest.param(case, id=case.name, marks=marks)
