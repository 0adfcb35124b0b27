"""`maxtext watch` and `maxtext runs`: what state a run is in, told from outside by the files of its directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maxtext import cli
from maxtext.checkpoint import lease
from maxtext.config.schema import Config
from maxtext.train.loop import Outcome, train
from maxtext.watch.frame import clock, sparkline
from maxtext.watch.signs import Signs, judge, read_signs
from tests.runs import Runs, environment, some_devices, when_written

HERE = lease.Holder("here", lease.this_machine(), os.getpid(), "2026-01-01")
ELSEWHERE = lease.Holder("there", "another kernel", 1, "2026-01-01")


def signs(beat: dict[str, Any] | None = None, events: tuple[dict[str, Any], ...] = (), **changes: Any) -> Signs:
    found = Signs("runs/a", {"train": {"steps": 100}}, [{"time": 1.0, "event": "begin"}, *events],
                  [{"step": 7, "train/CE loss": 2.5, "time/step (s)": 1.0}],
                  {"phase": "step", "still_seconds": 0.0} | (beat or {}), ELSEWHERE, 1.0, 1.0)
    return dataclasses.replace(found, **changes)


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"time": 2.0, "event": name, **fields}


@pytest.mark.parametrize(("found", "state", "words"), [
    (signs(), "running", "training"),
    (signs({"phase": "eval", "still_seconds": 130.0}), "running", "evaluating, 2 min"),
    (signs({"still_seconds": 14.5}), "stalled", "training since 16 s, without an end (process 1 on there"),
    (signs({"still_seconds": 14.5}, records=[{"step": 7, "time/step (s)": 9.0}]), "running", "training"),
    (signs({"phase": "eval", "still_seconds": 700.0}), "stalled", "evaluating since 12 min"),
    (signs({"phase": "eval", "still_seconds": 700.0}, (event("eval", seconds=300.0),)), "running", "evaluating"),
    (signs(beat_seconds=16.0), "stalled", "no sign of life since 16 s (process 1 on there"),
    (signs(beat_seconds=700.0), "failed", "no sign of life since 12 min"),
    (signs(holder=HERE, beat_seconds=10.0), "running", "training"),
    (signs(holder=dataclasses.replace(HERE, pid=2**22 + 1), beat_seconds=10.0), "failed", "without a word"),
    (signs(events=(event("stop", why="complete"),)), "finished", "7 updates"),
    (signs(events=(event("stop", why="SIGTERM"),)), "stopped", "by SIGTERM"),
    (signs(events=(event("failure", why="ValueError: no"),)), "failed", "ValueError: no"),
    (signs(events=(event("failure", why="no"), event("begin"))), "running", "training"),
    (signs({"released": True}, (event("stop", why="a change of members"),)), "running", "between two attempts"),
    (signs({"released": True}, (event("stop", why="a change of members"),), heard_seconds=60.0), "failed", "a word"),
    (signs(beat=None, events=(), records=[{"step": 100}]), "running", "training"),
])
def test_states(found: Signs, state: str, words: str):
    assert judge(found)[0] == state
    assert words in judge(found)[1]


def test_a_run_of_before_there_were_ledgers():
    old = dataclasses.replace(signs(), events=[], beat=None, holder=None, heard_seconds=1e6)
    assert judge(old)[0] == "failed"
    assert judge(dataclasses.replace(old, records=[{"step": 100}])) == ("finished", "100 updates")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir()
    child = subprocess.Popen([sys.executable, str(Path(__file__).parent / "alive.py"), str(folder), *words],
                             env=environment(1), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(5)] == [f"{step}\n" for step in range(1, 6)]
    return child


def in_a_terminal(*words: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command line in a terminal of its own, and where its screen is read."""
    screen, terminal = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "maxtext.cli", *words], stdin=terminal, stdout=terminal,
                             stderr=terminal, env=environment(1, TERM="xterm-256color", COLUMNS="120", LINES="40"))
    os.close(terminal)
    return child, screen


def written(screen: int) -> bytes:
    """What comes on a screen until its program ends."""
    found = b""
    with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
        while part := os.read(screen, 4096):
            found += part
    return found


