"""What the loop of a run carries: its setting, which outlives a return to an earlier checkpoint, and unread updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from maxtext.checkpoint.lease import Lease
from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.schema import Config
from maxtext.data.journal import Journal
from maxtext.data.tokens import ResolvedData
from maxtext.train.attendance import Attendance
from maxtext.train.clock import Clock, Phases
from maxtext.train.console import Console
from maxtext.train.ledger import Ledger
from maxtext.train.records import Record
from maxtext.train.step import Gradient, StepMetrics

Listener = Callable[[int, Record], None]


def trouble(cfg: Config, checkpoints: Checkpoints, lease: Lease | None) -> str | None:
    """Why a run should stop because of what it can no longer save; None: it can."""
    if lease is not None and lease.lost:
        return lease.lost
    stale = checkpoints.stale_seconds
    return f"nothing could be saved for {stale:.0f} s (checkpoint.stale_seconds)" \
        if stale > cfg.checkpoint.stale_seconds else None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run keeps when it goes back to an earlier checkpoint: what it is, where it runs, what watches it."""

    cfg: Config
    config_text: str
    data: ResolvedData
    mesh: Mesh
    checkpoints: Checkpoints
    console: Console
    clock: Clock
    attendance: Attendance
    journal: Journal
    lease: Lease | None
    phases: Phases
    ledger: Ledger
    listener: Listener | None


class Unread(NamedTuple):
    """An update that was dispatched and whose metrics are not read yet."""

    step: int
    metrics: StepMetrics
    wait_seconds: float  # for its batch
    source_tokens: dict[str, int]  # read up to here
    seconds: float | None  # that it took; None: it is still being computed
    gradient: Gradient | None = None  # to be logged
    data: dict[str, Any] | None = None  # where the data stood after it, of a gradient that is logged
