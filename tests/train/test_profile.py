"""`profile.steps`: a trace of the updates that were named, and what is told of it."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import jax
import pytest

from maxtext.config.validate import ConfigError
from maxtext.report.write import write_report
from maxtext.train.loop import Outcome, train
from maxtext.train.profile import Operation, _leaves, summary
from tests.runs import Runs, lines, reproducible, some_devices, when_written

SHORT = ("train.steps=6", "eval.every=null", "checkpoint.every=null", "log.report=false", "log.tensorboard=false")


def test_a_trace_of_two_updates_changes_no_number_and_is_told(runs: Runs, capsys: pytest.CaptureFixture[str]):
    cfg, plain = runs.config("run", "profile.steps=[3, 4]", *SHORT), runs.config("plain", *SHORT)
    for one in (plain, cfg):
        assert train(one, devices=some_devices(2)) == Outcome(6)
    assert reproducible(lines(cfg)) == reproducible(lines(plain))
    assert [record["step"] for record in lines(cfg) if "time/profile (s)" in record] == [2, 4]
    found = json.loads(Path(cfg.run_dir, "profile.json").read_text())
    assert (found["steps"], found["devices"]) == ([3, 4], 2)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["shares"].values()) > 0, "gathering weights and summing gradients is communication"
    updates = lines(cfg)[3:5]
    assert found["seconds"] < sum(record["time/step (s)"] for record in updates) * 1.1
    named = [one for one in found["operations"] if one["source"].startswith("jit(")]
    assert len(named) > len(found["operations"]) / 2, found["operations"]
    trace = Path(cfg.run_dir, found["trace"])
    assert trace.name.endswith(".xplane.pb")
    (events,) = trace.parent.glob("*.trace.json.gz")
    names = [event.get("name") for event in json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]]
    assert names.count("train") == 2, "the marks of the updates"
    assert "profile of updates 3 to 4: computing" in capsys.readouterr().out
    page = Path(write_report(cfg.run_dir)[0]).read_text()
    assert "<h2>Profile <small>updates 3 to 4; 2 devices" in page
    assert found["operations"][0]["name"] in page
    assert f"<tr><td>jax</td><td class=left>{jax.__version__}</td></tr>" in page, "the environment"
    assert "<tr><td>mesh</td><td class=left>fsdp 2</td></tr>" in page


def test_a_run_that_stops_inside_a_trace_ends_it(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    cfg = runs.config("run", "profile.steps=[2, 6]", *SHORT)
    with monkeypatch.context() as patch:
        when_written(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = train(cfg, devices=some_devices(1))
    assert stopped == Outcome(3, "SIGTERM")
    assert json.loads(Path(cfg.run_dir, "profile.json").read_text())["steps"] == [2, 3], "those that it holds"
    cfg = runs.config("run", "profile.steps=[5, 5]", *SHORT)
    assert train(cfg, devices=some_devices(1)) == Outcome(6)
    assert json.loads(Path(cfg.run_dir, "profile.json").read_text())["steps"] == [5, 5], "another trace can begin"


def ops(*spans: tuple[float, float, str]) -> list[Operation]:
    return [Operation(1e9 * start, 1e9 * end, name) for start, end, name in spans]


def test_shares_by_hand():
    """Ten seconds: a matmul of 4, a gathering of 3 over which another one of 1 lies, 1 of nothing, a sum of 2."""
    device = ops((0, 4, "dot.1"), (3, 6, "all-gather.2"), (4.5, 5.5, "dot.1"), (7, 8, "fusion"), (8, 10, "all-reduce"))
    found = summary({"a": device, "b": ops((100, 110, "dot.1"))}, (1, 2), '  %dot.1 = f32[2] dot(%a, %b), metadata={op_'
                    'type="x" op_name="jit(step)/mlp/dot_general" source_line=3}\n')
    assert found["seconds"] == 10
    assert found["shares"] == pytest.approx({"computing": 16 / 20, "communication": 3 / 20, "idle": 1 / 20})
    assert found["operations"][0] == {"name": "dot.1", "seconds": 15.0, "share": pytest.approx(15 / 21), "count": 3,
                                      "source": "jit(step)/mlp/dot_general"}
    with pytest.raises(ValueError, match="no operation"):
        summary({}, (1, 2))


def test_what_only_holds_others_is_left_out():
    found = _leaves(ops((0, 9, "while"), (0, 3, "dot"), (3, 5, "call"), (3.5, 4, "add"), (10, 11, "copy")))
    assert [one.name for one in found] == ["dot", "add", "copy"]


@pytest.mark.parametrize(("steps", "message"), [
    ("[4, 3]", "ends before it begins; write [3, 4]"), ("[4, 41]", "goes beyond train.steps 40; end it at 40"),
    ("[0, 3]", "must be at least 1"), ("5", "where a list is expected"), ("[1, 2, 3]", "a list of 3 where 2 values"),
])
def test_updates_that_cannot_be_profiled(runs: Runs, steps: str, message: str):
    with pytest.raises(ConfigError) as caught:
        runs.config("run", f"profile.steps={steps}")
    assert message in str(caught.value)
