"""The files in which supervisor and workers meet: the generation, what each worker answers, and its heartbeat.

They lie in a folder of a file system in memory. Every file has one writer, who replaces it whole, so that a reader sees
all of it or the one before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from contextlib import suppress
from typing import Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """Who belongs to the job. A worker leaves its group, answers, and joins once the generation is open.

    Attributes:
      number: grows by one with each change.
      members: worker numbers; the place in it is the rank.
      gentle: leave after the same update as everybody, with a snapshot; else at once.
      address: of the coordination service.
      open: all members have answered, so that nobody waits for one that died before.
      opened: `time.monotonic()` of the proposal.
    """

    number: int
    members: tuple[int, ...]
    gentle: bool
    address: str
    open: bool
    opened: float


@dataclasses.dataclass(frozen=True)
class Beat:
    """A worker's sign of life.

    Attributes:
      pid: of the process.
      phase: what it does, since `since`; "ready" outside of any group.
      step: updates dispatched.
      longest: seconds of its longest update.
      at: when it was written; both are of `time.monotonic()`, which all processes of a machine share.
    """

    pid: int
    generation: int
    phase: str
    step: int
    since: float
    longest: float
    at: float


class Control:
    """The folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._seen: tuple[int, int] | None = None
        self._generation: Generation | None = None
        os.makedirs(folder, exist_ok=True)

    # ---- by the supervisor

    def publish(self, generation: Generation) -> None:
        self._replace("generation", dataclasses.asdict(generation))

    def answered(self, number: int) -> set[int]:
        """The workers that have left their group for generation `number`."""
        found = {worker: self._read(f"answer_{worker}") for worker in self._numbers("answer_")}
        return {worker for worker, words in found.items() if words is not None and words["generation"] >= number}

    def beat_of(self, worker: int) -> Beat | None:
        words = self._read(f"beat_{worker}")
        return None if words is None else Beat(**words)

    def outcome_of(self, worker: int) -> dict[str, Any] | None:
        """What a worker that ended with an error said of it."""
        return self._read(f"outcome_{worker}")

    def forget(self, worker: int) -> None:
        """Removes what a former process of this worker left."""
        for kind in ("beat", "answer", "outcome"):
            with suppress(FileNotFoundError):
                os.remove(os.path.join(self.folder, f"{kind}_{worker}"))

    # ---- by a worker

    def generation(self) -> Generation | None:
        """The newest generation, None before the first; costs one look at the file while it stays the same."""
        path = os.path.join(self.folder, "generation")
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        if (found.st_ino, found.st_mtime_ns) != self._seen:
            words = self._read("generation")
            if words is not None:
                self._generation = Generation(**words | {"members": tuple(words["members"])})
                self._seen = (found.st_ino, found.st_mtime_ns)
        return self._generation

    def answer(self, worker: int, number: int) -> None:
        self._replace(f"answer_{worker}", {"generation": number})

    def beat(self, worker: int, beat: Beat) -> None:
        self._replace(f"beat_{worker}", dataclasses.asdict(beat))

    def say_outcome(self, worker: int, words: dict[str, Any]) -> None:
        self._replace(f"outcome_{worker}", words)

    # ----

    def _replace(self, name: str, words: dict[str, Any]) -> None:
        path = os.path.join(self.folder, name)
        with open(f"{path}.tmp", "w") as file:
            json.dump(words, file)
        os.replace(f"{path}.tmp", path)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            with open(os.path.join(self.folder, name)) as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def _numbers(self, prefix: str) -> list[int]:
        names = [name.removeprefix(prefix) for name in os.listdir(self.folder) if name.startswith(prefix)]
        return [int(name) for name in names if name.isdigit()]


class Journal:
    """What happened, one JSON object a line, by all processes of the job: `elastic.jsonl` in the run directory."""

    def __init__(self, path: str, who: str) -> None:
        self._path, self._who = path, who
        os.makedirs(os.path.dirname(path), exist_ok=True)

    def write(self, event: str, **details: Any) -> None:
        """Appends an event; `monotonic` can be compared between processes of one machine."""
        line = json.dumps({"time": round(time.time(), 3), "monotonic": round(time.monotonic(), 4), "who": self._who,
                           "event": event, **details})
        with open(self._path, "a") as file:  # one short write at the end of the file: lines of processes do not mix
            file.write(line + "\n")
