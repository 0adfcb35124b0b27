"""What the report says of attempts that went on, and of the last value of a curve that it smooths."""

from __future__ import annotations

import json
from pathlib import Path

from maxtext.report import environment
from maxtext.report.chart import Curve, chart
from maxtext.report.events import event_marks
from maxtext.report.run_files import read_run


def test_a_resume_is_no_recovery(tmp_path: Path):
    """Stopped after 2 updates, killed after 4, failed after 6, and at its end after 8."""
    ends = {2: {"event": "stop", "why": "SIGINT"}, 6: {"event": "failure", "why": "a fault"},
            8: {"event": "stop", "why": "complete"}}
    events = []
    for last in (2, 4, 6, 8):
        events.append({"time": 100.0 * last - 150, "event": "begin", "devices": 1, "host": "here"})
        if last in ends:
            events.append({"time": 100.0 * last + 10, "step": last, **ends[last]})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (tmp_path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "time/unix (s)": 100.0 * step, "train/CE loss": 2.0}) + "\n" for step in range(1, 9)))
    marks = {one.name: one.xs for one in event_marks(read_run(str(tmp_path)))}
    assert marks == {"saves": [], "resumes": [2], "recoveries": [4, 6], "failures": [4, 6]}


def test_a_legend_has_the_value_that_was_logged():
    ys = [4.0] * 29 + [3.0]
    assert "loss <b>3</b>" in chart("Loss", [Curve("loss", range(1, 31), ys, smoothed=True)]).replace("</i>", "")


def test_the_environment_of_one_device_has_no_dash_for_a_mesh(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": "begin", "devices": 1, "host": "here",
                                                       "environment": {"mesh": {}, "processes": 1}}) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "<td>mesh</td><td class=left>one device</td>" in environment.section(read_run(str(tmp_path)))
