"""experts.jsonl of a run: what is recorded when, and that a run which is continued goes on in it."""

import json

import numpy as np
import pytest

from maxtext.config.architecture import MoeConfig
from maxtext.train.expert_loads import ExpertLoads
from maxtext.train.loop import train
from tests.runs import lines
from tests.tiny import tiny_config, tiny_model

MOE = ("model.d_ff=null", "model.moe={experts: 4, top_k: 2, d_expert: 32, load_balance_loss: 0.01, z_loss: 0.001}",
       "eval.every=null", "checkpoint.every=2", "log.tensorboard=false")


def recorded(folder):
    return [json.loads(line) for line in (folder / "experts.jsonl").read_text().splitlines()]


@pytest.mark.one_pass  # three runs
def test_loads_of_a_run_and_of_its_continuation(runs):
    train(runs.config("run", *MOE, "train.steps=3"))
    train(runs.config("run", *MOE, "train.steps=6"))
    train(runs.config("whole", *MOE, "train.steps=6"))
    found = recorded(runs.directory("run"))
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert found == recorded(runs.directory("whole"))
    for line in found:
        for layer in ("block 00", "block 01"):
            assert len(line[layer]) == 4
            assert sum(line[layer]) == pytest.approx(1, abs=2e-3)
    last = lines(runs.config("run", *MOE, "train.steps=6"))[-1]
    assert last["train/block 01/load imbalance"] == pytest.approx(4 * max(found[-1]["block 01"]), rel=1e-3)
    assert last["train/load imbalance"] == max(last[f"train/block 0{i}/load imbalance"] for i in (0, 1))
    unscaled = sum(last[f"train/block 0{i}/load balancing loss unscaled"] for i in (0, 1))
    assert last["train/load balancing loss"] == pytest.approx(0.01 / 2 * unscaled)
    assert 0 < last["train/router entropy"] <= np.log(4)


def test_two_hundred_lines_over_a_long_run(tmp_path):
    model = tiny_model(moe=MoeConfig(experts=4, d_expert=8))
    loads = ExpertLoads(str(tmp_path), tiny_config(model, steps=100_000), resume_step=-1)
    for step in range(1, 2001):
        loads.write(step, np.full((5, 4), 0.25))
    loads.close()
    assert [line["step"] for line in recorded(tmp_path)] == [1, 500, 1000, 1500, 2000]

