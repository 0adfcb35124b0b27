"""Whole jobs on this machine whose workers are killed, stopped and come back; what they trained, set beside a run that
nothing happened to.

One job goes through several faults, because starting one costs more than a fault. The faults are those of
`benchmarks/elastic.py`.
"""

import os
import signal
import time
from pathlib import Path

import jax
import pytest

from benchmarks.elastic import job, kill_and_recover, kill_twice, read_lines, wait_until_whole
from maxtext.checkpoint.tiers import memory_folder, memory_prefix
from maxtext.train.loop import train
from tests.runs import saved_bits, saved_steps

COMMON = ("eval.every=null", "log.tensorboard=false", "log.report=false",
          "train.global_batch=12", "mesh.data=-1", "mesh.fsdp=1")


def environment():
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def start(runs, name, workers, *overrides, devices=2):
    return job(runs.yaml, runs.directory(name), workers, devices, [*COMMON, *overrides], environment())


def losses(run_dir: Path) -> dict[int, float]:
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines))), "each update once"
    return {line["step"]: line["train/CE loss"] for line in lines if "train/CE loss" in line}


def fingerprints(run_dir: Path) -> list[int]:
    return [line["data/fingerprint"] for line in read_lines(run_dir / "metrics.jsonl") if "data/fingerprint" in line]


def alive(pids) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_job_that_loses_rank_0_with_another_amid_the_join_and_then_all_but_one(runs):
    """Nobody is special, nothing is lost but updates since the last snapshot, and every bit is that of no fault."""
    schedule = ("schedule.total_steps=100000", "train.determinism=any_mesh", "train.global_batch=8")
    overrides = (*schedule, "checkpoint.snapshot_every=5", "checkpoint.every=5", "checkpoint.keep_last=2")
    with start(runs, "faults", 4, "train.steps=100000", *overrides, devices=1) as one:
        one.wait_for_step(7)
        first = kill_twice(one, 0, 2)
        assert one.members()[0] == 1, "another worker is rank 0 now"
        wait_until_whole(one, 4)
        left, pid = one.members()[2], one.pids()[one.members()[2]]
        second = kill_and_recover(one, [worker for worker in one.members() if worker != left])
        wait_until_whole(one, 4)
        assert one.pids()[left] == pid, "who is not killed is not started again"
        one.wait_for_step(one.step() + 5)
        one.supervisor.send_signal(signal.SIGTERM)
        assert one.end() == 0
        assert [event["code"] for event in one.events("death")] == [-signal.SIGKILL] * 5, "no other death followed"
        assert not one.events("hang")
    steps = one.step()
    saved = saved_steps(runs.config("faults", *COMMON, *overrides))
    assert saved[-1] == steps, "by a group of workers that have saved before and of others that have not"
    for fault in (first, second):
        assert fault.source == "memory"
        assert fault.lost <= 2 * 5 + 1, "those since the last sealed snapshot, and one in flight"
    plain = runs.config("plain", *COMMON, f"train.steps={steps}", *schedule, "checkpoint.every=null")
    train(plain, devices=jax.devices()[:4])
    assert fingerprints(one.run_dir) == fingerprints(Path(plain.run_dir)), "no batch repeated, skipped or changed"
    assert losses(one.run_dir) == losses(Path(plain.run_dir)), "on four devices, two and one"
    bits = saved_bits(plain, steps), saved_bits(runs.config("faults", *COMMON, *overrides), steps)
    assert bits[0] == bits[1], "weights and moments too"


@pytest.mark.one_pass
def test_with_a_log_of_gradients_a_death_costs_no_update_but_those_under_way(runs):
    overrides = ("schedule.total_steps=100000", "train.determinism=any_mesh", "train.global_batch=8",
                 "checkpoint.every=null", "checkpoint.snapshots=true", "checkpoint.gradient_log=true",
                 "checkpoint.snapshot_every=20")
    with start(runs, "logged", 2, "train.steps=100000", *overrides, devices=1) as one:
        one.wait_for_step(27)
        cost = kill_and_recover(one, [0])
        [source] = [event for event in one.events("restored from") if event["source"] == "memory"][:1]
        assert cost.lost <= 2, "one whose entry was not sealed everywhere, and one under way"
        assert source["step"] >= 26
        assert f", and {source['step'] % 20} updates done again from their gradients" in source["how"]
        one.wait_for_step(source["step"] + 5)
        one.supervisor.send_signal(signal.SIGTERM)
        assert one.end() == 0
    steps = one.step()
    plain = runs.config("plain", *COMMON, *overrides, f"train.steps={steps}")
    train(plain, devices=jax.devices()[:2])
    assert losses(one.run_dir) == losses(Path(plain.run_dir))
    assert saved_bits(plain, steps) == saved_bits(runs.config("logged", *COMMON, *overrides), steps)


def test_a_stopped_worker_is_fenced_and_the_stop_of_a_job_saves(runs):
    """SIGSTOP: it is found by its silence, killed while it sleeps, and never wakes; then SIGTERM ends the job."""
    overrides = ("train.steps=100000", "schedule.total_steps=100", "elastic.hang_seconds=2.5", "checkpoint.every=null")
    with start(runs, "stopped", 2, *overrides) as one:
        one.wait_for_step(12)
        sleeper = one.pids()[1]
        cost = kill_and_recover(one, [1], signal.SIGSTOP)
        assert 2.2 < cost.noticed < 5.0
        assert not alive([sleeper]), "it can write nothing any more"
        assert [event["why"][:20] for event in one.events("hang")] == ["no sign of life for "]
        wait_until_whole(one, 2)
        one.wait_for_step(one.step() + 3)
        one.supervisor.send_signal(signal.SIGTERM)
        assert one.end() == 0
        assert not alive(one.pids().values())
        stopped = one.step()
    losses(one.run_dir)
    cfg = runs.config("stopped", *COMMON, *overrides[1:], f"train.steps={stopped + 2}")
    assert train(cfg, devices=jax.devices()[:2]).step == stopped + 2, "a plain run goes on from there"


def test_without_a_supervisor_the_workers_save_and_go(runs):
    overrides = ("train.steps=100000", "schedule.total_steps=100", "checkpoint.every=null")
    with start(runs, "orphans", 2, *overrides) as one:
        one.wait_for_step(5)
        one.supervisor.kill()
        one.supervisor.wait()
        began = time.monotonic()
        while alive(one.pids().values()):
            assert time.monotonic() - began < 30, one.tail()
            time.sleep(0.1)
        memory = f"{memory_prefix(str(one.run_dir))}*"
        while list(Path(memory_folder()).glob(memory)):
            assert time.monotonic() - began < 40, "what they had in memory goes with them"
            time.sleep(0.1)
    cfg = runs.config("orphans", *COMMON, *overrides)
    assert saved_bits(cfg, one.step()), "the last update was saved"


@pytest.mark.parametrize(("overrides", "options", "message"), [
    (["train.global_batch=10"], ["--workers=2", "--devices-per-worker=2"], "train.global_batch"),
    (["train.global_batchs=10"], ["--workers=2"], "global_batch"),
    ([], ["--workers=0"], "give 1 or more"),
])
def test_a_mistake_is_told_before_anything_starts(runs, capfd, overrides, options, message):
    from maxtext.cli import main

    try:
        code = main(["launch", "local", str(runs.yaml), "run_name=mistake", *overrides, *options])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capfd.readouterr().err
    assert not runs.directory("mistake").exists()
