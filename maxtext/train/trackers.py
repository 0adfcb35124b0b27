"""Experiment trackers that a run reports to while it trains: Weights & Biases and MLflow.

Each gets the records of metrics.jsonl, every step once. What a tracker was given cannot be taken back, so a run that
goes on from a step before the newest one (it was killed, or went back) opens a new run of the tracker, in the same
group, and fills it from metrics.jsonl first; the newest run of the group is whole and has no step twice. After a clean
stop the same run of the tracker goes on.

A tracker works in a thread of its own: one that hangs or fails is reported once and then left, and training goes on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import queue
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.report.run_files import parse_line
from maxtext.train.console import warn_once

STATE = "trackers.json"
WAITING_MOST = 20_000  # records that a slow tracker may lag behind
CLOSE_SECONDS = 60.0
_BATCH = 200  # records that are handed over together
Records = Sequence[tuple[int, float, Mapping[str, float]]]  # step, seconds since 1970, metrics


class TrackerError(ValueError):
    """A tracker that the config asks for is not installed."""


class Tracker(Protocol):
    """One tracker. Everything may raise anything."""

    name: str

    def open(self, run: str, group: str, again: bool) -> None:
        """Begins the run named `run`, or goes on with it when `again`."""

    def log(self, records: Records) -> None:
        """Takes records of ascending steps."""

    def finish(self) -> None:
        """Hands over what waits, and ends the run."""


class WandB:
    """Weights & Biases, over the network or into files that `wandb sync` sends later."""

    name = "wandb"

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._run = cfg, None

    def open(self, run: str, group: str, again: bool) -> None:
        import wandb

        os.makedirs(self._cfg.run_dir, exist_ok=True)
        quiet = self._cfg.log.wandb == "offline"
        self._run = wandb.init(
            project=self._cfg.log.wandb_project, id=run, name=run, group=group, dir=self._cfg.run_dir, resume="allow",
            mode=self._cfg.log.wandb, config=dataclasses.asdict(self._cfg),
            settings=wandb.Settings(console="off", silent=quiet, x_disable_stats=True))

    def log(self, records: Records) -> None:
        assert self._run is not None
        for step, _, values in records:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        assert self._run is not None
        self._run.finish()


class MLflow:
    """An MLflow tracking server or data base. Its names have no parentheses and no %: see `mlflow_name`."""

    name = "mlflow"

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg

    def open(self, run: str, group: str, again: bool) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._cfg.log.mlflow)
        name = self._cfg.log.mlflow_experiment
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        if again:
            found = self._client.search_runs([number], f"attributes.run_name = '{run}'", max_results=1)
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run, tags={"group": group}).info.run_id
        for key, value in _flat(dataclasses.asdict(self._cfg)):
            self._client.log_param(self._id, key, str(value)[:500])

    def log(self, records: Records) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(mlflow_name(name), float(value), round(1000 * at), step) for step, at, values in records
                   for name, value in values.items()]
        for start in range(0, len(metrics), 1000):  # most that the server takes at once
            self._client.log_batch(self._id, metrics=metrics[start:start + 1000])

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """The name that MLflow allows: `optim/LR (group 0)` is `optim/LR group 0`, `(%)` is `percent`."""
    return name.replace("%", "percent").replace("(", "").replace(")", "")


def check_trackers(cfg: Config) -> None:
    """Raises TrackerError when a tracker is not installed: found out before anything is trained."""
    for key, module, wanted in (("log.wandb", "wandb", cfg.log.wandb != "none"),
                                ("log.mlflow", "mlflow", cfg.log.mlflow is not None)):
        found = importlib.util.find_spec(module) if wanted else None
        if wanted and (found is None or found.origin is None):  # a folder of that name, as wandb leaves, is no package
            raise TrackerError(f"{key} needs the package {module}, which is not installed; pip install "
                               f"'maxtext[{module}]', or leave {key} away")


def open_trackers(cfg: Config, resume_step: int) -> list[Delivery]:
    """The trackers of a run, which goes on after `resume_step` (-1: it is new)."""
    wanted: list[Tracker] = [WandB(cfg)] if cfg.log.wandb != "none" else []
    wanted += [MLflow(cfg)] if cfg.log.mlflow is not None else []
    return [Delivery(tracker, cfg.run_dir, cfg.run_name, resume_step) for tracker in wanted]


class Delivery:
    """Hands records to a tracker in a thread, each step once, as the module says."""

    def __init__(self, tracker: Tracker, run_dir: str, run_name: str, resume_step: int) -> None:
        self._tracker, self._run_dir, self._resume_step = tracker, run_dir, resume_step
        self._jsonl = os.path.join(run_dir, "metrics.jsonl")
        before = self._read_state()
        self._again = resume_step >= 0 and before.get("until") == resume_step
        self._group = before.get("group") or f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', run_name)}-{uuid.uuid4().hex[:8]}"
        self._part = before.get("part", 0) + (not self._again)
        self._queue: queue.Queue[tuple[int, float, Mapping[str, float]] | None] = queue.Queue(WAITING_MOST)
        self._last, self._failed = resume_step, False
        self._replay_bytes = 0  # of metrics.jsonl as it is now, before the run adds to it
        if not self._again and os.path.isfile(self._jsonl):
            self._replay_bytes = os.path.getsize(self._jsonl)
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Hands over the metrics of a step; returns at once."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((step, at, values))
            self._last = step
        except queue.Full:
            self._give_up(f"it lags {WAITING_MOST:,} updates behind")

    def close(self) -> None:
        """Waits for what was handed over, but not for ever."""
        if self._failed:
            return
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            self._give_up("it does not take what it is given")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._give_up(f"it did not end within {CLOSE_SECONDS:g} s")

    @property
    def _run(self) -> str:
        return self._group if self._part == 1 else f"{self._group}-{self._part}"

    def _work(self) -> None:
        try:
            self._write_state(None)
            self._tracker.open(self._run, self._group, self._again)
            recorded = self._recorded()
            while replayed := list(itertools.islice(recorded, _BATCH)):
                self._tracker.log(replayed)
            for records in self._arriving():
                self._tracker.log(records)
            self._tracker.finish()
            if not self._failed:  # given up meanwhile, it lacks what was not taken: the next start opens a new run
                self._write_state(self._last)
        except Exception as error:  # whatever a library raises: the run is worth more
            self._give_up(" ".join(reason(error).split())[:300])

    def _arriving(self) -> Iterator[Records]:
        """What waits, in lists, until the end is announced."""
        while not self._failed:
            found, end = [self._queue.get()], False
            while len(found) < _BATCH and found[-1] is not None and not self._queue.empty():
                found.append(self._queue.get())
            if found[-1] is None:
                found, end = found[:-1], True
            if found:
                yield [one for one in found if one is not None]
            if end:
                return

    def _give_up(self, why: str) -> None:
        self._failed = True
        warn_once(f"{self._tracker.name} gets no metrics any more: {why}; metrics.jsonl has them all, and the next "
                  f"start of this run hands them over", key=self._tracker.name)

    def _recorded(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """What metrics.jsonl held when the run began: up to the step that it goes on after."""
        if not self._replay_bytes:
            return
        with open(self._jsonl, "rb") as file:
            while file.tell() < self._replay_bytes:
                record = parse_line(file.readline())
                if record is not None and record["step"] <= self._resume_step:
                    at = float(record.pop("time/unix (s)", 0.0))
                    yield record.pop("step"), at, record

    def _read_state(self) -> dict[str, Any]:
        try:
            with open(os.path.join(self._run_dir, STATE), encoding="utf-8") as file:
                return json.load(file).get(self._tracker.name, {})
        except (OSError, ValueError, AttributeError):
            return {}

    def _write_state(self, until: int | None) -> None:
        """`until`: the step after which the tracker was closed in order; None while it is open."""
        path = os.path.join(self._run_dir, STATE)
        with _STATE_LOCK:
            try:
                with open(path, encoding="utf-8") as file:
                    state = json.load(file)
            except (OSError, ValueError):
                state = {}
            state[self._tracker.name] = {"group": self._group, "part": self._part, "until": until}
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace(path + ".tmp", path)


_STATE_LOCK = threading.Lock()  # the trackers of a run share the file


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value
