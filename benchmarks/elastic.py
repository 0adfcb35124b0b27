"""Drills of elastic training: a job on this machine whose workers are killed, stopped and come back, with its journal.

    python benchmarks/elastic.py [CONFIG] [--workers 4] [--devices-per-worker 2] [--trials 16] [--write] [key=value ...]

prints what each death of a worker cost; without a config, of a model of 0.92M parameters on random tokens. `--write`
keeps it in docs/measured/recoveries.json and puts the table into docs/reliability.md. The functions are those that the
tests and the fault campaign use.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_page import keep, machine, shown

ROOT = Path(__file__).resolve().parents[1]
MODEL = ("model.d_model=128", "model.d_ff=384", "model.n_layers=4", "mesh.data=-1", "mesh.fsdp=1",
         "train.steps=1000000", "schedule.total_steps=1000000", "checkpoint.every=1000",
         "checkpoint.keep_last=1")  # without a config; what is on disk must not be newer than what is in memory


@dataclasses.dataclass
class Job:
    """A running `maxtext launch local`."""

    supervisor: subprocess.Popen[str]
    run_dir: Path
    log: Path

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """The journal so far, or its events of one kind."""
        found = read_lines(self.run_dir / "elastic.jsonl")
        return found if event is None else [line for line in found if line["event"] == event]

    def pids(self) -> dict[int, int]:
        """The newest process of each worker, dead ones too."""
        return {line["worker"]: line["pid"] for line in self.events("started")}

    def members(self) -> list[int]:
        """Of the newest open generation, by rank."""
        opened = self.events("opened")
        return opened[-1]["members"] if opened else []

    def step(self) -> int:
        """The last update in metrics.jsonl, -1 before the first line."""
        return self.step_of(self.run_dir)

    @staticmethod
    def step_of(run_dir: Path) -> int:
        from maxtext.report.run_files import last_step

        return last_step(str(run_dir))

    def wait_for(self, what: Callable[[], Any], seconds: float = 180.0, name: str = "") -> Any:
        """Waits until `what()` is true and returns it; AssertionError with the log when the job ends before."""
        deadline, ended = time.monotonic() + seconds, False
        while not (found := what()):
            assert not ended, f"the job ended with {self.supervisor.returncode}, without {name or what}: {self.tail()}"
            assert time.monotonic() < deadline, f"no {name or what} in {seconds:g} s: {self.tail()}"
            ended = self.supervisor.poll() is not None  # then it looks once more
            time.sleep(0.02)
        return found

    def wait_for_step(self, step: int, seconds: float = 180.0) -> None:
        self.wait_for(lambda: self.step() >= step, seconds, f"update {step}")

    def send(self, workers: Sequence[int], number: signal.Signals) -> float:
        """Signals workers, and returns when (monotonic)."""
        pids = self.pids()
        at = time.monotonic()
        for worker in workers:
            os.kill(pids[worker], number)
        return at

    def end(self, seconds: float = 180.0) -> int:
        """Waits for the end; the exit code."""
        try:
            return self.supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {seconds:g} s: {self.tail()}") from None

    def tail(self) -> str:
        logs = [self.log, *sorted((self.run_dir / "workers").glob("*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists())


@contextlib.contextmanager
def job(config: Path | str, run_dir: Path, workers: int, devices: int, overrides: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ, options: Sequence[str] = (),
        command: str = "") -> Iterator[Job]:
    """Starts a job; whatever happens inside, none of its processes is left afterwards.

    `command` is a file to run in place of the command line.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.parent / f"{run_dir.name}.log"
    with open(log, "w") as file:
        supervisor = subprocess.Popen(
            [sys.executable, *([command] if command else ["-m", "maxtext.cli"]), "launch", "local", str(config),
             f"--workers={workers}", f"--devices-per-worker={devices}", *options, f"output_dir={run_dir.parent}",
             f"run_name={run_dir.name}", *overrides],
            env={**environment, "PYTHONPATH": str(ROOT)}, stdout=file, stderr=subprocess.STDOUT, text=True)
    one = Job(supervisor, run_dir, log)
    try:
        yield one
    finally:
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
        for pid in one.pids().values():  # the ids of those that they replaced may be somebody else's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON objects."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What one fault cost; all but steps in seconds.

    Attributes:
      noticed: from the fault to the supervisor's knowledge of it.
      regrouped: from the fault until the last member of the new group had the state.
      compiled: longest compilation (or load from the cache) of a member afterwards.
      resumed: from the fault to the first new update.
      lost: updates that were done and are done again.
    """

    noticed: float
    regrouped: float
    compiled: float
    resumed: float
    lost: int
    source: str


def recovery(events: Sequence[Mapping[str, Any]], at: float, step: int) -> Recovery | None:
    """The recovery from a fault at `at` (monotonic), when `step` updates were done; None while it lasts."""
    later = [event for event in events if event["monotonic"] >= at]
    opened = [event for event in later if event["event"] == "opened"]
    for group in reversed(opened):
        of_group = [event for event in later if event.get("generation") == group["generation"]]
        named = {name: [event for event in of_group if event["event"] == name]
                 for name in ("restore", "restored from", "compile", "first update")}
        if len(named["first update"]) < len(group["members"]):
            continue
        noticed = [event["monotonic"] for event in later if event["event"] in ("death", "hang", "stuck")]
        source = named["restored from"][0]
        return Recovery(min(noticed) - at, max(e["monotonic"] for e in named["restore"]) - at,
                        max(e["seconds"] for e in named["compile"]),
                        max(e["monotonic"] for e in named["first update"]) - at, max(0, step - source["step"]),
                        source["source"])
    return None


def kill_and_recover(one: Job, workers: Sequence[int], number: signal.Signals = signal.SIGKILL,
                     seconds: float = 120.0) -> Recovery:
    """Kills workers and waits until the job steps on."""
    step = one.step()
    at = one.send(workers, number)
    return one.wait_for(lambda: recovery(one.events(), at, step), seconds, "recovery")


def kill_twice(one: Job, first: int, second: int, seconds: float = 120.0) -> Recovery:
    """Kills a second worker at the moment when the others begin to form a group without the first."""
    before, step = len(one.events("proposed")), one.step()
    at = one.send([first], signal.SIGKILL)
    one.wait_for(lambda: len(one.events("proposed")) > before, 10, "proposal")
    one.send([second], signal.SIGKILL)
    one.wait_for(lambda: any(e["worker"] == second and e["monotonic"] > at for e in one.events("death")), 10, "death")
    return one.wait_for(lambda: recovery(one.events(), at, step), seconds, "recovery")


def wait_until_whole(one: Job, workers: int, seconds: float = 180.0) -> None:
    """Waits until all workers belong to the group and it has stepped."""

    def whole() -> bool:
        opened = one.events("opened")
        if not opened or len(opened[-1]["members"]) < workers:
            return False
        firsts = [event for event in one.events("first update") if event["generation"] == opened[-1]["generation"]]
        return len(firsts) == workers

    one.wait_for(whole, seconds, "whole group")


ROWS = {"noticed": "SIGKILL, until the supervisor knows",
        "regrouped": "SIGKILL, until all that are left have the state",
        "compiled": "step compiled, from the cache",
        "resumed": "SIGKILL, until the next update is done",
        "lost": "updates done again, with a snapshot every 10"}
DIGITS = {"noticed": 4, "lost": None}  # after the point; 2 of all else

COLUMNS = ("seconds", "median", "worst")


def table(recoveries: Sequence[Recovery]) -> list[tuple[str, float, float]]:
    """The median and the worst of each part: rows of COLUMNS."""
    rows = []
    for name, what in ROWS.items():
        values = [getattr(one, name) for one in recoveries]
        rows.append((what, *(round(value, DIGITS.get(name, 2)) for value in (statistics.median(values), max(values)))))
    return rows


def measure(config: Path, run_dir: Path, workers: int, devices: int, trials: int, seed: int,
            overrides: Sequence[str]) -> tuple[list[Recovery], int]:
    """Kills one worker again and again; the recoveries, and how many workers died that were not killed."""
    chance, recoveries = random.Random(seed), list[Recovery]()
    with job(config, run_dir, workers, devices, overrides) as one:
        for trial in range(trials):
            wait_until_whole(one, workers)
            one.wait_for_step(one.step() + chance.randint(3, 12))
            worker = chance.choice(one.members()) if trial % 4 else one.members()[0]
            recoveries.append(kill_and_recover(one, [worker]))
            print(f"trial {trial}: worker {worker} killed: {recoveries[-1]}", flush=True)
        one.supervisor.send_signal(signal.SIGTERM)
        assert one.end() == 0, one.tail()
        return recoveries, len(one.events("death")) - trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", help="a YAML; without, a small model on random tokens")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--devices-per-worker", type=int, default=2)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the result in docs/, write the page's table")
    args = parser.parse_intermixed_args()
    where = machine()
    overrides = [*args.overrides, "elastic.regroups_per_hour=1000", "log.report=false", "log.tensorboard=false"]
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        config = args.config
        if config is None or "=" in config:
            from benchmarks.fault_ground import write_config

            overrides = [*MODEL, *([config] if config else []), *overrides]
            config = write_config(Path(folder))
        found, others = measure(config, Path(folder) / "runs" / "drill", args.workers, args.devices_per_worker,
                                args.trials, args.seed, overrides)
    print(shown(COLUMNS, table(found)))
    if args.write:
        keep("recoveries", "reliability.md", COLUMNS, table(found), machine=where,
             command="python benchmarks/elastic.py",
             what=f"{args.trials} kills of one worker, every fourth of rank 0; {args.workers} workers with "
                  f"{args.devices_per_worker} virtual devices each; {others or 'no'} other worker died",
             raw=[dataclasses.asdict(one) for one in found])


if __name__ == "__main__":
    main()
