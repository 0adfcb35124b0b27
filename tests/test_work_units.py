"""Tests that share a fixture run in one process, so that it is made once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.work_units import rank, unit

ROOT = Path(__file__).resolve().parents[1]
TESTS = """\
import os, pytest

@pytest.fixture(scope="module")
def made():
    with open(os.environ["LOG"], "a") as log:
        log.write(__name__.rpartition("test_")[2] + "\\n")

@pytest.mark.parametrize("n", range(9))
def test(made, n):
    pass
"""


def test_two_processes_make_each_fixture_once(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "."],
                          cwd=tmp_path, env=os.environ | {"LOG": str(log), "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, timeout=120)
    assert "36 passed" in done.stdout, done.stdout
    assert sorted(log.read_text().split()) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("nodeid", "name"), [
    ("tests/a/test_b.py::test_c", "tests/a/test_b.py"), ("tests/a/test_b.py::test_c[x::y]", "tests/a/test_b.py"),
    ("tests/oracles/test_cases.py::test_c[a1_fp32]", "tests/oracles/test_cases.py[a1_fp32]"),
    ("tests/oracles/test_cases.py::test_torch_numbers", "tests/oracles/test_cases.py"),
])
def test_units(nodeid: str, name: str):
    assert unit(nodeid) == name


def test_long_units_start_first():
    names = ["tests/data/test_order.py", "tests/oracles/test_cases.py[a1]", "tests/end_to_end/test_cli.py",
             "tests/end_to_end/test_quickstart.py"]
    assert sorted(names, key=rank) == names[::-1]
