"""What metrics.jsonl says of a run: names, tokens, and seconds that add up to the clock on the wall."""

from __future__ import annotations

import csv
import math
import re
import time
from typing import Any

import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.schema import Config
from maxtext.report.metric_names import matching
from maxtext.train import loop
from maxtext.train.loop import Outcome, Run, train
from tests.runs import Runs, lines, some_devices

EVERY_UPDATE = {
    "step", "train/CE loss", "train/PPL", "train/Z loss", "train/Z loss unscaled", "train/masked labels (%)",
    "train/masked instances (%)", "optim/total grad norm", "optim/LR (group 0)", "optim/LR (group 1)",
    "optim/step skipped", "throughput/device/TPS", "throughput/device/data loading (s)",
    "throughput/device/data loading (%)", "throughput/total tokens", "data/fingerprint", "time/step (s)",
    "time/unix (s)", "memory/host (GiB)", "data/tokens/code", "data/tokens/prose"}
EVALUATION = {f"eval/lm/{name}/{kind}" for name in ("code", "prose", "macro", "micro")
              for kind in ("CE loss", "PPL", "BPB")}
EVALUATION |= {"eval/lm/code/tokens", "eval/lm/prose/tokens", "throughput/in-loop eval time (s)", "time/eval (s)"}
START = {"time/start (s)", "time/compile (s)"}
STEP_LINE = re.compile(
    r"step \d+/40 \| loss \d\.\d{3} \| grad_norm \d\.\d\d \| lr \d\.\de-\d\d \| tok/s [\d,]+ \| mfu n/a \| "
    r"mem \d+\.\d GiB \| data \d+\.\d% \| eta (\d+h)?(\d+m)?\d+s( \| skipped)?")


def timed(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> float:
    """Trains, and returns the seconds until the last update is trained, evaluated and saved."""
    ends, run_loop = [], Run.loop

    def noted(self: Run, stopper: Any) -> Outcome:
        outcome = run_loop(self, stopper)
        ends.append(time.perf_counter())
        return outcome

    monkeypatch.setattr(loop.Run, "loop", noted)
    began = time.perf_counter()
    assert train(cfg, devices=some_devices(2)) == Outcome(cfg.train.steps)
    return ends[0] - began


@pytest.mark.parametrize("accumulation", [1, 4])
def test_tokens_and_seconds_add_up(runs: Runs, monkeypatch: pytest.MonkeyPatch, accumulation: int,
                                   capsys: pytest.CaptureFixture[str]):
    """Each update counts its global batch once, however it is split; every second is counted once, too."""
    cfg = runs.config("run", f"train.gradient_accumulation_steps={accumulation}", "log.every=4")
    wall = timed(cfg, monkeypatch)
    first, *updates = lines(cfg)
    assert set(first) == {"step", "model/parameters", "time/unix (s)"} | EVALUATION
    for step, record in enumerate(updates, start=1):
        extra = EVALUATION | {"time/checkpoint (s)"} if step % 10 == 0 else START if step == 1 else set()
        assert set(record) == EVERY_UPDATE | extra, step
        assert record["throughput/total tokens"] == step * 8 * 32
        assert record["data/tokens/code"] + record["data/tokens/prose"] == step * 8 * 32
        assert record["throughput/device/TPS"] * 2 * record["time/step (s)"] == pytest.approx(8 * 32)
        assert record["train/PPL"] == pytest.approx(math.exp(record["train/CE loss"]))
        assert record["train/Z loss"] == pytest.approx(record["train/Z loss unscaled"] * cfg.train.z_loss)
        assert record["train/masked labels (%)"] == pytest.approx(1 / 32)
        assert record["optim/LR (group 0)"] == record["optim/LR (group 1)"]
        assert record["throughput/device/data loading (%)"] == pytest.approx(
            100 * record["throughput/device/data loading (s)"] / record["time/step (s)"])
    assert updates[-1]["throughput/total tokens"] == 40 * 8 * 32
    for record in (first, *updates):
        assert {name: matching(name) for name in record if len(matching(name)) != 1} == {}
    with open(f"{cfg.run_dir}/metrics.csv", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(41))
    assert min(updates[-1][f"data/tokens/{name}"] for name in ("code", "prose")) > 0
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, writer=False)
    for step in (10, 40):  # the manifest of a checkpoint has them, without reading its arrays
        told = checkpoints.read_extra(step)["data"]["source_tokens"]
        assert told == {name: updates[step - 1][f"data/tokens/{name}"] for name in ("code", "prose")}
    checkpoints.close()

    seconds = {part: sum(record.get(f"time/{part} (s)", 0.0) for record in [first, *updates])
               for part in ("step", "start", "compile", "eval", "checkpoint")}
    print("SECONDS", seconds, wall, sum(seconds.values()) / wall)
    assert min(seconds.values()) > 0.005
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.05), (seconds, wall)

    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].split("/")[0]) for line in shown] == list(range(4, 41, 4))
    assert all(STEP_LINE.fullmatch(line) for line in shown), shown


def test_accumulation_changes_no_loss_beyond_rounding(runs: Runs):
    for accumulation in (1, 8):
        cfg = runs.config(f"run{accumulation}", f"train.gradient_accumulation_steps={accumulation}", "train.steps=4",
                          "eval.every=null")
        assert train(cfg, devices=some_devices(1)) == Outcome(4)
    for whole, split in zip(lines(runs.config("run1"))[1:], lines(runs.config("run8"))[1:], strict=True):
        assert split["data/fingerprint"] == whole["data/fingerprint"]
        assert split["throughput/total tokens"] == whole["throughput/total tokens"]
        assert split["train/CE loss"] == pytest.approx(whole["train/CE loss"], rel=1e-6)
        assert split["optim/total grad norm"] == pytest.approx(whole["optim/total grad norm"], rel=1e-5)
