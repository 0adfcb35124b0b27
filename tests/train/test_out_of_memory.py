"""A device that is out of memory: what lies there is named, and what would help; the allocation that fails is real."""

from __future__ import annotations

import gzip
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.train.out_of_memory import biggest_arrays, settings_that_help
from tests.runs import Runs
from tests.tiny import mesh_of


@pytest.fixture
def little_memory() -> Iterator[None]:
    """This process gets 16 GiB more at most, on whatever machine."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs Linux")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_activations_beyond_all_memory(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """The update wants some hundred GiB for its activations; its weights are small."""
    arguments = runs.arguments("run", "model.d_ff=200000", "train.global_batch=4096", "train.loss_chunk_tokens=16384",
                               "eval.every=null", "log.report=false")
    assert cli.main(["train", *arguments]) == 3
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "training stopped" in line]
    assert error.startswith("training stopped: out of memory allocating ")
    assert "segments.0.0.mlp.gate_up (1, 4, 2, 200000)" in error
    assert "Settings that need less: train.gradient_accumulation_steps=2, train.remat.mode=full, " in error
    folder = runs.directory()
    assert gzip.decompress((folder / "memory.prof").read_bytes()), "a profile for pprof"
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "failure"
    assert "out of memory" in last["why"]


def test_arrays_count_what_one_device_holds_with_moments(runs: Runs):
    cfg = runs.config("run", "model.d_ff=96")
    whole, named = biggest_arrays(cfg, mesh_of((1, 1, 1)))
    shared, parts = biggest_arrays(cfg, mesh_of((1, 4, 1)))
    assert named[0] == ("embed", (384, 32), 3 * 4 * 384 * 32)
    assert parts[0] == ("embed", (384, 8), 3 * 4 * 384 * 8)
    assert 3 < whole / shared < 4


def test_settings_already_made_are_not_proposed(runs: Runs):
    assert settings_that_help(runs.config(), 1)[:2] == ["train.gradient_accumulation_steps=2", "train.remat.mode=full"]
    assert settings_that_help(runs.config(), 8)[0] == "train.remat.mode=full", "one sequence a device is not cut"
    small = runs.config("run", "train.gradient_accumulation_steps=8", "train.remat.mode=full",
                        "train.loss_chunk_tokens=64", "optim.moments_dtype=bfloat16")
    assert settings_that_help(small, 1) == ["more devices with mesh.fsdp=-1", "optim.offload=host",
                                         "a smaller train.global_batch"]
    assert Path(small.run_dir).name == "run"
