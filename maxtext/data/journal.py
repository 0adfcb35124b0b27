"""The journal of a run: decisions about its data that a continuation must take again, one JSON object a line.

    {"kind": "jump", "update": 57, "back_to": 40, "first": 53, "last": 57, "why": "4 updates in a row were skipped"}
    {"kind": "masked", "instance": 812, "why": "code.npy: id 50000 at byte offset 3306 is not below vocab_size 384"}

A line is on disk before what it decides is done, so that a run which is killed in between does it all the same. Each
process appends to a file of its own, `journal.jsonl` and `journal.1.jsonl` ..., and reads all of them at the start.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from typing import Any

from maxtext.config.reason import placed
from maxtext.data import DataError


@dataclasses.dataclass(frozen=True)
class Jump:
    """Batches `first` to `last` of the data's order are passed over, since `update`, when the run went `back_to`."""

    update: int
    back_to: int
    first: int
    last: int
    why: str = ""

    @property
    def batches(self) -> tuple[int, int]:
        return self.first, self.last


class Journal:
    """The decisions so far, and where further ones are written.

    Args:
      run_dir: folder of the run; None keeps them in memory alone.
      process: index of this process of the job.

    Raises:
      DataError: a journal cannot be read.
    """

    def __init__(self, run_dir: str | None = None, process: int = 0) -> None:
        self._run_dir, self._process = run_dir, process
        self.jumps: list[Jump] = []
        self.masked: dict[int, str] = {}
        for path in self._paths():
            try:
                with open(path, encoding="utf-8") as file:
                    lines = file.read().splitlines()
            except OSError as error:
                raise DataError(f"the journal of the run cannot be read: {placed(error)}") from None
            for line in lines:
                self._take(_parsed(line))

    def jump(self, jump: Jump) -> None:
        """Decides to pass over batches."""
        self._write({"kind": "jump", **dataclasses.asdict(jump)})
        self.add_jumps([jump])

    def mask(self, instance: int, why: str) -> None:
        """Decides to leave an instance out of the loss, whatever is read of it later."""
        self._write({"kind": "masked", "instance": instance, "why": why})
        self.masked[instance] = why

    def state(self) -> dict[str, Any]:
        """For a checkpoint: enough to go on without the files."""
        return {"jumps": [dataclasses.asdict(jump) for jump in self.jumps], "masked": {
            str(instance): why for instance, why in sorted(self.masked.items())}}

    def add_state(self, state: dict[str, Any]) -> None:
        """Takes in the decisions of a checkpoint that the files do not have."""
        self.add_jumps([Jump(**jump) for jump in state.get("jumps", [])])
        self.masked = {int(instance): why for instance, why in state.get("masked", {}).items()} | self.masked

    def add_jumps(self, jumps: list[Jump]) -> None:
        known = {jump.batches for jump in self.jumps}
        self.jumps = sorted([*self.jumps, *(jump for jump in jumps if jump.batches not in known)],
                            key=lambda jump: jump.first)

    def lacking(self, state: dict[str, Any], step: int) -> Jump | None:
        """A jump that a checkpoint of `step` should have made and has not: it is of the branch that was left."""
        made = {(jump["first"], jump["last"]) for jump in state.get("jumps", [])}
        return next((jump for jump in self.jumps if jump.back_to < step and jump.batches not in made), None)

    def forget(self) -> None:
        """Starts over, as a run does that has no checkpoint."""
        for path in self._paths():
            os.remove(path)
        self.jumps, self.masked = [], {}

    def _take(self, entry: dict[str, Any]) -> None:
        kind = entry.pop("kind", None)
        if kind == "jump":
            self.add_jumps([Jump(**entry)])
        elif kind == "masked":
            self.masked[entry["instance"]] = entry["why"]

    def _paths(self) -> list[str]:
        if self._run_dir is None:
            return []
        folder = glob.escape(self._run_dir)
        return sorted([*glob.glob(f"{folder}/journal.jsonl"), *glob.glob(f"{folder}/journal.[0-9]*.jsonl")])

    def _write(self, entry: dict[str, Any]) -> None:
        if self._run_dir is None:
            return
        name = f"journal.{self._process}.jsonl" if self._process else "journal.jsonl"
        try:
            with open(os.path.join(self._run_dir, name), "ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                torn = b"\n" if end and file.read(1) != b"\n" else b""  # its writer was killed
                file.write(torn + json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"a decision about the data could not be written down: {placed(error)}") from None


def data_step(update: int, jumps: list[Jump]) -> int:
    """Which batch of the data's order, from 1, an update takes; `jumps` by ascending `first`."""
    for jump in jumps:
        if update >= jump.first:
            update += jump.last - jump.first + 1
    return update


def _parsed(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:  # torn by a kill: what it was to decide was not done
        return {}
    return entry if isinstance(entry, dict) else {}
