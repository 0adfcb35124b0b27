"""How long a sweep of tiny members takes, against as many runs one after another: the same runs, on the same machine.

    python benchmarks/sweep.py [--members 16] [--steps 100] [--json FILE] [--write] [key=value ...]

Each side is measured as a person meets it: `maxtext sweep`, and `maxtext train` for each member, with the start of its
process, without a compilation cache; and by its updates alone, from the metrics that it wrote (`time/step (s)`).

The members have 16 learning rates and the model of the tests' twins: 2 layers of width 32 and a vocabulary of 384, 8
sequences of 32 tokens in a batch, on random tokens. `--write` keeps the result in docs/measured/sweep.json and puts the
table into docs/sweeps.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_page import keep, machine

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("", "runs by themselves", "one sweep", "times less")
CONFIG = """\
model: {{vocab_size: 384, d_model: 32, n_layers: 2, n_heads: 4, d_ff: 64, layer_pattern: [window, full], window: 8}}
data: {{sequence_length: 32, vocab_size: 384, eos_id: 1, pad_id: 2, sources: {{all: {{paths: [{tokens}]}}}}}}
optim: {{lr: 1e-2}}
train: {{steps: {steps}, global_batch: 8, compute_dtype: float32, remat: {{mode: none}}}}
checkpoint: {{every: null}}
log: {{every: 1000, tensorboard: false, report: false}}
output_dir: {folder}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/, write the page's table")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        tokens, config = Path(folder, "tokens.npy"), Path(folder, "tiny.yml")
        np.random.default_rng(0).integers(3, 384, 1 << 18).astype(np.uint16).tofile(tokens)
        config.write_text(CONFIG.format(tokens=tokens, steps=args.steps, folder=folder))
        rates = [f"{0.001 * 1.2**i:.6f}" for i in range(args.members)]
        half = max(args.members // 2, 1)
        own = [timed("train", config, f"run_name=own{rate}", f"optim.lr={rate}", *args.overrides)
               for rate in rates[:half]]
        together = timed("sweep", config, "run_name=together", *args.overrides, "--over",
                         f"optim.lr={','.join(rates)}")
        own += [timed("train", config, f"run_name=own{rate}", f"optim.lr={rate}", *args.overrides)
                for rate in rates[half:]]
        own_updates = sum(updates(Path(folder, f"own{rate}")) for rate in rates)
        sweep_updates = updates(Path(folder, "together-sweep", f"lr={rates[0]}"))  # that all members share
    found = {"members": args.members, "updates": args.steps, "cpus": os.cpu_count(),
             "own_seconds": round(sum(wall for wall, _ in own), 2), "sweep_seconds": round(together[0], 2),
             "speedup": round(sum(wall for wall, _ in own) / together[0], 2),
             "own_cpu_seconds": round(sum(cpu for _, cpu in own), 2), "sweep_cpu_seconds": round(together[1], 2),
             "speedup_of_cpu": round(sum(cpu for _, cpu in own) / together[1], 2),
             "own_update_seconds": round(own_updates, 3),
             "sweep_update_seconds": round(sweep_updates, 3),
             "speedup_of_updates": round(own_updates / sweep_updates, 2)}
    print(json.dumps(found))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if args.write:
        words = " ".join(["python benchmarks/sweep.py --members", str(args.members), "--steps", str(args.steps),
                          *args.overrides])
        keep("sweep", "sweeps.md", COLUMNS, table(found), machine=where, command=words, raw=found,
             what=f"{args.members} tiny members (2 layers of width 32), {args.steps} updates")
    return 0


def table(found: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """What all runs by themselves and the sweep took: rows of COLUMNS."""
    kinds = {"CPU seconds": ("own_cpu_seconds", "sweep_cpu_seconds", "speedup_of_cpu"),
             "wall seconds": ("own_seconds", "sweep_seconds", "speedup"),
             f"seconds of updates 2 to {found['updates']}": ("own_update_seconds", "sweep_update_seconds",
                                                             "speedup_of_updates")}
    return [(f"{found['members']} members: {kind}", *(found[name] for name in names)) for kind, names in kinds.items()]


def timed(verb: str, *words: object) -> tuple[float, float]:
    """Wall and CPU seconds of one command, from the start of its process to its end."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": "", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-m", "maxtext.cli", verb, *map(str, words)], env=environment, check=True,
                   stdout=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, cpu


def updates(run_dir: Path) -> float:
    """Seconds of all updates of a run but the first, which warms up."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(record["time/step (s)"] for record in records if record["step"] > 1)


if __name__ == "__main__":
    sys.exit(main())
