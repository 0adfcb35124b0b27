"""What is printed: the step line to the letter, and plain lines or a bar depending on where they go."""

import ctypes
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxtext.train import console
from maxtext.train.console import Console, duration, evaluation_line, host_memory_gib, step_line, table_text, warn_once

ROOT = Path(__file__).parents[2]
METRICS = {
    "train/CE loss": 3.2141, "optim/total grad norm": 0.8123, "optim/LR (group 0)": 2.9e-4,
    "throughput/device/TPS": 640.0, "throughput/total tokens": 120 * 2048, "time/step (s)": 0.4,
    "throughput/device/data loading (%)": 0.44, "memory/host (GiB)": 1.23, "optim/step skipped": 0,
}


def test_step_line_is_the_documented_one():
    assert step_line(120, 400, METRICS, eta_seconds=72) == (
        "step 120/400 | loss 3.214 | grad_norm 0.81 | lr 2.9e-04 | tok/s 5,120 | mfu n/a | mem 1.2 GiB | data 0.4%"
        " | eta 1m12s")
    assert step_line(1, 4, METRICS | {"throughput/device/MFU": 41.26, "optim/step skipped": 1}).endswith(
        "mfu 41.3% | mem 1.2 GiB | data 0.4% | eta n/a | skipped")
    assert step_line(1, 4, {"train/CE loss": float("nan")}) == (
        "step 1/4 | loss nan | grad_norm n/a | lr n/a | tok/s n/a | mfu n/a | mem n/a | data n/a | eta n/a")


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (0.4, "0s"), (59.6, "1m00s"), (72, "1m12s"), (3599.7, "1h00m"), (11_100, "3h05m"), (86_400, "1d00h"),
    (187_300, "2d04h"), (-3, "0s"), (float("nan"), "n/a"), (float("inf"), "n/a"),
])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_evaluation_line_shows_every_set():
    scores = {"eval/lm/code/CE loss": 2.1, "eval/lm/code/PPL": 8.166, "eval/lm/code/BPB": 1.94,
              "eval/lm/code/tokens": 5, "eval/lm/a/b/CE loss": 9.5, "eval/lm/a/b/PPL": 13359.7}
    assert evaluation_line(100, scores, 1.26) == (
        "eval 100 | code loss 2.100 ppl 8.17 bpb 1.940 | a/b loss 9.500 ppl 13,359.70 | 1.3s")


def test_evaluation_line_shows_the_mean_of_tasks():
    scores = {"eval/downstream/a (BPB)": 9.0, "eval/downstream/a (BPB v2)": 1.0, "eval/downstream/b (BPB v2)": 2.0,
              "eval/downstream/b (accuracy)": 0.1, "eval/downstream/b (accuracy v2)": 0.5,
              "eval/downstream/c (BPB v2)": 3.0, "eval/downstream/c (length-normalized accuracy v2)": 0.25}
    assert evaluation_line(7, scores) == "eval 7 | 3 tasks bpb 2.000 accuracy 0.375"
    assert evaluation_line(7, {"eval/downstream/a (BPB v2)": 1.0}, 2.0) == "eval 7 | 1 tasks bpb 1.000 | 2.0s"


def test_table_keeps_labels_and_wraps_long_values():
    text = table_text("Run x", [("model", "4 layers"), ("parameters", "word " * 40), ("none", "")], width=60)
    lines = text.split("\n")
    assert lines[:2] == ["Run x", "  model       4 layers"]
    assert lines[2].startswith("  parameters  word word")
    assert lines[3].startswith("              word")
    assert max(map(len, lines)) <= 60
    assert text.count("word") == 40


def test_lines_go_to_a_pipe_without_escape_codes_or_rich():
    program = ("import sys\nfrom tests.train.test_console import METRICS\nfrom maxtext.train.console import Console\n"
               "c = Console()\nc.table('T', [('a', 'b')])\nc.step(1, 2, METRICS)\nc.evaluation(1, {})\n"
               "c.note('n [b]x[/b]')\nc.close()\nassert 'rich' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split("\n")[0::2][:2] == ["T", step_line(1, 2, METRICS, 0.4)]
    assert done.stdout.endswith("eval 1\nn [b]x[/b]\n")
    assert "\x1b" not in done.stdout


def test_a_terminal_gets_the_same_lines_and_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    shown = Console(stream=screen)
    for step in (1, 2):
        shown.step(step, 400, METRICS)
    shown.note("[red]as it is[/red] :smile: " + "x" * 300)
    shown.close()
    shown.close()
    text = screen.getvalue()
    assert step_line(1, 400, METRICS, 0.4 * 399) in text
    assert "step 2/400 | loss 3.214" in text
    assert "2/400" in text.replace("step 2/400", "")  # the bar's own count
    assert "[red]as it is[/red] :smile: " + "x" * 300 in text
    monkeypatch.setenv("TERM", "dumb")
    plain = Terminal()
    Console(stream=plain).step(1, 400, METRICS)
    assert plain.getvalue() == step_line(1, 400, METRICS, 0.4 * 399) + "\n"


def test_time_left_follows_the_wall_clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    shown = Console(stream=out)
    for step in (1, 2, 3):
        shown.step(step, 103, METRICS)
        now[0] += 2.0  # steps say 0.4 s; evaluations and saves take the rest
    etas = [line.rpartition(" eta ")[2] for line in out.getvalue().splitlines()]
    assert etas == [duration(0.4 * 102), duration(2 * 101), duration(2 * 100)]


def test_warnings_come_once(capsys, monkeypatch):
    monkeypatch.setattr(console, "_warned", set())
    for _ in range(3):
        warn_once("slow path")
        warn_once("disk full at step 1", key="disk")
        warn_once("disk full at step 2", key="disk")
    assert capsys.readouterr().err == "warning: slow path\nwarning: disk full at step 1\n"


def test_a_closed_pipe_stops_nothing(capsys, monkeypatch):
    monkeypatch.setattr(console, "_warned", set())
    read, out = os.pipe()
    os.close(read)
    with open(out, "w", buffering=1, closefd=False) as stream:
        shown = Console(stream=stream)
        shown.step(1, 4, METRICS)
        shown.step(2, 4, METRICS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # so that closing `stream` finds an open end
    assert capsys.readouterr().err.count("the console cannot be written") == 1


def test_other_processes_are_silent(capsys):
    quiet = Console(primary=False)
    quiet.table("T", [("a", "b")])
    quiet.step(1, 2, METRICS)
    quiet.note("n")
    quiet.warn_once("w")
    quiet.close()
    assert capsys.readouterr() == ("", "")


def test_host_memory_grows_with_what_is_held():
    if sys.platform == "linux":  # what tests before this one have freed may be kept
        ctypes.CDLL(None).malloc_trim(0)
    before = host_memory_gib()
    held = np.ones(200 << 20, np.uint8)
    assert 0.15 < host_memory_gib() - before < 0.25
    assert held.nbytes == 200 << 20
