"""`maxtext launch ray`: what Ray is asked for, and real jobs of two CPU workers, of which one is killed in one job."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.cli import main
from maxtext.config.load import load
from maxtext.config.schema import Config
from maxtext.launch.ray import run as run_on_ray
from maxtext.train.loop import train
from tests.materials import imported
from tests.recipes import DENSE, STEPS, Recipes
from tests.runs import ROOT, Runs, lines, reproducible

SMALL = f"{DENSE} checkpoint.every=3"
CPU = ("--workers", "2", "--cpu", "--devices-per-worker", "2")


@pytest.mark.parametrize(("words", "asked"), [
    (["--workers", "4", "--topology", "4x4", "--accelerator", "TPU-V6E", "mesh.fsdp=16", "train.global_batch=16"],
     {"num_workers": 4, "use_tpu": True, "topology": "4x4", "accelerator_type": "TPU-V6E"}),
    (["--workers", "2", "--gpus-per-worker", "4", "mesh.fsdp=8"],
     {"num_workers": 2, "use_gpu": True, "resources_per_worker": {"GPU": 4}}),
    ([*CPU, "mesh.fsdp=4"], {"num_workers": 2, "resources_per_worker": {"CPU": 1}}),
])
def test_what_ray_is_asked_for(words: list[str], asked: dict, capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "ray", "quickstart", *words, "--retries", "5", "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["scaling_config"] == asked
    assert shown["failure_config"] == {"max_failures": 5}
    if "--cpu" in words:
        assert shown["worker_environment"]["JAX_PLATFORMS"] == "cpu"
        assert shown["worker_environment"]["XLA_FLAGS"].split()[-1] == "--xla_force_host_platform_device_count=2"
        assert shown["worker_environment"]["XLA_FLAGS"].count("device_count") == 1


@pytest.mark.parametrize(("words", "message"), [
    (["--workers", "2"], "give one of --topology with --accelerator, --gpus-per-worker and --cpu"),
    (["--workers", "2", "--cpu", "--gpus-per-worker", "1"], "give one of"),
    (["--workers", "2", "--topology", "4x4"], "--topology and --accelerator go together"),
    (["--workers", "2", "--topology", "4", "--accelerator", "TPU-V6E"], "--topology 4: give sizes such as 4x4"),
    (["--workers", "0", "--cpu"], "--workers 0: give 1 or more"),
    (["--workers", "1", "--gpus-per-worker", "1", "--devices-per-worker", "2"], "only goes with --cpu"),
])
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "ray", "quickstart", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_the_workers_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "ray", "quickstart", *CPU, "mesh.fsdp=8"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mesh.data 1 x mesh.fsdp 8 x mesh.tensor 1 = 8 devices, but there are 4")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "ray", "quickstart", *CPU, "mesh.fsdp=4"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("maxtext launch ray needs Ray Train (")
    assert told.endswith("install it with: pip install 'maxtext[ray]'\n")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Ray on this machine, for all tests of the file: it takes seconds to start."""
    imported("ray")
    imported("pydantic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves its workers no processor beside other tests
        patch.delenv("PJRT_NPROC")  # of 8 devices; a worker has 2
        import ray

        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
        yield
        ray.shutdown()


class Jobs:
    """The quickstart in small, as end_to_end/ray.sh trains it: runs of a folder, in `runs`."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.folder = folder
        self._overrides = [f"data.prepared={prepared}", f"train.steps={STEPS}", f"schedule.total_steps={STEPS}",
                           "mesh.fsdp=4", *SMALL.split()]

    def arguments(self, name: str, output_dir: str) -> list[str]:
        return [str(ROOT / "configs" / "quickstart.yml"), f"run_name={name}", f"output_dir={output_dir}",
                *self._overrides]

    def config(self, name: str) -> Config:
        path, *overrides = self.arguments(name, str(self.folder / "runs"))
        return load(path, overrides)


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Jobs:
    """Runs, of which `killed` was trained by two workers, one of which was killed once."""
    from tests.launch.dying import train_and_die_once

    jobs = Jobs(tmp_path_factory.mktemp("ray"), prepared_text)
    with contextlib.chdir(jobs.folder):  # relative paths are those of whoever starts the job
        assert run_on_ray([*jobs.arguments("killed", "runs"), *CPU, "--report-every", "3"], train_and_die_once) == 0
    return jobs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_worker_is_replaced_and_the_run_is_that_of_one_process(jobs: Jobs):
    from ray.train import Result

    run_dir = jobs.folder / "runs" / "killed"
    died = int((run_dir / "died").read_text())
    assert not Path(f"/proc/{died}").exists(), "it was killed"
    one = jobs.config("one")
    train(one, devices=jax.devices()[:4])
    expected, got = lines(one), lines(jobs.config("killed"))
    assert [line["step"] for line in got] == list(range(9))
    assert [line.get("data/fingerprint") for line in got] == [line.get("data/fingerprint") for line in expected]
    for name in ("train/CE loss", "eval/lm/macro/CE loss"):
        np.testing.assert_allclose(*([line[name] for line in side if name in line] for side in (got, expected)),
                                   rtol=2e-6)
    (folder,) = (run_dir / "ray").iterdir()
    reported = Result.from_path(folder)
    assert reported.metrics["step"] == 8
    assert reported.metrics["train/CE loss"] == got[-1]["train/CE loss"]
    with reported.checkpoint.as_directory() as pointer:
        assert json.loads(Path(pointer, "run.json").read_text())["run_directory"] == "runs/killed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_of_the_recipe_to_which_nothing_happens_has_the_same_bits(jobs: Jobs, prepared_text: Path):
    Recipes(jobs.folder, prepared_text)("ray.sh", SMALL)
    got, whole = (lines(jobs.config(name)) for name in ("killed", "ray"))
    assert reproducible(got) == reproducible(whole)


@pytest.mark.slow
def test_a_mistake_is_told_and_not_tried_again(cluster, runs: Runs, capfd: pytest.CaptureFixture[str]):
    words = runs.arguments("wrong", "data.prepared=absent", "mesh.fsdp=4")
    assert main(["launch", "ray", *words, *CPU]) == 2
    assert "Ray gave up" not in capfd.readouterr().err


def test_a_part_of_a_slice_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    imported("ray")
    imported("pydantic")
    words = ["--topology", "4x4", "--accelerator", "TPU-V6E", "mesh.fsdp=16", "train.global_batch=16"]
    assert main(["launch", "ray", "quickstart", "--workers", "8", *words]) == 2
    assert "give --workers 4" in capsys.readouterr().err
    assert main(["launch", "ray", "quickstart", "--workers", "3", *words]) == 2
    assert "Ray Train refuses this job: " in capsys.readouterr().err
    assert "RAY_ADDRESS" not in os.environ
