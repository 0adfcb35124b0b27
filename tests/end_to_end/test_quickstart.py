"""The main job as the README starts it: the text of this interpreter, and configs/quickstart.yml as it stands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from maxtext.data.command import run_prepare as prepare
from tests.runs import ROOT, command, environment

FALL = 0.4  # of held-out bits per byte, from the first evaluation to the last


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_held_out_bits_per_byte_fall_by_two_fifths_in_both_domains(tmp_path: Path):
    assert prepare(["--out", str(tmp_path / "data")]) == 0
    # One device and a compiler that optimises, as for a person; the other tests have neither. One thread, because the
    # other cores have other tests to run: more of them wait for each other.
    environ = environment(1) | {"XLA_FLAGS": "", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "true", "PJRT_NPROC": "1"}
    done = subprocess.run(command("quickstart", f"data.prepared={tmp_path / 'data'}", f"output_dir={tmp_path}",
                                  "eval.every=600"), cwd=ROOT, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "quickstart is complete: update 600 of 600" in done.stdout
    folder = tmp_path / "quickstart"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(601))
    waited, spent = (sum(record[metric] for record in records[1:])
                     for metric in ("throughput/device/data loading (s)", "time/step (s)"))
    assert waited < 0.01 * spent, "waiting for data is less than 1% of the steps"
    for name in ("code", "prose"):
        curve = [record[f"eval/lm/{name}/BPB"] for record in records if f"eval/lm/{name}/BPB" in record]
        assert len(curve) == 2  # evaluated at both ends alone, to save a minute
        assert curve[-1] < (1 - FALL) * curve[0], (name, curve)
    found = {path.name for path in folder.iterdir()}
    assert {"config.yml", "metrics.jsonl", "tensorboard", "checkpoints", "report.html", "loss.png"} <= found
