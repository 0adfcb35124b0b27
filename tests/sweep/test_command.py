"""`maxtext sweep`: runs that are those of `maxtext train`, a table of them, and what happens when it is stopped."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import jax
import pytest

from maxtext.cli import main
from maxtext.report.write import write_report
from maxtext.train.loop import train
from tests.runs import Runs, lines, reproducible, saved_bits, saved_steps, some_devices, when_written

pytestmark = pytest.mark.one_pass
SETTINGS = ("train.steps=6", "checkpoint.every=2", "eval.every=3", "schedule.warmup_steps=2", "log.tensorboard=false",
            "log.report=false", "schedule.total_steps=6")
OVER = ("--over", "optim.lr=1e-2,5e-3", "--seeds", "2")


def sweep(runs: Runs, name: str, *words: str) -> int:
    return main(["sweep", *runs.arguments(name, *SETTINGS), *words])


def member(runs: Runs, sweep_name: str, name: str, *overrides: str):
    return runs.config(name, *SETTINGS, f"output_dir={runs.folder}/runs/{sweep_name}-sweep", *overrides)


def rows_of(runs: Runs, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((runs.directory(f"{name}-sweep") / "sweep.csv").read_text().splitlines()))


def check_same(ours, alone) -> None:
    """The same lines of metrics, to float32 rounding."""
    for line, own in zip(reproducible(lines(ours)), reproducible(lines(alone)), strict=True):
        assert line == pytest.approx(own, rel=1e-5)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep sees one device, as its members' own runs do."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def test_each_member_is_the_run_that_it_would_be_by_itself(runs: Runs, one_device: None,
                                                           capsys: pytest.CaptureFixture[str]):
    assert sweep(runs, "s", *OVER) == 0
    said = capsys.readouterr().out
    names = [f"lr={lr}_seed={seed}" for lr in ("1e-2", "5e-3") for seed in (0, 1)]
    rows = rows_of(runs, "s")
    assert sorted(row["name"] for row in rows) == sorted(names)
    held_out = [float(row["held_out"]) for row in rows]
    assert held_out == sorted(held_out)
    assert {row["update"] for row in rows} == {"6"}
    assert "over seeds" in said
    assert (runs.directory("s-sweep") / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert [one["name"] for one in json.loads((runs.directory("s-sweep") / "sweep.json").read_text())["members"]] == [
        row["name"] for row in rows]
    ours = member(runs, "s", "lr=5e-3_seed=1", "optim.lr=5e-3", "seed=1")
    alone = runs.config("alone", *SETTINGS, "optim.lr=5e-3", "seed=1")
    train(alone, devices=some_devices(1))
    check_same(ours, alone)
    assert saved_steps(ours) == saved_steps(alone)
    assert Path(write_report(ours.run_dir)[0]).is_file()
    # The member is a run: it goes on alone.
    train(member(runs, "s", "lr=5e-3_seed=1", "optim.lr=5e-3", "seed=1", "train.steps=7"), devices=some_devices(1))
    assert lines(ours)[-1]["step"] == 7


def test_a_sweep_that_was_stopped_goes_on_to_the_same_bits(runs: Runs, one_device: None,
                                                           monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]):
    sent: list[int] = []

    def stop() -> None:  # once: a second signal would end the process at once
        if not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        when_written(patch, 2, stop)
        assert sweep(runs, "s", *OVER) == 0
    said = capsys.readouterr().out
    assert "stopped by SIGTERM; all is saved, and the same command continues from there" in said
    ours = member(runs, "s", "lr=1e-2_seed=1", "seed=1")
    stopped = saved_steps(ours)[-1]
    assert 2 <= stopped < 6
    assert sweep(runs, "s", *OVER) == 0
    assert f"going on from update {stopped} of 6" in capsys.readouterr().out
    assert sweep(runs, "whole", *OVER) == 0
    whole = member(runs, "whole", "lr=1e-2_seed=1", "seed=1")
    assert reproducible(lines(ours)) == reproducible(lines(whole))
    assert saved_bits(ours, 6) == saved_bits(whole, 6)
    capsys.readouterr()
    assert sweep(runs, "whole", *OVER) == 0  # complete: the table alone
    said = capsys.readouterr().out
    assert "step 6/6" not in said
    assert "held-out" in said


def test_what_does_not_fit_or_is_another_program_trains_in_turn(runs: Runs, one_device: None,
                                                                capsys: pytest.CaptureFixture[str]):
    from maxtext.model.cost import memory_per_device

    short = ("train.steps=2", "eval.every=null", "checkpoint.every=null")
    one = memory_per_device(runs.config("s", *SETTINGS, *short), {}).total / 2**30
    assert sweep(runs, "s", *short, "--seeds", "3", "--memory", str(2.5 * one)) == 0
    assert "2 of 3 members fit into memory, so they train 2 at a time" in capsys.readouterr().out
    assert updates_of(runs, "s") == ["2"] * 3
    assert sweep(runs, "t", *short, "--over", "model.d_ff=64,32", "--seeds", "2", "--memory", str(one / 2)) == 0
    said = capsys.readouterr().out
    assert said.count("model.d_ff changes the program itself, so there are 2 programs, one after another") == 1
    assert said.count("1 of 2 members fit into memory, so they train one after another") == 2
    assert updates_of(runs, "t") == ["2"] * 4


def test_a_signal_in_the_last_update_of_a_member_stops_the_sweep_too(runs: Runs, one_device: None,
                                                                      monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]):
    short = ("train.steps=2", "eval.every=null", "checkpoint.every=null")
    with monkeypatch.context() as patch:
        when_written(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert sweep(runs, "s", *short, "--seeds", "2", "--memory", "1e-6") == 0
    assert "stopped by SIGTERM; all is saved" in capsys.readouterr().out
    assert updates_of(runs, "s") == ["2", "0"]


def updates_of(runs: Runs, name: str) -> list[str]:
    return [row["update"] for row in rows_of(runs, name)]


def test_a_member_that_its_guard_would_send_back_is_marked(runs: Runs, one_device: None,
                                                           capsys: pytest.CaptureFixture[str]):
    assert sweep(runs, "s", "--over", "optim.lr=1e-2,1e30", "guard.skips_in_a_row=1", "eval.every=null") == 0
    said = capsys.readouterr().out
    assert "lr=1e30: 2 updates in a row were skipped (guard.skips_in_a_row 1) at update" in said
    rows = {row["name"]: row for row in rows_of(runs, "s")}
    assert "skipped" in rows["lr=1e30"]["parted"]
    assert int(rows["lr=1e30"]["skipped"]) >= 2
    assert rows["lr=1e-2"]["parted"] == ""

