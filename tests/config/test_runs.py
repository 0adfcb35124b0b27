"""A folder that is no run is named with the run that was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxtext.config.runs import no_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with runs/first (a file of metrics) and runs/second (checkpoints), and no run beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "metrics.jsonl").touch()
    (tmp_path / "runs" / "second" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "secret").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(("path", "told"), [
    ("runs/secnd", "runs/secnd does not exist (did you mean runs/second?)"),
    ("runs/secnd/", "runs/secnd/ does not exist (did you mean runs/second?)"),
    ("runs/nope", "runs/nope does not exist (runs there: runs/first, runs/second)"),
    ("runs", "runs holds no checkpoint (runs there: runs/first, runs/second)"),
    ("runs/secret", "runs/secret holds no checkpoint"),
    ("file", "file is a file, not a folder"),
    ("absent/run", "absent/run does not exist"),
    ("runs/second@7", "runs/second@7 does not exist (a step of runs/second is a folder, "
                      "runs/second/checkpoints/step_00000007)"),
])
def test_what_was_probably_meant(runs: Path, path: str, told: str):
    assert no_run(path, "checkpoint") == told


def test_few_of_many_are_named(runs: Path):
    for i in range(5):
        (runs / "runs" / f"third_{i}" / "checkpoints").mkdir(parents=True)
    assert no_run("runs", "checkpoint").endswith("runs/first, runs/second, runs/third_0, runs/third_1 and 3 more)")
