"""Every sink of metrics has each step once, whatever happens to a run; one that fails is reported once and left."""

from __future__ import annotations

import csv
import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from maxtext.config import schema
from maxtext.config.load import load
from maxtext.report.run_files import read_metrics
from maxtext.train import console, trackers
from maxtext.train.metrics import MetricsWriter
from maxtext.train.trackers import Delivery, Records, TrackerError, check_trackers, mlflow_name
from tests.materials import imported
from tests.runs import ROOT, environment
from tests.train.test_metrics import events

LOSS, RATE, BITS = "train/CE loss", "optim/LR (group 0)", "eval/lm/code/BPB"


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console, "_warned", set())


def config(folder: str | Path, *options: str) -> schema.Config:
    return load(ROOT / "configs" / "quickstart.yml", [f"output_dir={Path(folder).parent}",
                                                      f"run_name={Path(folder).name}", *options])


def writer(folder: str | Path, cfg: schema.Config, resume: int) -> MetricsWriter:
    return MetricsWriter(str(folder), cfg, resume_step=resume)


def wrote(sink: MetricsWriter, steps: Iterable[int], attempt: int = 0) -> None:
    for step in steps:
        sink.write(step, {LOSS: step + attempt / 4, RATE: 0.5} | ({BITS: 2.0} if step % 4 == 0 else {}))


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def shown_by_tensorboard(folder: Path) -> dict[int, float]:
    """Steps and losses once TensorBoard has hidden what a later start says was in vain."""
    found: dict[int, float] = {}
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: int(path.suffix[1:])):
        for event in events(path):
            if event.HasField("session_log"):
                found = {step: loss for step, loss in found.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == LOSS:
                    assert event.step not in found
                    found[event.step] = value.simple_value
    return found


def offline_history(path: Path) -> list[dict[str, Any]]:
    """The history records of an offline file of Weights & Biases: protocol buffers in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4:at + 7])
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            read = Record.FromString(record)
            record = b""
            if read.HasField("history"):
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json)
                              for item in read.history.item})
    return found


def wandb_runs(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """By run, the history by step; a step twice is an error."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        steps = runs.setdefault(path.stem.removeprefix("run-"), {})
        for item in offline_history(path):
            assert item["_step"] not in steps
            steps[item["_step"]] = item
    return runs


def killed(folder: Path, first: int, last: int, resume: int, *options: str) -> None:
    child = subprocess.run([sys.executable, str(ROOT / "tests/train/tracked.py"), str(folder), str(first), str(last),
                            str(resume), *options], env=environment(1), capture_output=True, text=True, timeout=120)
    assert child.returncode == -signal.SIGKILL, child.stderr


def life(folder: Path, *options: str) -> dict[int, float]:
    """Killed after step 7, on from 5 to 9, a clean stop, on to 12; returns the losses that count."""
    killed(folder, 0, 7, -1, *options)
    cfg = config(folder, *options)
    for resume, last, attempt in ((5, 9, 1), (9, 12, 2)):
        sink = writer(folder, cfg, resume)
        wrote(sink, range(resume + 1, last + 1), attempt)
        sink.close()
    return {step: step + (0 if step <= 5 else 0.25 if step <= 9 else 0.5) for step in range(13)}


def test_files_have_each_step_once_through_a_kill_and_a_stop(tmp_path: Path):
    folder = tmp_path / "run"
    losses = life(folder)
    assert {record["step"]: record[LOSS] for record in read_metrics(str(folder / "metrics.jsonl"))} == losses
    rows = table(folder)
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert {int(row["step"]): float(row[LOSS]) for row in rows} == losses
    assert [row[BITS] for row in rows[:5]] == ["2.0", "", "", "", "2.0"]
    assert shown_by_tensorboard(folder) == losses


def test_the_table_follows_new_names_merged_steps_and_numbers_that_are_not_finite(tmp_path: Path):
    sink = writer(tmp_path / "run", config(tmp_path / "run"), -1)
    sink.write(1, {"a": 1.5})
    sink.write(2, {"a": float("nan")})
    sink.write(2, {"b, c": float("-inf")})
    sink.write(3, {"b, c": 7})
    sink.write(3, {"b, c": 2})
    sink.close()
    rows = [{name: value for name, value in row.items() if name != "time/unix (s)"} for row in table(tmp_path / "run")]
    assert rows == [{"step": "1", "a": "1.5", "b, c": ""}, {"step": "2", "a": "NaN", "b, c": "-Infinity"},
                    {"step": "3", "a": "", "b, c": "2"}]


def test_trackers_have_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first run of each is cut off by the kill; the second one holds all, through the clean stop."""
    imported("wandb")
    imported("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder, uri = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    losses = life(folder, "log.wandb=offline", f"log.mlflow={uri}", "log.tensorboard=false")
    state = json.loads((folder / "trackers.json").read_text())
    assert {name: (one["part"], one["until"]) for name, one in state.items()} == {"wandb": (2, 12), "mlflow": (2, 12)}

    runs, group = wandb_runs(folder), state["wandb"]["group"]
    assert set(runs) == {group, f"{group}-2"}
    assert {step: item[LOSS] for step, item in runs[f"{group}-2"].items()} == losses
    assert runs[f"{group}-2"][4][BITS] == 2.0

    client, group = MlflowClient(tracking_uri=uri), state["mlflow"]["group"]
    experiment = client.get_experiment_by_name("maxtext")
    assert experiment is not None
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == {group, f"{group}-2"}
    whole = found[f"{group}-2"]
    history = client.get_metric_history(whole.info.run_id, LOSS)
    assert sorted((one.step, one.value) for one in history) == sorted(losses.items())
    assert {one.step for one in client.get_metric_history(whole.info.run_id, mlflow_name(RATE))} == set(losses)
    assert (whole.info.status, whole.data.tags["group"], whole.data.params["run_name"]) == ("FINISHED", group, "run")


def test_a_tracker_that_fails_is_reported_once_and_caught_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]):
    imported("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    folder = tmp_path / "run"
    sink = writer(folder, config(folder, f"log.mlflow=file:{tmp_path}/refused", "log.tensorboard=false"), -1)
    wrote(sink, range(4))
    sink.close()
    error = capsys.readouterr().err
    assert error.count("warning:") == 1
    assert "mlflow gets no metrics any more: The filesystem tracking backend" in error
    assert [record["step"] for record in read_metrics(str(folder / "metrics.jsonl"))] == list(range(4))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sink = writer(folder, config(folder, f"log.mlflow={uri}", "log.tensorboard=false"), 3)
    wrote(sink, [4])
    sink.close()
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("maxtext").experiment_id])  # type: ignore[union-attr]
    assert [one.step for one in client.get_metric_history(run.info.run_id, LOSS)] == list(range(5))


def test_a_tracker_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]):
    """A pipe that nobody opens at the other end, where the library wants its data base."""
    imported("mlflow")
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "run"
    sink = writer(folder, config(folder, f"log.mlflow=sqlite:///{tmp_path}/pipe", "log.tensorboard=false"), -1)
    wrote(sink, range(4))
    sink.close()
    assert capsys.readouterr().err.count("warning: mlflow gets no metrics any more") == 1
    assert len(read_metrics(str(folder / "metrics.jsonl"))) == 4


class Slow:
    """A tracker that takes nothing until it is let go on."""

    name = "slow"

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.run, self.steps = "", list[int]()

    def open(self, run: str, group: str, again: bool) -> None:
        self.run = run

    def log(self, records: Records) -> None:
        self.asked.set()
        self.go.wait(60)
        self.steps += [step for step, _, _ in records]

    def finish(self) -> None:
        pass


def recorded(folder: Path, *steps: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, LOSS: 1.0, "time/unix (s)": 2.0}) + "\n" for step in steps)


def test_one_that_was_given_up_and_comes_back_does_not_count_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     capsys: pytest.CaptureFixture[str]):
    """The next start fills a new run, though it begins where the tracker stopped to be given anything."""
    monkeypatch.setattr(trackers, "WAITING_MOST", 3)
    slow = Slow()
    behind = Delivery(slow, str(tmp_path), "run", -1)
    behind.write(0, {LOSS: 1.0}, 2.0)
    assert slow.asked.wait(60)
    while not behind._failed:
        behind.write(behind._last + 1, {LOSS: 1.0}, 2.0)
    behind.close()
    assert behind._thread.is_alive(), "nobody waits for what was given up"
    slow.go.set()
    behind._thread.join(60)
    assert slow.steps != list(range(behind._last + 1)), "some waited and were not taken"
    assert "slow gets no metrics any more: it lags 3 updates behind" in capsys.readouterr().err
    recorded(tmp_path, *range(behind._last + 1))
    after = Slow()
    after.go.set()
    Delivery(after, str(tmp_path), "run", behind._last).close()
    assert (after.run, after.steps) == (f"{slow.run}-2", list(range(behind._last + 1)))


def test_what_is_written_meanwhile_is_not_replayed_too(tmp_path: Path):
    """As the line of the restored update, where a kill had cut it off."""
    recorded(tmp_path, 0, 1, 2)
    slow = Slow()
    delivery = Delivery(slow, str(tmp_path), "run", 3)
    recorded(tmp_path, 3)
    delivery.write(3, {LOSS: 1.0}, 2.0)
    slow.go.set()
    delivery.close()
    assert slow.steps == [0, 1, 2, 3]


def test_a_folder_of_its_name_is_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights & Biases leaves a folder `wandb` where it was used."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(TrackerError, match=r"log.wandb needs the package wandb"):
        check_trackers(config(tmp_path / "run", "log.wandb=offline"))


@pytest.mark.parametrize(("option", "module"), [("log.wandb=online", "wandb"), ("log.mlflow=http://x", "mlflow")])
def test_one_that_is_not_installed_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  option: str, module: str):
    monkeypatch.setitem(sys.modules, module, None)  # as Python remembers what it did not find
    cfg = config(tmp_path / "run", option)
    with pytest.raises(TrackerError, match=rf"log.{module} needs the package {module}, which is not installed; pip "
                                           rf"install 'maxtext\[{module}\]', or leave log.{module} away"):
        check_trackers(cfg)
    check_trackers(config(tmp_path / "run"))
