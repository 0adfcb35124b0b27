"""Updates that can be done again from their logged gradients (`checkpoint.gradient_log`).

An update is two programs then: one makes the reduced gradient, rounded to bfloat16, and the other makes the next state
of it. What lies between is logged (`checkpoint.tiers_log`). A restore runs the second program alone, with the loss and
norm that were logged: so it clips, skips and steps its schedule as the first time, on any mesh.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint.tiers import Snapshots, slots_below
from maxtext.checkpoint.tiers_log import Entries, GradientLog
from maxtext.checkpoint.tiers_vote import Exchange, Found, restore
from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.train.state import TrainState, numbers_of
from maxtext.train.step import Gradient, StepMetrics, make_gradient, make_update, measured, step_options

PyTree = Any
Call = Callable[..., tuple[TrainState, StepMetrics]]


class LoggedStep:
    """The step of a run that logs gradients, for the current mesh.

    Args:
      state: abstract, on that mesh. The update is compiled for it, so that a restore runs the program of training.
    """

    def __init__(self, cfg: Config, state: TrainState) -> None:
        self.cfg, self.state = cfg, state

    @cached_property
    def gradient(self) -> Gradient:
        """Shapes, types and shardings of what is logged: leaves like the weights, and scalars."""
        mesh = jax.sharding.get_mesh()

        def of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:  # on the devices, wherever the weights lie
            return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(mesh, leaf.sharding.spec))

        def alike(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))

        moe, layers = self.cfg.model.moe, sum(self.cfg.model.routed_layers)
        counts_LE = alike(layers, moe.experts) if layers and moe.experts and moe.bias_update_rate else None
        return Gradient(jax.tree.map(of, self.state.params), alike(), alike(), counts_LE)

    @cached_property
    def update(self) -> Call:
        """The compiled program (state, gradient) -> (state, metrics); it consumes the state."""
        update = make_update(self.cfg, numbers_of(self.cfg))
        return jax.jit(update, donate_argnums=0, compiler_options=step_options(self.cfg)).lower(
            self.state, self.gradient).compile()

    def compile(self, batch: Batch, *votes: Any) -> LoggedProgram:
        """Both programs; `votes` is as in `compile_train_step`."""
        gradient_of = make_gradient(self.cfg, numbers_of(self.cfg))

        def gradient(state: TrainState, batch: Batch, votes: jax.Array | None = None) -> tuple[Gradient, StepMetrics]:
            gradient, seen = gradient_of(state, batch)
            metrics = measured(self.cfg, batch, seen)
            return gradient, metrics if votes is None else metrics | {"vote": votes.max()}

        first = jax.jit(gradient, compiler_options=step_options(self.cfg)).lower(self.state, batch, *votes).compile()
        return LoggedProgram(first, self.update)


@dataclasses.dataclass(frozen=True)
class LoggedProgram:
    """The compiled step: (state, batch) -> (state, metrics), with the logged `gradient` among the metrics."""

    gradient: Any
    update: Any

    def __call__(self, state: TrainState, batch: Batch, *votes: Any) -> tuple[TrainState, StepMetrics]:
        gradient, metrics = self.gradient(state, batch, *votes)
        state, told = self.update(state, gradient)
        return state, metrics | told | {"gradient": gradient}

    def as_text(self) -> str:
        return "\n".join(program.as_text() or "" for program in (self.gradient, self.update))


def made_of(cfg: Config) -> str:
    """A short hash of all settings that decide what an update makes of a state and a gradient."""
    train, shards = cfg.train, cfg.virtual_shards if cfg.train.determinism == "any_mesh" else 0
    words = json.dumps([dataclasses.asdict(cfg.optim), dataclasses.asdict(cfg.schedule), cfg.schedule_steps,
                        cfg.model.moe.bias_update_rate, train.determinism, shards], sort_keys=True)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


class Memory:
    """What a run keeps in the hosts' memory: snapshots, and the log between them where it logs gradients."""

    def __init__(self, snapshots: Snapshots, exchange: Exchange, fetch: Callable[[PyTree], PyTree]) -> None:
        """
        Args:
          exchange: tells all processes what this one says, and it what they say.
          fetch: waits for arrays.
        """
        self.snapshots, self._exchange, self._fetch = snapshots, exchange, fetch
        self._logging: tuple[LoggedStep, GradientLog] | None = None

    def logs(self, step: LoggedStep) -> None:
        """From now on gradients are kept, and `restore` does updates again with the update of `step`."""
        log = GradientLog(self.snapshots, made_of(step.cfg)) if self._logging is None else self._logging[1]
        self._logging = step, log

    def keep(self, step: int, gradient: Gradient, extra: dict[str, Any]) -> None:
        """Begins to keep the gradient of update `step`; `extra` is that of a snapshot after it."""
        assert self._logging is not None
        self._logging[1].keep(step, gradient, extra)

    def restore(self, abstract_state: PyTree, newer_than: int) -> tuple[Found, str] | None:
        """The newest state that can be had from it, and in words how if it was put together.

        None when there is none, or it is older than step `newer_than`. The same in every process.
        """
        if self._logging is not None:
            return _replayed(*self._logging, self.snapshots, self._exchange, newer_than, self._fetch)
        slots = list(slots_below(self.snapshots.root, self.snapshots.run, self.snapshots.told))
        found = restore(abstract_state, slots, self._exchange, newer_than, self.snapshots.told)
        return None if found is None else (found, "")

    def forget(self) -> None:
        """Removes all of this worker's, for a run that goes back: it will do updates of the same number."""
        self.snapshots.forget()
        if self._logging is not None:
            self._logging[1].forget()

    def wait(self) -> None:
        """Waits for what is under way."""
        self.snapshots.wait()
        if self._logging is not None:
            self._logging[1].wait()


def _replayed(step: LoggedStep, log: GradientLog, snapshots: Snapshots, exchange: Exchange, newer_than: int,
              fetch: Callable[[PyTree], PyTree]) -> tuple[Found, str] | None:
    """The newest complete snapshot with the logged updates after it done again, from where `log` goes on."""
    root, run, told = snapshots.root, snapshots.run, snapshots.told
    began, seconds = time.monotonic(), dict.fromkeys(("snapshot", "compile", "gradients", "updates"), 0.0)

    def spent(on: str) -> None:
        nonlocal began
        now = time.monotonic()
        seconds[on] += now - began
        began = now

    entries = Entries(root, run, made_of(step.cfg), step.gradient, exchange, told)
    found = restore(step.state, list(slots_below(root, run, told)), exchange, newer_than, told, entries.reach)
    if found is None:
        return None
    spent("snapshot")
    at, state, extra = found.id, found.state, found.extra
    for at, gradient, extra in entries.read(found.id):  # noqa: B007  the last of them is what counts
        spent("gradients")
        update = step.update
        spent("compile")
        state, _ = update(state, gradient)
        fetch(state.step)
        spent("updates")
    if at.step < newer_than:
        told(f"what memory holds ends at update {at.step}; the checkpoint of update {newer_than} is taken")
        return None
    log.stands_on = at
    how = f"a snapshot of update {found.id.step}, and {at.step - found.id.step} updates done again from their gradients"
    spent("gradients")
    return Found(at, state, extra), f"{how} ({', '.join(f'{name} {took:.2f} s' for name, took in seconds.items())})"
