"""Writing a run's metrics: metrics.jsonl (the record that reports and scripts read), and what follows it: metrics.csv,
TensorBoard events, and experiment trackers (trackers.py).

The format of metrics.jsonl is described in report/run_files.py. There is one line a step: a second `write` of the
newest step is merged into its line. A write that fails, as on a full disk, is warned about once and stops no training.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.report.run_files import last_step, parse_line, read_metrics, step_of
from maxtext.train.console import warn_once
from maxtext.train.csv_table import CsvTable
from maxtext.train.trackers import Delivery, open_trackers

__all__ = ["MetricsWriter", "last_step", "read_metrics"]


class MetricsWriter:
    """Writes the metrics of a run; on other processes than the primary it does nothing."""

    def __init__(self, run_dir: str, cfg: Config, *, resume_step: int, primary: bool = True) -> None:
        """Open the files of `run_dir`, dropping what an interrupted run wrote for steps after `resume_step`.

        A run that starts anew gives -1.
        """
        self._jsonl = self._events = self._table = None
        self._trackers: list[Delivery] = []
        if not primary:
            return
        try:
            os.makedirs(run_dir, exist_ok=True)
            self._jsonl = JsonLines(os.path.join(run_dir, "metrics.jsonl"), resume_step)
        except OSError as error:
            warn_once(f"metrics.jsonl cannot be opened and is not written: {reason(error)}")
        if cfg.log.tensorboard:
            self._events = TensorBoard(os.path.join(run_dir, "tensorboard"), resume_step)
        if self._jsonl is None:
            return
        if cfg.log.csv:
            try:
                self._table = CsvTable(os.path.join(run_dir, "metrics.csv"), os.path.join(run_dir, "metrics.jsonl"))
            except OSError as error:
                warn_once(f"metrics.csv cannot be opened and is not written: {reason(error)}")
        self._trackers = open_trackers(cfg, resume_step)

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write the metrics of `step`, which is the newest step or a later one; the line is on its way to the disk."""
        if self._jsonl is None and self._events is None:
            return
        now = round(time.time(), 3)
        values = {name: _number(value) for name, value in scalars.items()}
        if self._jsonl is not None:
            try:
                self._jsonl.write(step, values | {"time/unix (s)": now})
            except OSError as error:
                warn_once(f"metrics.jsonl cannot be written, steps will be missing in it: {reason(error)}",
                          key="metrics.jsonl")
        if self._table is not None:
            try:
                self._table.write(step, values | {"time/unix (s)": now})
            except OSError as error:  # half a row may stand there; the next attempt writes all of it again
                warn_once(f"metrics.csv is no longer written: {reason(error)}", key="metrics.csv")
                self._table = None
        for tracker in self._trackers:
            tracker.write(step, values, now)
        if self._events is not None:
            try:
                self._events.write(step, values, now)
            except (OSError, ImportError) as error:  # a record cut off in the middle makes all later ones unreadable
                warn_once(f"TensorBoard events are no longer written: {reason(error)}", key="tensorboard")
                self._events = None

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for sink in (self._jsonl, self._table, self._events, *self._trackers):
            if sink is not None:
                try:
                    sink.close()
                except OSError as error:
                    warn_once(f"closing the metrics failed: {reason(error)}")
        self._jsonl = self._events = self._table = None
        self._trackers = []


class JsonLines:
    """An append-only metrics.jsonl whose last line can still be extended. The file may end in a torn line at any kill,
    and never in anything worse: each line is one write at a known offset.
    """

    def __init__(self, path: str, resume_step: int) -> None:
        """Open `path`, keeping only whole lines of steps up to `resume_step`, one a step and in order."""
        self._last: dict[str, Any] = {"step": -1}
        self._start = self._end = 0  # of the last line, in bytes; the end of the file is `_end`
        if os.path.exists(path):
            self._keep_until(path, resume_step)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, step: int, values: dict[str, Any]) -> None:
        newest = self._last["step"]
        assert step >= newest, f"metrics of step {step} after those of step {newest}"
        if step > newest:
            self._last, self._start = {"step": step}, self._end
        self._last = self._last | values
        line = _encode(self._last)
        written, self._end = os.pwrite(self._file, line, self._start), self._start
        if written < len(line):  # the disk is full: leave no half line, the next write starts where this one did
            os.ftruncate(self._file, self._start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written
        os.ftruncate(self._file, self._end)  # a merged line is seldom shorter than the one that it replaces

    def close(self) -> None:
        os.close(self._file)

    def _keep_until(self, path: str, resume_step: int) -> None:
        """Rewrite the file (all or nothing) when it holds anything else, and remember its last line."""
        kept, changed, damaged = [], False, 0
        with open(path, "rb") as file:
            for line in file:
                step = step_of(line) if line.endswith(b"\n") else None
                damaged += step is None and line.endswith(b"\n")
                if step is None or step > resume_step:
                    changed = True
                    continue
                while kept and kept[-1][0] >= step:  # an older attempt at the same steps: the newest one counts
                    kept.pop()
                    changed = True
                kept.append((step, line))
        if damaged:
            warn_once(f"{path}: dropped {damaged} damaged lines")
        if changed:
            with open(path + ".tmp", "wb") as file:
                file.writelines(line for _, line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + ".tmp", path)
        self._end = sum(len(line) for _, line in kept)
        self._start = self._end
        if kept:
            self._last = parse_line(kept[-1][1]) or {"step": kept[-1][0]}
            self._start = self._end - len(kept[-1][1])


class TensorBoard:
    """An event file with one event a step, under the metrics' own names.

    Records are framed here because tensorboardX's writers rename `train/CE loss`, make an event of each value, and hand
    events to a thread through a bounded queue: when that thread dies of a full disk, training would hang.
    """

    def __init__(self, folder: str, resume_step: int) -> None:
        self._folder, self._resume_step, self._file = folder, resume_step, None

    def write(self, step: int, values: Mapping[str, Any], wall_time: float) -> None:
        # Imported at the first write, which is after the first step: it costs up to a quarter of a second.
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]  # made at run time
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        if self._file is None:
            os.makedirs(self._folder, exist_ok=True)
            earlier = os.listdir(self._folder)
            name = f"events.out.tfevents.{int(wall_time)}.{socket.gethostname()}.{os.getpid()}.{len(earlier)}"
            self._file = open(os.path.join(self._folder, name), "wb", buffering=0)  # noqa: SIM115  closed by close()
            self._append(Event(wall_time=wall_time, file_version="brain.Event:2"))
            if earlier:  # TensorBoard then hides later steps that earlier attempts wrote
                start = SessionLog(status=SessionLog.START)
                self._append(Event(wall_time=wall_time, step=self._resume_step + 1, session_log=start))
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._append(Event(wall_time=wall_time, step=step, summary=summary))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, event: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        assert self._file is not None
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join((length, struct.pack("<I", masked_crc32c(length)), data,
                           struct.pack("<I", masked_crc32c(data))))
        if self._file.write(record) != len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def _number(value: Any) -> int | float:
    """A Python number from a Python, numpy or jax scalar; integers stay exact."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, int) else float(value)


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps({name: _safe(value) for name, value in record.items()}, allow_nan=False).encode() + b"\n"


def _safe(value: Any) -> Any:
    """A number that JSON has, or its name; a list of finite numbers is itself."""
    if isinstance(value, list) or math.isfinite(value):
        return value
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
