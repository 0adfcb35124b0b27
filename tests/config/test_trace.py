"""A fault that nobody foresaw: one line, exit code 3, and the trace in the file that the line names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.config.trace import no_devices, unforeseen


def test_the_line_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A ledger that holds another kind of time than it should, which no message is made for."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/CE loss": 2.0}\n')
    (tmp_path / "events.jsonl").write_text('{"event": "begin", "time": []}\n')
    assert cli.main(["report", str(tmp_path)]) == 3
    out, error = capsys.readouterr()
    assert error.count("\n") == 1
    assert "Traceback" not in out + error
    match = re.fullmatch(r"maxtext report failed: (\w+Error): .* \(\w+\.py:\d+\)\. This has no message of its own yet: "
                         r"the trace is in (.*\.txt), which a report of the fault should hold\n", error)
    assert match, error
    assert Path(match[2]).parent == tmp_path
    trace = Path(match[2]).read_text()
    assert "Traceback (most recent call last)" in trace
    assert match[1] in trace


def test_the_folder_of_a_run_comes_first(tmp_path: Path):
    try:
        raise RuntimeError("two\n   lines " + "x" * 1000)
    except RuntimeError as error:
        line = unforeseen(error, "training", str(tmp_path))
        elsewhere = unforeseen(error, "training", str(tmp_path / "absent"))
    assert line.startswith("training failed: RuntimeError: two lines xxx")
    assert len(line) < 700
    (written,) = tmp_path.glob("trace_*.txt")
    assert str(written) in line
    path = re.search(r"the trace is in (\S+),", elsewhere)
    assert path
    Path(path[1]).unlink()


def test_devices_that_are_not_there_are_a_mistake():
    """JAX tells it by an assertion without words where it has no such plugin, and by a RuntimeError elsewhere."""
    done = subprocess.run([sys.executable, "-m", "maxtext.cli", "train", "quickstart", "--dry-run"],
                          capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "none_such"})
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("JAX_PLATFORMS=none_such: JAX has no such device here")
    assert "unset JAX_PLATFORMS" in done.stderr


def test_other_failures_below_jax_are_not_taken_for_missing_devices():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("Unable to initialize backend")
    assert no_devices(caught.value) is None