def test_a_stalled_run_is_seen_within_30_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One process stands still altogether, one on another machine hangs in an update, one goes on; then one dies."""
    ways = {"still": ["going"], "stuck": ["stuck", "another kernel"], "going": ["going"]}
    children = {name: start(tmp_path / name, *words) for name, words in ways.items()}
    try:
        began, seen = time.monotonic(), dict[str, float]()
        children["still"].send_signal(signal.SIGSTOP)
        while len(seen) < 2 and time.monotonic() < began + 40:
            states = {name: judge(read_signs(str(tmp_path / name))) for name in ways}
            assert states["going"][0] == "running"
            for name in ("still", "stuck"):
                if states[name][0] == "stalled":
                    seen.setdefault(name, time.monotonic() - began)
            time.sleep(0.5)
        assert 10 < min(seen.values()) <= max(seen.values()) < 30, (seen, states)
        assert "no sign of life since" in states["still"][1]
        assert states["stuck"][1].startswith("training since")
        assert cli.main(["watch", str(tmp_path / "stuck"), "--once"]) == 0
        frame = capsys.readouterr().out
        assert "stalled  training since" in frame
        assert "update 5 of 1,000" in frame
        follower, screen = in_a_terminal("watch", str(tmp_path / "going"), "--every", "0.3")
        first = b""
        while b"running" not in first:
            first += os.read(screen, 4096)
        children["going"].kill()
        children["going"].wait()
        while judge(read_signs(str(tmp_path / "going")))[0] != "failed":
            assert time.monotonic() < began + 60
            time.sleep(0.5)
        assert cli.main(["watch", str(tmp_path / "going"), "--once"]) == 3
        assert "failed  ended without a word" in capsys.readouterr().out
        last = written(screen)
        assert follower.wait(60) == 3, "it ends with the run"
        assert b"failed" in last
        assert b"ended without a word" in last
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def test_a_real_run_from_its_first_update_to_its_end(runs: Runs, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]):
    cfg = runs.config("run", "train.steps=6", "eval.every=null", "log.report=false")
    during: list[Any] = []

    def look() -> None:
        monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)  # which the thread reads with each beat
        during.append((judge(read_signs(cfg.run_dir)), read_signs(cfg.run_dir).step))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        when_written(patch, 3, look)
        assert train(cfg, devices=some_devices(1)).stopped_by == "SIGTERM"
    assert during[0][0][0] == "running"
    assert during[0][1] == 3
    assert judge(read_signs(cfg.run_dir)) == ("stopped", "by SIGTERM")
    assert train(cfg, devices=some_devices(1)) == Outcome(6)
    assert judge(read_signs(cfg.run_dir)) == ("finished", "6 updates")
    listed(cfg, capsys)


def listed(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["runs", cfg.output_dir, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["state"], row["step"], row["steps"]) == ("run", "finished", 6, 6)
    assert row["loss"] == read_signs(cfg.run_dir).records[-1]["train/CE loss"]
    assert row["tokens_per_second"] > 0
    assert 0 <= row["last_seen_seconds"] < 60
    assert cli.main(["runs", cfg.output_dir]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "state", "update", "loss"]
    assert line.split()[:4] == ["run", "finished", "6/6", f"{row['loss']:.4f}"]
    assert cli.main(["watch", cfg.run_dir]) == 0  # into a pipe: one frame
    frame = capsys.readouterr().out
    for words in ("finished 6 updates", "update 6 of 6", f"loss {row['loss']:.4f}", "newest checkpoint update 6",
                  "UTC end: SIGTERM", "UTC end: complete"):
        assert words in " ".join(frame.split()), words


def test_a_torn_line_and_a_file_longer_than_the_tail(tmp_path: Path):
    lines = [json.dumps({"step": step, "train/CE loss": step / 7}) for step in range(2000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2000, "tr')
    found = read_signs(str(tmp_path), 1000)
    assert (found.step, found.newest("train/CE loss"), found.name) == (1999, 1999 / 7, tmp_path.name)
    assert 10 < len(found.records) < 30


def test_a_ledger_without_metrics_has_its_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """That of a sweep: the metrics are in the folders of its members."""
    ledger = [{"time": 1.0, "event": "begin", "steps": 6, "devices": 1, "host": "here"},
              {"time": 2.0, "event": "eval", "step": 3, "seconds": 1.0},
              {"time": 3.0, "event": "stop", "step": 6, "why": "complete"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ledger))
    assert cli.main(["runs", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[1:3] == ["finished", "6/6"]
    assert row.endswith("6 updates")
    assert cli.main(["watch", str(tmp_path)]) == 0
    assert "an attempt begins on 1 device of here" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["watch", "ABSENT"], "ABSENT does not exist"), (["watch", "."], "holds no metrics.jsonl and no events.jsonl"),
    (["runs", "ABSENT"], "ABSENT does not exist"), (["runs", "."], "holds no run"),
])
def test_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    assert cli.main([words[0], str(tmp_path / words[1])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_sparklines_and_spans():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline(range(1000))) == 48
    assert sparkline([]) == ""
    assert [clock(s) for s in (12.4, 180, 18_120, 187_300)] == ["12 s", "3 min", "5 h 02 min", "2 d 04 h"]


def test_watch_needs_no_jax(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/CE loss": 2.0}\n')
    program = ("import sys\nfrom maxtext import cli\ncli.main(['watch', sys.argv[1], '--once'])\n"
               "cli.main(['runs', sys.argv[1]])\nassert not {'jax', 'numpy', 'matplotlib'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment(1), timeout=60)
