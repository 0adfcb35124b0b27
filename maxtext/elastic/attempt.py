"""One attempt of a worker to train: the attendance that lets it leave at any moment, and the thread that it runs in.

The loop waits by polling, and looks between polls whether it should leave. What blocks elsewhere (a dispatch on virtual
devices, an evaluation, a save, a join) cannot be polled; so the whole attempt runs in a thread, which the worker's main
thread leaves behind when it does not come back. Such a thread writes nothing more: each write asks first.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from maxtext.checkpoint.lease import Lease
from maxtext.checkpoint.manager import Checkpoints, Restored
from maxtext.checkpoint.tiers import Snapshots
from maxtext.config.schema import Config
from maxtext.train.attendance import Attendance, MembersChanged
from maxtext.train.gradient_log import LoggedStep, Memory
from maxtext.train.lock import run_lease
from maxtext.train.state import TrainState
from maxtext.train.step import Gradient
from maxtext.train.stop import MEMBERS, Stopper

PyTree = Any
Shapes = dict[tuple[tuple[str, int], ...], TrainState]
POLL_SECONDS = 0.002


class Requests:
    """What the main thread has told the attempt; its attempts share the wish to stop the run."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None  # save and end the run
        self.regroup = False  # leave after an update, like everybody
        self.cancelled = False  # leave at once


class ElasticStopper(Stopper):
    """Asks the main thread, which alone hears of signals and generations."""

    def __init__(self, started: float, max_seconds: float | None, requests: Requests) -> None:
        super().__init__(started, max_seconds)
        self._requests = requests

    @property
    def received(self) -> signal.Signals | None:
        return self._requests.stop

    def reason(self) -> str | None:
        if self._requests.stop is not None:
            return self._requests.stop.name
        return super().reason() or (MEMBERS if self._requests.regroup else None)


class ElasticAttendance(Attendance):
    """Polls, and leaves when the main thread says so.

    Attributes:
      phase_name, since, step, longest: what the heartbeat tells.
    """

    watched = True

    def __init__(self, requests: Requests, snapshots: Snapshots, every: int,
                 exchange: Callable[[str, str], list[str]], first: bool, event: Callable[..., None],
                 shapes: Shapes) -> None:
        """
        Args:
          shapes: the abstract states of former attempts of the process by mesh, to be added to.
        """
        self._requests, self._every, self._event, self.first = requests, every, event, first
        self._memory = Memory(snapshots, exchange, self.fetch)
        self.phase_name, self.since, self.step, self.longest = "join", time.monotonic(), 0, 0.0
        self._shapes = shapes
        self._steps = 0  # dispatched in this attempt
        self._restored = False  # once in this attempt
        self._checkpoints: Checkpoints | None = None

    def lock(self, run_dir: str) -> AbstractContextManager[Lease | None]:
        # The supervisor holds the machine's lock. Each generation takes the lease anew, which fences the one before.
        return run_lease(run_dir, alone_here=True)

    def stopper(self, started: float, max_seconds: float | None) -> Stopper:
        return ElasticStopper(started, max_seconds, self._requests)

    def fetch(self, tree: PyTree) -> PyTree:
        for leaf in jax.tree.leaves(tree):
            while not leaf.is_ready():
                self.check()
                time.sleep(POLL_SECONDS)
        self.check()
        return jax.device_get(tree)

    def check(self) -> None:
        if self._requests.cancelled:
            raise MembersChanged

    def entered(self, phase: str) -> None:
        """What the attempt does when it is in no other phase."""
        self.phase_name, self.since = phase, time.monotonic()

    def progress(self, step: int) -> None:
        now = time.monotonic()
        if self._steps:
            self.longest = max(self.longest, now - self.since)
        elif step:
            self._event("first update", step=step)
        self._steps += 1
        self.phase_name, self.step, self.since = "step", step, now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.check()
        before, self.phase_name, self.since = self.phase_name, name, time.monotonic()
        began = self.since
        try:
            yield
            self.check()
        finally:
            self.phase_name, self.since = before, time.monotonic()
            if name in ("restore", "compile"):
                self._event(name, seconds=round(self.since - began, 4))

    def opened(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def abstract(self, cfg: Config, mesh: Mesh) -> TrainState:
        key = tuple(mesh.shape.items())
        if key not in self._shapes:  # to trace the initial state is most of what a regroup would take
            self._shapes[key] = super().abstract(cfg, mesh)

        def here(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            before = leaf.sharding
            return leaf.update(sharding=NamedSharding(mesh, before.spec, memory_kind=before.memory_kind))

        return jax.tree.map(here, self._shapes[key])

    def snapshot_due(self, cfg: Config, step: int) -> bool:
        return step % self._every == 0

    def snapshot(self, step: int, state: PyTree, extra: dict[str, Any], wait: bool) -> bool:
        self.check()
        self._memory.snapshots.take(step, state, extra)
        return not wait or self._memory.snapshots.wait()

    def logs(self, step: LoggedStep) -> None:
        self._memory.logs(step)

    def keep_gradient(self, step: int, gradient: Gradient, extra: dict[str, Any]) -> None:
        self.check()
        self._memory.keep(step, gradient, extra)

    def restore(self, abstract_state: PyTree, newer_than: int) -> Restored | None:
        if self._restored:  # the run goes back, and what is in memory is of the branch that it leaves
            self.forget()
            return None
        self._restored = True
        found = self._memory.restore(abstract_state, newer_than)
        if found is None:
            self._event("restored from", source="checkpoint" if newer_than >= 0 else "start", step=max(newer_than, 0))
            return None
        at, how = found
        self._event("restored from", source="memory", step=at.id.step, **({"how": how} if how else {}))
        return Restored(at.id.step, at.state, at.extra, "", how=how)

    def forget(self) -> None:
        self._memory.forget()

    def abandon(self) -> None:
        """By the main thread: nothing of this attempt may be committed any more."""
        self._requests.cancelled = True
        if self._checkpoints is not None:
            self._checkpoints.abandon()


class Attempt:
    """The thread of one attempt. `result` is what `function` returned, or the exception that it raised."""

    def __init__(self, function: Callable[[], Any], attendance: ElasticAttendance) -> None:
        self.attendance, self.result = attendance, None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="attempt", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.result = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> bool:
        """Makes the attempt end now; False when its thread hangs and was left behind.

        A thread in Python code gets an exception. One that is held by a device computation gets it when that ends,
        which may be never.
        """
        self.attendance.abandon()
        self._thread.join(0.06)
        if self.running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0),
                                                       ctypes.py_object(MembersChanged))
            self._wait_for_python(2.0)
        return not self.running

    def _wait_for_python(self, seconds: float) -> None:
        """Waits while the thread moves; where it stands still, it is held outside of Python."""
        deadline, seen, still = time.monotonic() + seconds, None, 0
        while self.running and time.monotonic() < deadline and still < 4:
            frame = sys._current_frames().get(self._thread.ident or 0)
            now = None if frame is None else (id(frame), frame.f_lasti)
            still, seen = (still + 1 if now == seen else 0), now
            self._thread.join(0.02)
