"""Speed of a train step here and in two peers, run by turns on this machine, as one table with ratios.

    python benchmarks/peers.py --torch PYTHON --maxtext PYTHON [--rounds 2] [--only 8192 100352 experts]

Each run is a process of its own: train_step.py with this python, peer_torch.py and peer_maxtext.py with the pythons of
environments that have what these need (peer_maxtext.txt for the second). A round runs every trainer once on every model
before the next round begins, so that a busy minute of the machine falls on all. Of the rounds the best counts for each
trainer. A JSON line a run goes to stdout as it ends, the table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
OURS, TORCH, MAXTEXT = "ours", "torch.compile", "MaxText"
SPEED, CPU_SPEED = "tokens/s", "tokens/CPU-second"
START, MEMORY = "process start to first step done (s)", "peak memory (GiB)"
COLUMNS = (SPEED, CPU_SPEED, START, MEMORY)


class Workload(NamedTuple):
    """One model, and how many steps of it each trainer takes; a trainer that is not named does not run it."""

    steps: Mapping[str, int]
    vocab: int = 8192
    experts: bool = False


WORKLOADS = {
    "8192": Workload({OURS: 20, TORCH: 20, MAXTEXT: 14}),
    "100352": Workload({OURS: 8, TORCH: 8, MAXTEXT: 5}, vocab=100352),
    "experts": Workload({OURS: 20, MAXTEXT: 10}, experts=True),  # transformers has no OLMo 3 with experts
}


class Run(NamedTuple):
    """What one process measured."""

    workload: str
    trainer: str
    figures: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON", help="python with torch and transformers; else they are left out")
    parser.add_argument("--maxtext", metavar="PYTHON", help="python with MaxText; else it is left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="models to run")
    args = parser.parse_args()
    pythons = {OURS: sys.executable} | {name: python for name, python in ((TORCH, args.torch), (MAXTEXT, args.maxtext))
                                        if python is not None}
    runs = []
    for _ in range(args.rounds):
        for name in args.only:
            for trainer in WORKLOADS[name].steps:
                if trainer in pythons:
                    runs.append(measure(name, trainer, pythons[trainer]))
                    print(json.dumps(runs[-1]._asdict()), flush=True)
    print("\n".join(table(runs)))


def measure(name: str, trainer: str, python: str) -> Run:
    """Runs one trainer once.

    Raises:
      SystemExit: its process failed; the message ends with what it wrote last.
    """
    work = WORKLOADS[name]
    script = {OURS: "train_step.py", TORCH: "peer_torch.py", MAXTEXT: "peer_maxtext.py"}[trainer]
    command = [python, str(HERE / script), "--vocab", str(work.vocab), "--steps", str(work.steps[trainer])]
    environ = dict(os.environ)
    if trainer != OURS:
        environ.pop("PYTHONPATH", None)  # which may lead to our package, of the same name as MaxText's
    done = subprocess.run(command + ["--experts"] * work.experts, text=True, capture_output=True, env=environ)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(lines[-1])
    if trainer == OURS and work.experts:  # a second model in the same process, whose start is the dense one's
        prefix = "experts: "
        figures = {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}
    return Run(name, trainer, figures)


def table(runs: Sequence[Run]) -> list[str]:
    """Markdown lines: the best of each trainer's rounds, and how many times as fast as it ours is."""
    lines = [f"| model | trainer | {' | '.join(COLUMNS)} | ours is faster by | by CPU-seconds |",
             "|---" * (len(COLUMNS) + 4) + "|"]
    for name in dict.fromkeys(run.workload for run in runs):
        trainers = dict.fromkeys(run.trainer for run in runs if run.workload == name)
        best = {trainer: best_of([run.figures for run in runs if (run.workload, run.trainer) == (name, trainer)])
                for trainer in sorted(trainers, key=(OURS, TORCH, MAXTEXT).index)}
        for trainer, figures in best.items():
            cells = ["" if key not in figures else f"{figures[key]:,}" for key in COLUMNS]
            ratios = ["" if trainer == OURS else f"{best[OURS][key] / figures[key]:.2f}" for key in (SPEED, CPU_SPEED)]
            lines.append(f"| {name} | {trainer} | {' | '.join([*cells, *ratios])} |")
    return lines


def best_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The highest speeds, and the least time and memory."""
    return {key: (min if key in (START, MEMORY) else max)(figures[key] for figures in rounds)
            for key in COLUMNS if key in rounds[0]}


if __name__ == "__main__":
    main()
