"""`maxtext launch slurm CONFIG --nodes N`: a run as a batch job of SLURM.

SLURM tells each process of its step about the others, and the run joins them (parallel/launch.py). The job is queued
again by SLURM itself: when a node fails (`--requeue`), when the run asks for another attempt (exit status 75), and some
minutes before its time is over, after a save. A mistake (2) and failed training (3) end it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from maxtext.config.arguments import Arguments
from maxtext.launch import job

SAVE_SECONDS = 300  # before the end of the job's time: for the update in progress and a save

SCRIPT = """\
#!/bin/bash
{options}
# Written by: maxtext launch slurm

cd -- {folder} || exit 2
stopped=0
# {seconds} s before the time is over SLURM tells this shell, which tells the step: the run then saves and ends. Through
# scancel, as srun itself ends its processes at once when it is told.
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 {command} &
step=$!
# The trap ends a wait early: only the end of the step itself counts.
while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break
done
if [ "$code" -eq {try_again} ] || {{ [ "$stopped" -eq 1 ] && [ "$code" -ne 2 ] && [ "$code" -ne 3 ]; }}; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ]; then
    echo "queued again: attempt $((${{SLURM_RESTART_COUNT:-0}} + 2)) of {attempts}"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
  fi
  echo "training stopped: all {attempts} attempts are spent (--retries); the same command goes on" >&2
fi
exit "$code"
"""


def run(argv: Sequence[str]) -> int:
    """Runs the verb. Exit status: 0 handed over or printed, 2 a mistake in what was asked for."""
    options = _options(argv)
    devices = None if options.gpus_per_node is None else options.nodes * options.gpus_per_node
    found = job.loaded(options.config, options.overrides, devices)
    if isinstance(found, int):
        return found
    cfg, _ = found
    # The folder is for the log: SLURM opens it before the script runs, and makes no folders for it.
    return job.hand_over(script(options, cfg.run_name, cfg.run_dir), ["sbatch"], "run this where SLURM's commands are, "
                         "or take the script there: add --dry-run > job.sh", dry_run=options.dry_run,
                         folder=cfg.run_dir)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(
        prog="maxtext launch slurm", description="Train a run as a batch job of SLURM, one process a node, which SLURM "
        "queues again until the run is complete. This folder and output_dir must be on a file system that all share.")
    job.add_config(parser, "train.steps=1000")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of the job (1)")
    parser.add_argument("--gpus-per-node", type=int, metavar="K", help="GPUs of each; without it the nodes' CPUs train")
    parser.add_argument("--time", metavar="LIMIT", help="of one attempt, such as 24:00:00")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION",
                        help="any other option of sbatch, such as --sbatch=--exclusive; repeatable")
    parser.add_argument("--retries", type=int, default=100, metavar="N", help="attempts after the first one (100)")
    parser.add_argument("--python", default=sys.executable, help="with this package, on the nodes (this one)")
    parser.add_argument("--dry-run", action="store_true", help="print the script instead of handing it to sbatch")
    options = parser.parse_intermixed_args(list(argv))
    job.check_lowest(parser, options, nodes=1, gpus_per_node=1, retries=0)
    return options


def script(options: argparse.Namespace, run_name: str, run_dir: str) -> str:
    """The batch script."""
    chosen = {"job-name": run_name, "nodes": options.nodes, "ntasks-per-node": 1,
              "gpus-per-node": options.gpus_per_node, "time": options.time, "partition": options.partition,
              "account": options.account, "output": os.path.join(os.path.abspath(run_dir), "slurm-%j.log"),
              "open-mode": "append", "signal": f"B:USR1@{SAVE_SECONDS}"}
    lines = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    command = [options.python, "-m", "maxtext.cli", "train", options.config, *options.overrides]
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {_one_word(line)}" for line in [*lines, "--requeue", *options.sbatch]),
        folder=shlex.quote(os.getcwd()), command=shlex.join(command), seconds=SAVE_SECONDS, try_again=job.TRY_AGAIN,
        retries=options.retries, attempts=options.retries + 1)


def _one_word(option: str) -> str:
    """An option as sbatch reads it in a script: a blank would end it."""
    return option if not any(letter.isspace() for letter in option) else '"' + option.replace('"', "") + '"'
