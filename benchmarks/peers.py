"""Speed of a train step here and in peers, run by turns on this machine, as one table with ratios.

    python benchmarks/peers.py --torch PYTHON --maxtext PYTHON --olmo-core PYTHON [--rounds 2] [--only 8192] [--write]

Each run is a process of its own: train_step.py with this python, peer_torch.py and peer_maxtext.py with the pythons of
environments that have what these need (peer_maxtext.txt for the second). A round runs every trainer once on every model
before the next round begins, so that a busy minute of the machine falls on all. Of the rounds the best counts for each
trainer. A JSON line a run goes to stdout as it ends, the table comes last. `--write` keeps the runs in docs/peers.json
(those of other models stay) and writes their table into docs/comparison.md; it is for an idle machine. `--page` only
writes the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_page import processor, write_page

HERE = Path(__file__).resolve().parent
OURS, TORCH, OLMO_CORE, MAXTEXT = "ours", "torch.compile", "OLMo-core", "MaxText"
SCRIPTS = {OURS: ["train_step.py"], TORCH: ["peer_torch.py"], OLMO_CORE: ["peer_torch.py", "--olmo-core"],
           MAXTEXT: ["peer_maxtext.py"]}
SPEED, CPU_SPEED = "tokens/s", "tokens/CPU-second"
START, MEMORY = "process start to first step done (s)", "peak memory (GiB)"
COLUMNS = (SPEED, CPU_SPEED, START, MEMORY)
DOCS = HERE.parent / "docs"
WRITTEN = "written by python benchmarks/peers.py --write"
OUR_PLANS = ("olmo3_7b_tpu7x_128_remat_names", "olmo3_7b_tpu7x_128_remat_names_less")  # of docs/plans


class Workload(NamedTuple):
    """One model, and how many steps of it each trainer takes; a trainer that is not named does not run it."""

    label: str
    steps: Mapping[str, int]
    vocab: int = 8192
    experts: bool = False


WORKLOADS = {
    "8192": Workload("vocabulary 8,192", {OURS: 20, TORCH: 20, OLMO_CORE: 20, MAXTEXT: 14}),
    "100352": Workload("vocabulary 100,352", {OURS: 8, TORCH: 8, OLMO_CORE: 8, MAXTEXT: 5}, vocab=100352),
    # transformers has no OLMo 3 with experts
    "experts": Workload("8 experts, 2 a token", {OURS: 20, MAXTEXT: 10}, experts=True),
}


class Run(NamedTuple):
    """What one process measured."""

    workload: str
    trainer: str
    figures: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON", help="python with torch and transformers; else they are left out")
    parser.add_argument("--olmo-core", metavar="PYTHON", help="python with ai2-olmo-core; else it is left out")
    parser.add_argument("--maxtext", metavar="PYTHON", help="python with MaxText; else it is left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="models to run")
    parser.add_argument("--write", action="store_true", help="keep the runs in docs/ and write the table of the page")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page's tables from docs/ anew")
    args = parser.parse_args()
    if args.page:
        write(DOCS)
        return
    pythons = {OURS: sys.executable} | {
        name: python for name, python in ((TORCH, args.torch), (OLMO_CORE, args.olmo_core), (MAXTEXT, args.maxtext))
        if python is not None}
    runs, load = [], os.getloadavg()[0]
    for _ in range(args.rounds):
        for name in args.only:
            for trainer in WORKLOADS[name].steps:
                if trainer in pythons:
                    runs.append(measure(name, trainer, pythons[trainer]))
                    print(json.dumps(runs[-1]._asdict()), flush=True)
    print("\n".join(table(runs)))
    if args.write:
        keep(DOCS, runs, load)


def keep(docs: Path, runs: Sequence[Run], load: float) -> None:
    """Puts runs in place of those of the same models in peers.json, with where they ran, and writes the page anew.

    `load` is the machine's load average before the first of them.
    """
    file = docs / "peers.json"
    kept = json.loads(file.read_text()) if file.exists() else {"models": {}}
    for name in dict.fromkeys(run.workload for run in runs):
        kept["models"][name] = {
            "measured": datetime.date.today().isoformat(), "machine": processor(), "cores": os.cpu_count(),
            "load before": round(load, 1),
            "runs": [{"trainer": run.trainer, "figures": dict(run.figures)} for run in runs if run.workload == name]}
    kept["models"] = {name: kept["models"][name] for name in WORKLOADS if name in kept["models"]}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    write(docs)


def recorded(docs: Path) -> tuple[list[Run], list[dict[str, Any]]]:
    """The runs of peers.json, and what is said of each model's."""
    models = json.loads((docs / "peers.json").read_text())["models"]
    runs = [Run(name, run["trainer"], run["figures"]) for name, model in models.items() for run in model["runs"]]
    return runs, [*models.values()]


