"""The loop of members that share a program: the run loop of `train.loop`, with one update for all of them.

Each member has a run directory of its own, with the files that its own run would leave there: config.yml,
metrics.jsonl, TensorBoard events, checkpoints. So a report reads it, and `maxtext train` goes on with it alone.

A run by itself goes back when too many of its updates are skipped (guard). Members share their batches, so a member
does not; what its own run would have done there is noted, and its updates go on being skipped or taken one by one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.checkpoint.manager import Checkpoints
from maxtext.checkpoint.provenance import environment
from maxtext.config.load import to_yaml
from maxtext.data.journal import Journal
from maxtext.data.pipeline import Batches, make_batches
from maxtext.data.tokens import ResolvedData, resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.model.cost import count_params
from maxtext.parallel.runtime import keep_freed_memory
from maxtext.sweep.grid import Member
from maxtext.sweep.program import Program
from maxtext.train.clock import Clock, Phases
from maxtext.train.console import Console
from maxtext.train.expert_loads import ExpertLoads
from maxtext.train.guard import Skips
from maxtext.train.ledger import Ledger
from maxtext.train.lock import run_lock
from maxtext.train.metrics import MetricsWriter, last_step
from maxtext.train.out_of_memory import explained
from maxtext.train.records import Record, router_record, saved_extra, step_record
from maxtext.train.resume import ResumeError, check_files, check_same_run
from maxtext.train.samples import Samples
from maxtext.train.setting import Unread
from maxtext.train.state import TrainState, abstract_state, init_state
from maxtext.train.stop import Stopper
from maxtext.train.trackers import check_trackers
from maxtext.train.warm_start import warm_start
from maxtext.train.watchdog import Watchdog


class MemberRun:
    """What one member has of its own: its directory, its checkpoints, its files, its count of skipped updates."""

    def __init__(self, member: Member, held: contextlib.ExitStack, note: Any) -> None:
        """Locks the run directory and looks for checkpoints there."""
        self.name, self.cfg = member.name, member.cfg
        cfg, self._text = member.cfg, to_yaml(member.cfg, member.origins)
        check_files(cfg)
        check_trackers(cfg)
        self.lease = held.enter_context(run_lock(cfg.run_dir))
        self.checkpoints = Checkpoints(os.path.join(cfg.run_dir, "checkpoints"), cfg.checkpoint,
                                       config_text=self._text, lease=self.lease)
        held.callback(self.checkpoints.close)
        self.steps = self.checkpoints.steps()
        if self.steps:
            check_same_run(cfg, self.checkpoints.config_text(self.steps[-1]), self.steps[-1],
                           lambda text: note(f"{member.name}: {text}"))
        self.record, self.skips = Record(), Skips()
        self.samples: Samples | None = None

    @property
    def complete(self) -> bool:
        return bool(self.steps) and self.steps[-1] >= self.cfg.train.steps <= last_step(self.cfg.run_dir)

    def first_state(self, step: int, abstract: TrainState, batches: Batches, note: Any) -> TrainState:
        """The state after update `step`: restored, or initial. Raises ResumeError for a run that took another way."""
        if step == 0:
            state = init_state(self.cfg)
            return state if self.cfg.train.init_from.path is None else warm_start(state, self.cfg.train.init_from, note)
        restored = self.checkpoints.restore(abstract, step)
        assert restored is not None
        if restored.extra["data"].get("jumps"):
            raise ResumeError(f"{self.cfg.run_dir} has gone back past bad updates by itself, so its batches are no "
                              f"longer those of the sweep; continue it with `maxtext train`, or move it away")
        batches.set_state(restored.extra["data"])
        self.record, self.skips = dict(restored.extra["record"]), Skips(tuple(restored.extra.get("skips", ())))
        return restored.state

    def open(self, step: int, data: ResolvedData, held: contextlib.ExitStack) -> None:
        """Opens the files, without what an interrupted sweep wrote after `step`."""
        cfg, kept = self.cfg, step or -1
        if cfg.generate.prompts:
            self.samples = Samples(cfg, data.tokenizer, resume_step=kept)
        os.makedirs(cfg.run_dir, exist_ok=True)
        with open(os.path.join(cfg.run_dir, "config.yml"), "w") as file:
            file.write(self._text)
        self.writer = MetricsWriter(cfg.run_dir, cfg, resume_step=kept)
        self.loads = ExpertLoads(cfg.run_dir, cfg, resume_step=kept)
        held.callback(self.writer.close)
        held.callback(self.loads.close)


class Together:
    """The live objects of a group."""

    def __init__(self, members: Sequence[Member], mesh: Mesh, devices: Sequence[jax.Device], width: int | None,
                 sweep_dir: str, console: Console, held: contextlib.ExitStack) -> None:
        self.console, self.mesh = console, mesh
        self.all = [MemberRun(member, held, console.note) for member in members]
        self.runs = [run for run in self.all if not run.complete]
        self.ledger = Ledger(sweep_dir)
        self.phases = Phases(self.ledger)
        self.clock = Clock(self.phases)
        self.parted: dict[str, str] = {}  # member -> what its own run would have done and this one did not
        if not self.runs:
            return
        if mesh.devices.flat[0].platform == "cpu":
            keep_freed_memory()
        cfg = self.cfg = self.runs[0].cfg
        for run in self.runs:
            if run.lease is not None:
                run.lease.doing = self.phases.doing
        self.program = Program([run.cfg for run in self.runs], mesh, devices, width)
        common = set.intersection(*({0, *run.steps} for run in self.runs))
        self.step = max(common)
        self.ledger.begin(cfg.train.steps, max(len(devices), mesh.size), environment(mesh))
        data = resolve(cfg)
        with jax.set_mesh(mesh):
            self.abstract = abstract_state(cfg, mesh)
            self.batches = make_batches(cfg, data, self.program.batch_sharding(), Journal(cfg.run_dir))
            held.callback(self.batches.close)
            with self.phases("restore"):
                states = [run.first_state(self.step, self.abstract, self.batches, console.note) for run in self.runs]
            self.states = self.program.stacked(states)
            self.evaluate = Evaluations(cfg, data, mesh) if cfg.eval.every is not None else None
        del states
        if self.step or any(run.steps for run in self.runs):
            console.note(f"going on from update {self.step} of {cfg.train.steps}, the newest that all of these members "
                         f"have saved")
        for run in self.runs:
            run.open(self.step, data, held)

    def loop(self, stopper: Stopper) -> str | None:
        """Trains to the last update; returns what stopped it before, or None."""
        cfg, stopped_by, unread = self.cfg, stopper.reason(), None
        self._write_what_is_missing()
        step_fn = self._compile()
        while self.step < cfg.train.steps and not stopped_by:
            with self.phases("data"):
                batch = next(self.batches)
            self.states, metrics = step_fn(self.states, batch)
            self.step += 1
            self.phases.progress(self.step)
            previous, seconds = unread, None
            if self.states.step.is_ready() and (previous is None or previous.seconds is not None):
                seconds = self.clock.lap()
            unread = Unread(self.step, metrics, self.batches.last_wait_seconds, self.batches.source_tokens, seconds)
            if previous is not None:
                self._read(previous)
                self._write(previous.step)
            stopped_by = stopper.reason()
            save, evaluate = self._due(cfg.checkpoint.every), self._due(cfg.eval.every, cfg.eval.at_end)
            sample = self._samples_due(evaluate)
            if save or evaluate or sample or stopped_by:
                self._read(unread)
                unread = None
                states = self.program.apart(self.states, self.abstract)
                if save or stopped_by:
                    self._save(states, wait=bool(stopped_by) or self.step == cfg.train.steps)
                self._look(states, evaluate, sample)
                del states
                self._write(self.step)
        with self.clock.apart("checkpoint"):
            for run in self.runs:
                run.checkpoints.wait()
        self.ledger.write("stop", step=self.step, why=stopped_by or "complete")
        return stopped_by if self.step < cfg.train.steps else None

    def _due(self, every: int | None, at_end: bool = True) -> bool:
        return (at_end and self.step == self.cfg.train.steps) or (every is not None and self.step % every == 0)

    def _samples_due(self, evaluated: bool) -> bool:
        every = self.cfg.generate.every
        return bool(self.cfg.generate.prompts) and (
            evaluated if every is None else self.step > 0 and self._due(every))

    def _compile(self) -> Any:
        self.clock.lap("start")
        with self.clock.apart("compile"):
            return self.program.compile(self.states, self.batches.abstract())

    def _write_what_is_missing(self) -> None:
        """Before the first update: the initial evaluation, or the lines of the restored update that were cut off."""
        behind = [run for run in self.runs if last_step(run.cfg.run_dir) < self.step or self.step == 0]
        if not behind:
            return
        evaluate = self._due(self.cfg.eval.every, self.cfg.eval.at_end)
        if self.step == 0:
            evaluate = self.cfg.eval.at_start
            for run in behind:
                run.record = {"model/parameters": count_params(self.cfg.model)}
        states = self.program.apart(self.states, self.abstract)
        self._look(states, evaluate, self._samples_due(evaluate))
        if self.step == 0 and self.cfg.checkpoint.save_at_start:
            self._save(states, wait=False)
        self._write(self.step)

    def _read(self, unread: Unread) -> None:
        """Waits for an update and keeps its metrics as each member's record."""
        read = jax.device_get(unread.metrics)
        seconds = self.clock.lap() if unread.seconds is None else unread.seconds
        for i, run in enumerate(self.runs):
            each = jax.tree.map(lambda x, i=i: x[i], read)
            router = each.pop("router", None)
            values = {name: np.asarray(value).item() for name, value in each.items()}
            run.record = step_record(run.cfg, unread.step, values, seconds, unread.wait_seconds, self.mesh)
            run.record |= {f"data/tokens/{name}": count for name, count in unread.source_tokens.items()}
            if router is not None:
                run.loads.write(unread.step, router["load"])
                run.record |= router_record(run.cfg, router)
            run.skips = run.skips.after(unread.step, bool(values["skipped"]))
            why = run.skips.complaint(unread.step, run.cfg.guard)
            if why and run.name not in self.parted:
                self.parted[run.name] = f"update {unread.step}: {why}"
                self.console.note(f"{run.name}: {why} at update {unread.step}; alone it would go back there, in a "
                                  f"sweep it goes on")

    def _look(self, states: Sequence[TrainState], evaluate: bool, sample: bool) -> None:
        """Evaluations and samples of each member."""
        for run, state in zip(self.runs, states, strict=True):
            with jax.set_mesh(self.mesh):
                if evaluate and self.evaluate:
                    with self.clock.apart("eval"):
                        began = time.perf_counter()
                        scores = self.evaluate(state.params)
                    run.record |= scores | {"throughput/in-loop eval time (s)": time.perf_counter() - began}
                if sample and run.samples is not None:
                    with self.clock.apart("samples"):
                        run.samples(self.step, state.params)

    def _save(self, states: Sequence[TrainState], wait: bool) -> None:
        with self.clock.apart("checkpoint"), jax.set_mesh(self.mesh):
            for run, state in zip(self.runs, states, strict=True):
                run.checkpoints.save(self.step, state, saved_extra(run.cfg, self.mesh, self.batches.get_state(),
                                                                   run.record, run.skips))
            for run in self.runs if wait else ():
                run.checkpoints.wait()

    def _write(self, step: int) -> None:
        apart = self.clock.take_apart()
        for run in self.runs:
            run.writer.write(step, run.record | apart)
        if "train/CE loss" in self.runs[0].record and (step % self.cfg.log.every == 0 or step == self.cfg.train.steps):
            self.console.note(self._line(step))

    def _line(self, step: int) -> str:
        losses = [run.record["train/CE loss"] for run in self.runs]
        best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else 0
        skipped = sum(bool(run.record.get("optim/step skipped")) for run in self.runs)
        seconds = self.runs[0].record["time/step (s)"]
        parts = [f"step {step}/{self.cfg.train.steps}", f"loss {min(losses):.3f} to {max(losses):.3f}",
                 f"best {self.runs[best].name}",
                 f"tok/s {len(self.runs) * self.cfg.batch_tokens / seconds:,.0f}"]
        return " | ".join(parts + [f"{skipped} skipped"] * bool(skipped))


def train_together(members: Sequence[Member], mesh: Mesh, devices: Sequence[jax.Device], width: int | None,
                   sweep_dir: str, console: Console, stopper: Stopper) -> tuple[str | None, dict[str, str]]:
    """Trains what is not complete; returns what stopped it, or None, and by member what its own run would have done.

    Args:
      mesh: of one member; `devices`: to share the members out over, when it is of one of them.
      width: as in `Program`.

    Raises: as `train.loop.train`.
    """
    with contextlib.ExitStack() as held:
        group = Together(members, mesh, devices, width, sweep_dir, console, held)
        if not group.runs:
            return None, {}
        held.enter_context(Watchdog(group.cfg.watchdog, sweep_dir, group.phases, group.ledger))
        with group.ledger.ending(KeyboardInterrupt), explained(group.cfg, mesh):
            stopped_by = group.loop(stopper)
        return stopped_by, group.parted


