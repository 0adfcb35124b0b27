"""A job of two processes over loopback: the numbers of one process, one stop for both, and a resume as one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from maxtext.config.load import to_yaml
from maxtext.data.journal import Journal
from maxtext.parallel.launch import LaunchError, job
from maxtext.train.loop import train
from tests.runs import ROOT, lines

SHORT = ("train.steps=6", "eval.every=3", "checkpoint.every=3", "log.tensorboard=false", "log.report=false",
         "mesh.fsdp=4")


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start_two(cfg, folder, program=("train.py",)):
    """Both processes of a job, with two devices each."""
    (folder / "job.yml").write_text(to_yaml(cfg))
    address = free_address()
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")}
    return [subprocess.Popen([sys.executable, str(ROOT / program[0]), *program[1:], str(folder / "job.yml")],
                             text=True, env=environment | {"JAX_PROCESS_ID": str(rank)}, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for rank in range(2)]


def outputs(workers):
    try:
        ends = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], ends
    return ends


def losses(cfg):
    return [(line["step"], line.get("train/CE loss"), line.get("eval/lm/macro/CE loss"), line.get("data/fingerprint"))
            for line in lines(cfg)]


def check_same(got, expected):
    assert [line[::3] for line in got] == [line[::3] for line in expected]
    np.testing.assert_allclose(*(np.array([[np.nan if x is None else x for x in line[1:3]] for line in side], float)
                                 for side in (got, expected)), rtol=2e-6)


def test_two_processes_train_as_one_and_stop_together(runs, tmp_path):
    one = runs.config("one", *SHORT)
    train(one, devices=jax.devices()[:4])
    two = runs.config("two", *SHORT)
    first, second = outputs(start_two(two, tmp_path))
    table = " ".join(first.split())
    assert "4 x cpu in 2 processes" in table
    assert f"2, found through JAX's variables, 2 devices each, on 1 host ({socket.gethostname()}: 0, 1)" in table
    assert "two is complete" in first
    assert "complete" not in second, "one process speaks for all"
    check_same(losses(two), losses(one))

    # A signal to the second process alone stops both after the same update; one process goes on from there.
    long = runs.config("long", *SHORT[1:], "train.steps=2000", "schedule.total_steps=2000")
    workers = start_two(long, tmp_path)
    metrics = runs.directory("long") / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.read_text().count("\n") >= 4:
            break
        assert workers[1].poll() is None, workers[1].communicate()[0]
        time.sleep(0.1)
    workers[1].send_signal(signal.SIGTERM)
    first, _ = outputs(workers)
    assert "stopped by SIGTERM after update" in first
    stopped = lines(long)[-1]["step"]
    assert 4 <= stopped < 2000
    more = runs.config("long", *SHORT[1:], f"train.steps={stopped + 1}", "schedule.total_steps=2000")
    assert train(more, devices=jax.devices()[:4]).step == stopped + 1
    assert [line["step"] for line in lines(more)] == list(range(stopped + 2))


def test_two_processes_go_back_together(runs, tmp_path):
    """Past the batches that one process alone would pass over, with one line in the journal."""
    options = (*SHORT[2:], "train.steps=10", "eval.every=null", "guard.skips_in_a_row=1")
    cfg = runs.config("two", *options)
    first, second = outputs(start_two(cfg, tmp_path, ("tests/end_to_end/spoilt.py", "5,6")))
    told = "2 updates in a row were skipped (guard.skips_in_a_row 1) at update 6: going back to update 3 and past"
    assert told in first
    assert told not in second, "one process speaks for all"
    (line,) = (runs.directory("two") / "journal.jsonl").read_text().splitlines()
    decision = json.loads(line)
    assert [decision[key] for key in ("update", "back_to", "first", "last")] == [6, 3, 5, 6]
    assert [path.name for path in runs.directory("two").glob("journal*")] == ["journal.jsonl"]
    known = runs.config("known", *options)
    runs.directory("known").mkdir()
    (runs.directory("known") / "journal.jsonl").write_text(line + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "forget", lambda self: None)
        train(known, devices=jax.devices()[:4])
    check_same(losses(cfg), losses(known))


@pytest.mark.parametrize(("environment", "found"), [
    ({}, None),
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, None),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "JAX's variables"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
    ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, None),
    ({"SLURM_NTASKS": "16"}, None),  # the shell of an allocation
    ({"SLURM_NTASKS": "16", "SLURM_STEP_NODELIST": "a[1-2]"}, "SLURM"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI"),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, "Cloud TPU"),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "JOB_COMPLETION_INDEX": "1"}, "Cloud TPU"),  # as on GKE
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
     "JAX's variables in a Kubernetes Indexed Job"),
    ({"JOB_COMPLETION_INDEX": "0"}, None),
])
def test_a_job_is_found_in_its_environment(environment, found):
    assert job(environment) == found


@pytest.mark.parametrize(("environment", "message"), [
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS is not set, but JAX_NUM"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not set"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "numbered 0 to 1"),
    ({"JOB_COMPLETION_INDEX": "3"}, "pod 3 of a Kubernetes Indexed Job, but nothing says how many .* set JAX_NUM_PROC"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "'two', which is not a"),
])
def test_half_a_job_is_refused(environment, message):
    with pytest.raises(LaunchError, match=message):
        job(environment)


def test_processes_that_a_launcher_has_joined_are_left_alone():
    code = ("import jax\n"
            f"jax.distributed.initialize('{free_address()}', 1, 0)\n"
            "from maxtext.parallel.launch import describe, join_processes\n"
            "print(describe(join_processes()))")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=ROOT, check=True,
                          timeout=60)
    assert done.stdout.startswith("1, found through its launcher, ")
