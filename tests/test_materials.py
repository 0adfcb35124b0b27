"""Packages of real material: what a test that asks for one does without it, and how they are pinned."""

import re
from pathlib import Path

import pytest

from tests import materials

ROOT = Path(__file__).resolve().parents[1]
ABSENT = "a_package_that_nobody_has"


@pytest.mark.parametrize("ask", [materials.folder_of, materials.imported])
def test_a_missing_package_skips_the_test_and_says_what_installs_it(ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(materials.NEED, "torch another_package")
    with pytest.raises(pytest.skip.Exception, match=f"{ABSENT} is not installed: REAL=1 scripts/test.sh"):
        ask(ABSENT)
    monkeypatch.setitem(materials.SWITCH, ABSENT, "TORCH=1")
    with pytest.raises(pytest.skip.Exception, match=r"TORCH=1 scripts/test\.sh installs it"):
        ask(ABSENT)


@pytest.mark.parametrize("ask", [materials.folder_of, materials.imported])
def test_a_package_that_must_be_here_fails_the_test(ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(materials.NEED, f"torch {ABSENT}")
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match="not installed") as outcome:
        ask(ABSENT)
    assert outcome.type is pytest.fail.Exception


def test_packages_are_found():
    assert materials.folder_of("maxtext") == ROOT / "maxtext"
    assert materials.imported("re") is re


def test_each_line_is_a_version_and_a_hash():
    lines = [line for line in (ROOT / "requirements-real.txt").read_text().splitlines() if not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line)]
    assert (len(lines), wrong) == (3, [])
