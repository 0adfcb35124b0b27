"""Leases: which process may write a run, on file systems that several hosts share. A plain file lock ends at its host.

    <run>/.lease/00000007.json     the claim of token 7, made with O_EXCL: who and since when; the highest token holds
                 00000007.beat     the heartbeat of its holder: a counter, the newest step saved, if released,
                                   and what the holder says of itself (`Lease.doing`)
                 00000007.base     the manifests that counted when token 7 was claimed

Every holder writes files of its own token alone, so an old one that wakes up overwrites nothing. Whether a holder is
alive is judged by its counter moving while the judge's own monotonic clock runs: no two clocks are compared. A writer
looks for newer tokens just before it commits; a manifest that slips in even so is not in the newest base, and does not
count (fencing tokens: Kleppmann, "How to do distributed locking", 2016).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from maxtext.config.reason import reason

DIRECTORY = ".lease"
BEAT_SECONDS = 3.0
PATIENCE_SECONDS = 30.0  # without a beat, after which a holder on another machine is taken for dead
_CLAIM = re.compile(r"(\d{8})\.json")
_BASE = re.compile(r"(\d{8})\.base")
log = logging.getLogger("maxtext.checkpoint")


class LeaseError(ValueError):
    """Another process holds the lease, or has taken it over; the message says who and since when."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who claimed a token."""

    host: str
    machine: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclasses.dataclass(frozen=True)
class Fence:
    """What decides whether a manifest was written by a holder of its time.

    Attributes:
      token: the newest one with a base; manifests of it and of later ones count.
      base: `Manifest.identity` of every step that counted when it was claimed; of earlier ones only these count.
    """

    token: int = 0
    base: dict[str, str] = dataclasses.field(default_factory=dict)

    def refusal(self, name: str, token: int, identity: str) -> str | None:
        """Why the manifest in the directory `name` does not count, or None."""
        if token >= self.token or self.base.get(name) == identity:
            return None
        return (f"was written under token {token}, after token {self.token} had taken the lease; if you put it there "
                f"yourself, remove {DIRECTORY} beside the checkpoints while nothing trains")


def fence_of(run_dir: str) -> Fence:
    """The fence of a run; one without a lease refuses nothing."""
    base = max(_numbers(run_dir, _BASE), default=0)
    content = _read(_path(run_dir, base, "base")) if base else None
    return Fence() if content is None else Fence(base, content)


def newest_saved(run_dir: str) -> int | None:
    """The newest step that a holder of the lease has ever committed; None when none has."""
    beats = (_read(_path(run_dir, token, "beat")) for token in _numbers(run_dir, _CLAIM))
    return max((beat["saved"] for beat in beats if beat and beat.get("saved") is not None), default=None)


def holder(run_dir: str) -> Holder | None:
    """Who claimed the newest token, if that is known."""
    return _holder(run_dir, newest_token(run_dir))


def newest_token(run_dir: str) -> int:
    """The newest token that was claimed; 0 when none was."""
    return max(_numbers(run_dir, _CLAIM), default=0)


def beat_path(run_dir: str, token: int) -> str:
    """The file of a token's heartbeat."""
    return _path(run_dir, token, "beat")


def beat_of(run_dir: str, token: int) -> dict[str, Any] | None:
    """The last heartbeat of a token; None before the first one."""
    return _read(beat_path(run_dir, token))


class Lease:
    """A claimed token with its heartbeat, until `release`. Made by `acquire`."""

    def __init__(self, run_dir: str, token: int, saved: int | None) -> None:
        self.run_dir, self.token = run_dir, token
        self._saved, self._count, self._released = saved, 0, False
        self.doing: Callable[[], dict[str, Any]] = dict  # what the holder says of itself to whoever looks
        self._end, self._lock = threading.Event(), threading.Lock()
        self.lost: str | None = None  # who took it over
        self._checked = time.monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._beats, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """LeaseError when somebody has claimed a newer token."""
        looked, newest = time.monotonic(), newest_token(self.run_dir)
        self._checked = looked
        if newest > self.token:
            who = _holder(self.run_dir, newest)
            self.lost = f"another process took over {self.run_dir} ({who or 'which, it has not said yet'})"
            raise LeaseError(self.lost)

    def refuse_if_late(self) -> None:
        """As `check`, but only looks when the heartbeat has not done so lately: a process that stood still must."""
        if self.lost is not None or time.monotonic() - self._checked > 2 * BEAT_SECONDS:
            self.check()

    def saved(self, step: int) -> None:
        """Remembers that `step` is committed."""
        self._saved = step if self._saved is None else max(step, self._saved)
        self._beat()

    def release(self) -> None:
        """Ends the heartbeat, so that the next claim need not wait."""
        self._end.set()
        self._thread.join()
        self._released = True
        self._beat()

    def _beats(self) -> None:
        while not self._end.wait(BEAT_SECONDS) and self.lost is None:
            self._beat()
            try:
                self.check()
            except LeaseError as error:
                log.error("%s; this process saves nothing any more", error)

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            beat = {**self.doing(), "count": self._count, "saved": self._saved, "released": self._released}
            try:
                _replace(_path(self.run_dir, self.token, "beat"), beat)
            except OSError as error:  # a full disk, say: the save that meets it too says so, and others wait longer
                log.debug("no heartbeat: %s", reason(error))


