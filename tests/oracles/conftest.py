"""Gives each test of this folder every training case of the reference."""

from pathlib import Path

import pytest

MOE = "g_moe"  # cases that need a part which is not built yet


def pytest_generate_tests(metafunc):
    if "oracle_case" in metafunc.fixturenames:
        given = metafunc.config.getoption("--oracle-cases")
        folder = Path(given or Path(__file__).parent / "cases")
        cases = sorted(path.parent for path in folder.glob("*/record.json"))
        if given and not cases:
            raise pytest.UsageError(f"--oracle-cases {folder}: no folder in it has a record.json")
        metafunc.parametrize("oracle_case", cases, ids=[case.name for case in cases], scope="session")
