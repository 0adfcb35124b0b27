"""A fault that nobody foresaw: one line, exit code 3, and the trace in the file that the line names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.config.trace import unforeseen


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