def acquire(run_dir: str, counted: Callable[[], dict[str, str]], *, alone_here: bool = True,
            machine: str | None = None, patience: float = PATIENCE_SECONDS) -> Lease:
    """Claims the next token of a run, once its holder has released it or is dead.

    Args:
      run_dir: folder of the run.
      counted: gives `Manifest.identity` by directory name of the steps that count now.
      alone_here: whether a lock of this machine proves that no other process of it trains in `run_dir`.
      machine: identity of this machine's running kernel; found out by default.
      patience: seconds for which the counter of a holder elsewhere must stand still.

    Raises:
      LeaseError: the lease is held.
      OSError: the folder cannot be written.
    """
    os.makedirs(os.path.join(run_dir, DIRECTORY), exist_ok=True)
    machine = this_machine() if machine is None else machine
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    mine = Holder(socket.gethostname(), machine, os.getpid(), since)
    while True:
        token = newest_token(run_dir)
        if token:
            _refuse_if_alive(run_dir, token, machine if alone_here else None, patience)
        saved = newest_saved(run_dir)
        try:
            descriptor = os.open(_path(run_dir, token + 1, "json"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # somebody was faster: now that one is the holder
            continue
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(mine), file)
            file.flush()
            os.fsync(file.fileno())
        # From here on an earlier holder that looks sees the claim; what it committed before is in the base.
        lease = Lease(run_dir, token + 1, saved)
        _replace(_path(run_dir, token + 1, "base"), counted())
        _forget(run_dir, token)
        return lease


def _refuse_if_alive(run_dir: str, token: int, machine: str | None, patience: float) -> None:
    """LeaseError unless the holder of a token has released it, is gone from this machine, or stands still."""
    who, beat = _holder(run_dir, token), _read(_path(run_dir, token, "beat"))
    if (beat and beat.get("released")) or (who is not None and who.machine == machine):
        return
    log.warning("%s is held by %s; waiting %g s to see whether that is alive", run_dir, who or "somebody", patience)
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(min(0.2, patience))
        now = _read(_path(run_dir, token, "beat"))
        if now != beat:
            if now and now.get("released"):
                return
            raise LeaseError(f"another process is training in {run_dir} ({who or 'unknown'}); wait for it, stop it, or "
                             f"choose another run_name")


def _forget(run_dir: str, before: int) -> None:
    """Removes files of tokens before `before`: the highest claim and base alone decide."""
    for name in os.listdir(os.path.join(run_dir, DIRECTORY)):
        if name[:8].isdigit() and int(name[:8]) < before:
            with contextlib.suppress(FileNotFoundError):  # a heartbeat of an old holder that was just renamed
                os.remove(os.path.join(run_dir, DIRECTORY, name))


def _numbers(run_dir: str, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(os.path.join(run_dir, DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for name in names if (match := pattern.fullmatch(name))]


def _path(run_dir: str, token: int, kind: str) -> str:
    return os.path.join(run_dir, DIRECTORY, f"{token:08d}.{kind}")


def _holder(run_dir: str, token: int) -> Holder | None:
    content = _read(_path(run_dir, token, "json")) if token else None
    try:
        return Holder(**content) if content else None
    except TypeError:
        return None


def _read(path: str) -> dict[str, Any] | None:
    """A JSON object, or None while it is missing or half written."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _replace(path: str, content: dict[str, Any]) -> None:
    staged = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(staged, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        if os.path.exists(staged):
            os.remove(staged)


def this_machine() -> str:
    """Names the running kernel, as which alone sees a file lock; containers of one machine share it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"