def write(docs: Path) -> None:
    """Puts the tables of peers.json, and where they were measured, between the marks of comparison.md."""
    runs, models = recorded(docs)
    said = dict.fromkeys(f"{model['measured']}, {model['cores']} cores of {model['machine']}" for model in models)
    versions = {name: f"{name} {number}" for run in runs for name, number in run.figures.items()
                if name in ("jax", "torch", "transformers", "ai2-olmo-core", "maxtext")}
    write_page(docs / "comparison.md", f"peers: {WRITTEN}",
               "\n".join([*table(runs), "", f"Measured {'; '.join(said)}; {', '.join(versions.values())}."]))
    write_page(docs / "comparison.md", f"compiled: {WRITTEN}", "\n".join(compiled(docs)))


def compiled(docs: Path) -> list[str]:
    """Markdown lines: the step of OLMo 3 7B that two frameworks' settings compile to, one row each."""
    theirs = json.loads((docs / "peers.json").read_text())["compiled"]
    columns = ("arguments GiB", "temporaries GiB", "cycles M", "all-gathers", "reduce-scatters", "libtpu", "measured")
    lines = [f"| trainer | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for plan in OUR_PLANS:
        ours = json.loads((docs / "plans" / f"{plan}.json").read_text())
        assert ours["topology"] == theirs["topology"], plan
        program, counts = ours["program"], dict.fromkeys(("all-gather", "reduce-scatter"), 0)
        for moved in program["traffic"]:
            if moved["kind"] in counts:
                counts[moved["kind"]] += moved["count"]
        figures = (*(f"{program['memory'][part] / 2**30:.2f}" for part in ("arguments", "temporaries")),
                   f"{program['cycles'] / 1e6:,.0f}", *map(str, counts.values()), program["versions"]["libtpu"],
                   program["date"])
        lines.append(f"| ours, `{ours['run_name']}`, keeps {' '.join(ours['remat']['save'])} | {' | '.join(figures)} |")
    figures = (f"{theirs[name]:,}" if name == "cycles M" else str(theirs[name]) for name in columns)
    return [*lines, f"| {theirs['trainer']} | {' | '.join(figures)} |"]


def measure(name: str, trainer: str, python: str) -> Run:
    """Runs one trainer once.

    Raises:
      SystemExit: its process failed; the message ends with what it wrote last.
    """
    work = WORKLOADS[name]
    script, *options = SCRIPTS[trainer]
    command = [python, str(HERE / script), *options, "--vocab", str(work.vocab), "--steps", str(work.steps[trainer])]
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
                for trainer in sorted(trainers, key=[*SCRIPTS].index)}
        for trainer, figures in best.items():
            cells = ["" if key not in figures else f"{figures[key]:,}" for key in COLUMNS]
            ratios = ["" if trainer == OURS else f"{best[OURS][key] / figures[key]:.2f}" for key in (SPEED, CPU_SPEED)]
            lines.append(f"| {WORKLOADS[name].label} | {trainer} | {' | '.join([*cells, *ratios])} |")
    return lines


def best_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The highest speeds, and the least time and memory."""
    return {key: (min if key in (START, MEMORY) else max)(figures[key] for figures in rounds)
            for key in COLUMNS if key in rounds[0]}


if __name__ == "__main__":
    main()
