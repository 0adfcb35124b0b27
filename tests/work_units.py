"""How a test run is shared out among processes (`pytest -n 2`): what shares a fixture goes to one process.

A unit is a file; the replayed cases of the reference, which are independent and long, are a unit each. Long units start
first, so that the processes end together. pytest-xdist's own groups (`--dist loadgroup`) do nothing with pytest 9.2:
both processes then make the same fixtures.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

CASES = "tests/oracles/test_cases.py"
# Beginnings of units that take long, the longest first.
LONG = ("tests/plan/test_compiled_targets", "tests/end_to_end/test_quickstart", "tests/elastic/test_drills",
        "tests/launch/test_ray", "tests/train/test_determinism", "tests/test_faults", "tests/train/test_step",
        "tests/end_to_end/test_recipes", "tests/end_to_end/test_resume", "tests/end_to_end/", "tests/oracles/",
        "tests/model/", "tests/convert/", "tests/generate/", "tests/eval/", "tests/train/", "tests/checkpoint/")


def unit(nodeid: str) -> str:
    """The unit of a test, from its name."""
    path, _, test = nodeid.partition("::")
    _, bracket, parameters = test.partition("[")
    return f"{path}[{parameters}" if path == CASES and bracket else path


def rank(name: str) -> int:
    """Where a unit stands in the order of starting."""
    return next((place for place, beginning in enumerate(LONG) if name.startswith(beginning)), len(LONG))


class ByUnit(LoadScopeScheduling):
    """Hands out units in the order in which their tests were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by how many tests a unit has
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
