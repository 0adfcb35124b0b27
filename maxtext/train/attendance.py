"""How a run waits for its devices, and who may tell it to leave: the one seam between the loop and elastic training.

The loop calls it at the few places where processes of a job depend on each other. In a plain run each call does the
obvious thing. In an elastic run (`maxtext.elastic`) a wait is a poll, and the run leaves as soon as the members of the
job change: an exception unwinds the loop, and another one begins with the members that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from maxtext.checkpoint.lease import Lease
from maxtext.checkpoint.manager import Checkpoints, Restored
from maxtext.config.schema import Config
from maxtext.train.gradient_log import LoggedStep
from maxtext.train.lock import run_lock
from maxtext.train.state import TrainState, abstract_state
from maxtext.train.step import Gradient
from maxtext.train.stop import Stopper

PyTree = Any


class MembersChanged(Exception):
    """The run must stop where it is: its job now has other members. No failure; the next attempt goes on."""


class Attendance:
    """Of a plain run: it blocks, nobody watches it, and only checkpoints on disk bring it back.

    Attributes:
      first: whether this is the first attempt of the process, which describes the run to a person.
      watched: whether another process ends this one when it hangs.
    """

    first, watched = True, False

    def lock(self, run_dir: str) -> AbstractContextManager[Lease | None]:
        """Holds the run directory against other trainers, by its lease if it can have one. Raises RunInUseError."""
        return run_lock(run_dir)

    def stopper(self, started: float, max_seconds: float | None) -> Stopper:
        """What tells the loop to stop; `started` is the `time.monotonic()` that the budget counts from."""
        return Stopper(started, max_seconds)

    def fetch(self, tree: PyTree) -> PyTree:
        """The arrays of a tree as numpy, once they are computed.

        Raises MembersChanged instead of waiting for devices that will never answer.
        """
        return jax.device_get(tree)

    def check(self) -> None:
        """Called before anything is written. Raises MembersChanged when this attempt no longer speaks for the run."""

    def progress(self, step: int) -> None:
        """Update `step` was dispatched."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the run does inside: init, data, compile, checkpoint, restore, eval or samples; else it steps."""
        yield

    def opened(self, checkpoints: Checkpoints) -> None:
        """The checkpoints that this attempt may commit to."""

    def abstract(self, cfg: Config, mesh: Mesh) -> TrainState:
        """Shapes, dtypes and shardings of the state on `mesh`."""
        return abstract_state(cfg, mesh)

    def snapshot_due(self, cfg: Config, step: int) -> bool:
        """Whether the state after `step` is to be kept in memory too."""
        return False

    def snapshot(self, step: int, state: PyTree, extra: dict[str, Any], wait: bool) -> bool:
        """Keeps a copy of the state in memory outside of this process; `wait` until it is whole. False: it is not."""
        return False

    def ended(self) -> None:
        """The run is complete, or stopped with all saved: nothing in memory is needed any more."""

    def logs(self, step: LoggedStep) -> None:
        """The run logs gradients; `restore` is to do updates again with the update of `step`."""

    def keep_gradient(self, step: int, gradient: Gradient, extra: dict[str, Any]) -> None:
        """Keeps what update `step` was made of in memory outside of this process; `extra` is that of a snapshot."""

    def restore(self, abstract_state: PyTree, newer_than: int) -> Restored | None:
        """The newest state in memory that is whole, unless it is older than step `newer_than`."""
        return None

    def forget(self) -> None:
        """What is in memory is of a branch that the run has left."""
