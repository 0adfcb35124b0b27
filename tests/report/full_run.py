"""A run directory that has something for every part of the report: written by hand, as no short run has it all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.report.test_report import make_run

START = 1.7e9
ENVIRONMENT = {"device": "TPU v6e", "mesh": {"fsdp": 16}, "processes": 4, "system": "Linux, 180 CPUs",
               "versions": {"jax": "0.10.2", "python": "3.11.7"}}
CONFIG = """run_name: {name}                              # command line
description: Every part of a report, with a failure and a recovery   # configs/x.yml:3
optim: {{lr: {lr}}}                             # configs/x.yml:5
train:
  steps: 400                                    # configs/x.yml:12
"""


def record(step: int, shift: float) -> dict[str, Any]:
    noise = 0.06 * math.sin(12.9 * step) * math.cos(7.1 * step)
    loss = 7.5 * math.exp(-step / 90) + 2.4 + shift + noise
    found: dict[str, Any] = {
        "step": step, "time/unix (s)": START + 30 + 2.5 * step + (120 if step > 250 else 0), "train/CE loss": loss,
        "optim/total grad norm": 0.8 + abs(noise) * 9 + (40 if step == 300 else 0), "time/step (s)": 2.2 + noise,
        "optim/LR (group 0)": 1e-3 * min(step / 40, 1) * (1.1 - step / 400),
        "optim/LR (group 1)": 1e-3 * min(step / 40, 1) * (1.1 - step / 400),
        "optim/step skipped": int(step == 300), "throughput/total tokens": 524_288 * step,
        "throughput/device/MFU": 41 + 9 * noise, "throughput/device/data loading (%)": 0.3 + abs(noise),
        "throughput/device/data loading (s)": 0.01, "memory/host (GiB)": 12.1 + step / 900,
        "data/tokens/code": 524_288 * step * 0.3, "data/tokens/prose": 524_288 * step * (0.6 - step / 4000),
        "data/tokens/mathematics": 524_288 * step * (0.1 + step / 4000), "train/load imbalance": 1.4,
        **{f"train/block {i:02d}/load imbalance": 1.2 + i / 5 + noise for i in range(4)},
        **{f"train/block {i:02d}/router entropy": 2.4 - i / 5 + noise for i in range(4)}}
    if step % 50 == 0:
        for name, bits in (("code", 3.5), ("prose", 2.2), ("macro", 2.9), ("micro", 2.8)):
            value = bits * math.exp(-step / 200) + 0.8 + shift
            found |= {f"eval/lm/{name}/BPB": value, f"eval/lm/{name}/CE loss": 2 * value,
                      f"eval/lm/{name}/PPL": math.exp(2 * value), f"eval/lm/{name}/tokens": 81_920}
        found |= {f"eval/downstream/{task} (BPB v2)": 1.4 * math.exp(-step / 300) for task in ("arc_easy", "hellaswag")}
    return found


def write_full_run(folder: Path, name: str = "olmo3_190m", shift: float = 0.0, lr: float = 1e-3) -> str:
    run = make_run(folder, [record(step, shift) for step in range(1, 401)], CONFIG.format(name=name, lr=lr))
    events = [{"time": START, "event": "begin", "devices": 16, "host": "tpu-0", "environment": ENVIRONMENT},
              {"time": START + 20, "event": "compile", "seconds": 18.0},
              {"time": START + 30, "event": "init", "seconds": 9.0}]
    events += [{"time": START + 31 + 2.5 * step, "event": "checkpoint", "step": step, "seconds": 4.0}
               for step in (100, 200)]
    events += [{"time": START + 30 + 2.5 * 250, "event": "failure", "why": "JaxRuntimeError: a peer has gone <away>"},
               {"time": START + 700, "event": "begin", "devices": 16, "host": "tpu-0",
                "environment": {**ENVIRONMENT, "versions": {"jax": "0.10.2", "python": "3.12.1"}}},
               {"time": START + 740, "event": "restore", "seconds": 21.0, "step": 200},
               {"time": START + 741, "event": "lost", "updates": 50, "seconds": 110.0, "step": 200,
                "until": START + 650},
               {"time": START + 760, "event": "init", "seconds": 12.0},
               {"time": START + 152 + 2.5 * 300, "event": "skip", "step": 300},
               {"time": START + 152 + 2.5 * 300, "event": "checkpoint", "step": 300, "seconds": 4.2},
               {"time": START + 160 + 2.5 * 400, "event": "checkpoint", "step": 400, "seconds": 4.1},
               {"time": START + 170 + 2.5 * 400, "event": "eval", "step": 400, "seconds": 31.0},
               {"time": START + 171 + 2.5 * 400, "event": "stop", "why": "complete"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    shares = {f"block {i:02d}": [(1 + (e * 7 + i) % 5) / 96 for e in range(32)] for i in range(4)}
    (folder / "experts.jsonl").write_text(json.dumps({"step": 400, **shares}) + "\n")
    samples = [{"step": step, "prompt": "def ", "text": f"add(a, b):\n    return a + b  # {step}"}
               for step in (100, 400)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    operations = [{"name": f"fusion.{i}", "seconds": 0.4 / (i + 1), "share": 0.3 / (i + 1), "count": 128,
                   "source": f"jit(train_step)/transpose(jvp())/while/body/checkpoint/layer/mlp/dot_general_{i}"}
                  for i in range(14)]
    (folder / "profile.json").write_text(json.dumps({
        "steps": [10, 13], "devices": 16, "seconds": 8.9, "trace": "profile/plugins/profile/x/h.xplane.pb",
        "shares": {"computing": 0.81, "communication": 0.13, "idle": 0.06}, "operations": operations}))
    return run
