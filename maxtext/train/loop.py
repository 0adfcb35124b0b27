"""The training run: one readable loop from a config to a trained, evaluated, saved model.

Metrics of an update are read after the next one is dispatched, so the device never waits for the host; those of an
update that is followed by a save, an evaluation or the end are read at once.

A save comes before the evaluation of the same update and carries that update's metrics. So whenever a run is cut off,
its continuation can write the line that is missing from metrics.jsonl, with its evaluation, before it goes on.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.lease import Lease, LeaseError
from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from maxtext.checkpoint.processes import all_agree, from_process_0
from maxtext.checkpoint.provenance import environment
from maxtext.config.load import to_yaml
from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.data.journal import Journal
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.model.choose_mesh import settled
from maxtext.model.cost import count_params
from maxtext.parallel.host_memory import on_devices
from maxtext.parallel.launch import describe
from maxtext.parallel.mesh import make_mesh
from maxtext.parallel.network import network_of
from maxtext.parallel.runtime import keep_freed_memory
from maxtext.parallel.sharding import sharding
from maxtext.train.attendance import Attendance, MembersChanged
from maxtext.train.clock import Clock, Phases
from maxtext.train.conditions import check_conditions
from maxtext.train.console import Console
from maxtext.train.corruption import Comparison
from maxtext.train.expert_loads import ExpertLoads
from maxtext.train.gradient_log import LoggedProgram, LoggedStep
from maxtext.train.guard import GoBack, Guard, Skips, leave_branch
from maxtext.train.ledger import Ledger
from maxtext.train.memory import RememberingAttendance
from maxtext.train.metrics import MetricsWriter, last_step
from maxtext.train.out_of_memory import explained
from maxtext.train.profile import Profile
from maxtext.train.records import Record, router_record, saved_extra, step_record
from maxtext.train.resume import check_files, check_new_run, check_same_run
from maxtext.train.samples import Samples
from maxtext.train.setting import Listener, Setting, Unread, trouble
from maxtext.train.state import TrainState, init_state
from maxtext.train.step import compile_train_step
from maxtext.train.stop import MEMBERS, TrainingError, Votes
from maxtext.train.summary import kernels_in_use, start_summary
from maxtext.train.trackers import check_trackers
from maxtext.train.warm_start import warm_start
from maxtext.train.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where a run stands when `train` returns."""

    step: int
    stopped_by: str | None = None  # None: the run is complete
    trained: bool = True  # False: it was complete before, and nothing was done


def train(cfg: Config, origins: dict[str, str] | None = None, devices: Sequence[jax.Device] | None = None,
          attendance: Attendance | None = None, found: str | None = None, listener: Listener | None = None) -> Outcome:
    """Trains to the last update, or until the time budget is spent or SIGTERM or SIGINT arrives.

    A run directory that holds a checkpoint is continued from the newest good one; a complete run is left as it is.

    Args:
      cfg: the run.
      origins: where each value came from, for the config that is written into the run directory.
      devices: to train on; all by default.
      attendance: how the run waits; None: it blocks, as a plain run does.
      found: how the processes of the job found each other, for the start-up table.
      listener: is given the number and the metrics of each update once they are written, in every process of the job.

    Raises:
      DataError, TaskError, MeshError, CheckpointError, ResumeError: for what is wrong with data, tasks, devices or
        saved state.
      RunInUseError: another process is training in the same run directory.
      TrackerError: an experiment tracker that is asked for is not installed.
      TrainingError: when too many updates are skipped and going back does not help.
      MembersChanged: of an elastic run, which another attempt continues.
    """
    attendance = attendance or (RememberingAttendance(cfg) if cfg.checkpoint.snapshots else Attendance())
    with ExitStack() as held:
        leases: list[Lease | None] = []

        def lock() -> int:
            leases.append(held.enter_context(attendance.lock(cfg.run_dir)))
            return 0

        from_process_0(lock)
        outcome = _train(cfg, origins, devices, attendance, found, leases[0] if leases else None, listener)
        attendance.ended()
    return outcome


def _train(cfg: Config, origins: dict[str, str] | None, devices: Sequence[jax.Device] | None,
           attendance: Attendance, found: str | None, lease: Lease | None, listener: Listener | None) -> Outcome:
    started, primary = time.monotonic(), jax.process_index() == 0
    ledger = Ledger(cfg.run_dir if primary else None)
    phases = Phases(ledger, attendance.phase)
    if lease is not None:
        lease.doing = phases.doing
    clock = Clock(phases)
    console = Console(primary=primary)
    config_text = to_yaml(cfg, origins)
    check_files(cfg)
    check_trackers(cfg)
    checkpoints = Checkpoints(os.path.join(cfg.run_dir, "checkpoints"), cfg.checkpoint, config_text=config_text,
                              lease=lease)
    attendance.opened(checkpoints)
    journal = Journal(cfg.run_dir, jax.process_index())
    newest = from_process_0(lambda: leave_branch(checkpoints, journal))
    if newest >= 0:
        check_same_run(cfg, checkpoints.config_text(newest), newest, console.note)
        if newest >= cfg.train.steps and from_process_0(lambda: last_step(cfg.run_dir)) >= newest:
            console.note(f"{cfg.run_dir} is complete: it stands at update {newest} of {cfg.train.steps}. To go on, "
                         f"raise train.steps; to start anew, choose another run_name.")
            return Outcome(newest, trained=False)
    devices = jax.devices() if devices is None else devices
    cfg, why_mesh = settled(cfg, len(devices), network_of(devices))
    mesh = make_mesh(cfg, devices)
    if devices[0].platform == "cpu":
        keep_freed_memory()
    kernels_in_use(cfg, devices[0].platform)  # one that was asked for and cannot run is an error now, not in a compile
    watchdog = nullcontext() if attendance.watched else Watchdog(cfg.watchdog, cfg.run_dir, phases, ledger)
    with (attendance.stopper(started, cfg.train.max_seconds) as stopper, jax.set_mesh(mesh), watchdog,
          ledger.ending(MembersChanged), explained(cfg, mesh)):
        stopper.trouble = lambda: trouble(cfg, checkpoints, lease)
        ledger.begin(cfg.train.steps, mesh.size, environment(mesh))
        data = resolve(cfg)
        setting = Setting(cfg, config_text, data, mesh, checkpoints, console, clock, attendance, journal, lease, phases,
                          ledger, listener)
        processes = [("processes", describe(found))] if found is not None else []
        tell = attendance.first
        while True:
            run = Run(setting, newest)
            try:
                if tell:
                    rows, tell = start_summary(cfg, mesh, run.batches.describe(), data.eval_sets, why_mesh), False
                    console.table(f"Run {cfg.run_name}", processes + rows)
                outcome = run.loop(Votes(stopper, mesh))
                ledger.write("stop", step=outcome.step, why=outcome.stopped_by or "complete")
                return outcome
            except GoBack as back:
                console.note(str(back))
                ledger.write("back", step=run.step, why=str(back))
                phases.again()
            except (CheckpointError, LeaseError) as error:
                if why := stopper.trouble():
                    raise TrainingError(f"{why}; {error}") from error
                raise
            finally:
                run.close()
            newest = from_process_0(lambda: leave_branch(checkpoints, journal))


class Run:
    """The live objects of a run, and the few things that are done with them between updates."""

    def __init__(self, setting: Setting, newest: int) -> None:
        """Restores the newest good checkpoint, or initialises the state, and opens the files of the run."""
        cfg, mesh, data, journal = setting.cfg, setting.mesh, setting.data, setting.journal
        checkpoints, console, attendance, phases = (setting.checkpoints, setting.console, setting.attendance,
                                                    setting.phases)
        self.cfg, self.mesh, self.checkpoints, self.console, self.clock = cfg, mesh, checkpoints, console, setting.clock
        self.attendance, self.lease, self.phases, self.ledger = attendance, setting.lease, phases, setting.ledger
        self.listener = setting.listener
        self.batches = make_batches(cfg, data, sharding(mesh, "batch", None), journal)
        self.guard = Guard(cfg.guard, checkpoints, self.batches)
        self.step, self.record, self.saved = 0, Record(), newest
        with phases("restore"):
            abstract = attendance.abstract(cfg, mesh)
            self.logged = LoggedStep(cfg, abstract) if cfg.checkpoint.gradient_log else None
            if self.logged is not None:
                attendance.logs(self.logged)
            restored = attendance.restore(abstract, newest)
            if restored is not None and journal.lacking(restored.extra["data"], restored.step):
                restored = None  # of the branch that was left
                attendance.forget()
            restored = restored or checkpoints.restore(
                abstract, finite=lambda leaf: not leaf.endswith("_window"))
        if restored is None:
            check_new_run(cfg)
            journal.forget()
            self.state: TrainState = init_state(cfg)
            if cfg.train.init_from.path is not None:
                self.state = warm_start(self.state, cfg.train.init_from, console.note)
        else:
            self.state, self.step, self.record = restored.state, restored.step, dict(restored.extra["record"])
            check_conditions(cfg, mesh, restored)
            self.batches.set_state(restored.extra["data"])
            self.guard.skips = Skips(tuple(restored.extra.get("skips", ())))
            console.note(f"resuming {cfg.run_dir} from update {self.step} of {cfg.train.steps}" + (
                f": {restored.how}" if restored.how else ""))
            if restored.other_versions:
                console.note(f"the checkpoint was made with {'; '.join(restored.other_versions)}: the run goes on, but "
                             f"not to the same bits")
        self.evaluate = Evaluations(cfg, data, mesh) if cfg.eval.every is not None else None
        # Without a checkpoint nothing of an earlier attempt counts, not even its line of update 0.
        kept, primary = -1 if restored is None else self.step, jax.process_index() == 0
        phases.update = self.step
        self.ledger.lost(kept)
        self.comparison, self.compared_at = Comparison(cfg, mesh), self.step
        self.samples: Samples | None = None
        if cfg.generate.prompts:
            self.samples = Samples(cfg, data.tokenizer, resume_step=kept, primary=primary)
        os.makedirs(cfg.run_dir, exist_ok=True)
        if primary:
            with open(os.path.join(cfg.run_dir, "config.yml"), "w") as file:
                file.write(setting.config_text)
        self.writer = MetricsWriter(cfg.run_dir, cfg, resume_step=kept, primary=primary)
        self.profile = Profile(cfg.profile, cfg.run_dir, primary)
        self.loads = ExpertLoads(cfg.run_dir, cfg, resume_step=kept, primary=primary)

    def loop(self, votes: Votes) -> Outcome:
        cfg, self.votes = self.cfg, votes
        self._write_what_is_missing()
        if self.step > self.saved and self.step and self._due(cfg.checkpoint.every):
            self._save(wait=False)  # what memory restored, and a fault kept from the disk
        step_fn = self._compile() if self.step < cfg.train.steps else None
        unread: Unread | None = None
        stopped_by = votes.reason()
        while step_fn is not None and self.step < cfg.train.steps and not stopped_by:
            self.attendance.check()
            with self.phases("data"):
                batch = next(self.batches)
            if self.profile.begins(self.step + 1):
                self._start_profile(unread)
                unread = None
            with self.profile.update(self.step + 1):
                self.state, metrics = step_fn(self.state, batch, *votes.cast())
            self.step += 1
            self.attendance.progress(self.step)
            self.phases.progress(self.step)
            previous, seconds = unread, None
            if self.state.step.is_ready() and (previous is None or previous.seconds is not None):
                seconds = self.clock.lap()  # a dispatch that computes, as on CPUs: what comes now is of the next update
            gradient = metrics.pop("gradient", None)
            unread = Unread(self.step, metrics, self.batches.last_wait_seconds, self.batches.source_tokens, seconds,
                            gradient, None if gradient is None else self.batches.get_state())
            if previous is not None:
                self._write(previous.step, self._read(previous))
            stopped_by = votes.reason()
            save = self._due(cfg.checkpoint.every) or votes.retry(self.checkpoints.retry_due)
            evaluate = self._due(cfg.eval.every, cfg.eval.at_end)
            sample, leave = self._samples_due(evaluate), stopped_by == MEMBERS
            snapshot = leave or self.attendance.snapshot_due(cfg, self.step)
            compare = self._due(cfg.guard.compare_devices_every, at_end=False)
            profiled = self.profile.ends(self.step)
            # Its gradient is logged when its metrics are read; where that waits for nothing, it need not wait either.
            log = gradient is not None and seconds is not None and jax.process_count() == 1
            if save or evaluate or sample or snapshot or compare or profiled or stopped_by or log:
                self.record, unread = self._read(unread), None
                if profiled:
                    self._stop_profile(step_fn)
                kept = snapshot and self._snapshot(wait=leave)
                if compare:
                    self._compare_devices(batch)
                if save or (stopped_by and not (leave and kept)):
                    self._save(wait=bool(stopped_by))
                if evaluate:
                    self.record |= self._evaluate()
                if sample:
                    self._sample()
                try:
                    if self.step == cfg.train.steps:
                        self._wait()
                finally:
                    self._write(self.step, self.record)
        with self.phases("checkpoint"):
            self.checkpoints.wait()
        if stopped_by == MEMBERS:
            raise MembersChanged
        if stopped_by and self.step < cfg.train.steps:
            self.console.note(f"stopped by {stopped_by} after update {self.step} of {cfg.train.steps}; all is saved, "
                              f"and the same command continues from there")
            return Outcome(self.step, stopped_by)
        self.console.note(f"{cfg.run_dir} is complete: update {self.step} of {cfg.train.steps}")
        return Outcome(self.step)

    def close(self) -> None:
        self.profile.abandon()
        self.batches.close()
        self.writer.close()
        self.loads.close()
        self.checkpoints.close()
        self.console.close()

    def _due(self, every: int | None, at_end: bool = True) -> bool:
        return (at_end and self.step == self.cfg.train.steps) or (every is not None and self.step % every == 0)

    def _samples_due(self, evaluated: bool) -> bool:
        every = self.cfg.generate.every
        return self.samples is not None and (evaluated if every is None else self.step > 0 and self._due(every))

    def _compile(self) -> jax.stages.Compiled | LoggedProgram:
        """Compiles the step once, ahead of the first batch, so that no later call can compile again unnoticed."""
        self.clock.lap("start")
        with self.clock.apart("compile"):
            if self.logged is not None:
                return self.logged.compile(self.batches.abstract(), *self.votes.cast())
            return compile_train_step(self.cfg).lower(self.state, self.batches.abstract(), *self.votes.cast()).compile()

    def _write_what_is_missing(self) -> None:
        """Before the first update: the initial evaluation, or the line of the restored update if it was cut off."""
        if from_process_0(lambda: last_step(self.cfg.run_dir)) >= self.step:
            return
        evaluate = self._due(self.cfg.eval.every, self.cfg.eval.at_end)
        if self.step == 0:
            self.record, evaluate = {"model/parameters": count_params(self.cfg.model)}, self.cfg.eval.at_start
        if evaluate:
            self.record |= self._evaluate()
        if self._samples_due(evaluate):
            self._sample()
        if self.step == 0 and self.cfg.checkpoint.save_at_start:
            self._save(wait=False)
        self._write(self.step, self.record)

    def _read(self, unread: Unread) -> Record:
        """Waits for an update and turns its metrics into OLMo-core's names."""
        step, read = unread.step, self.attendance.fetch(unread.metrics)
        router = read.pop("router", None)
        self.votes.hear(read.pop("vote", np.int32(0)).item())
        values = {name: value.item() for name, value in read.items()}
        seconds = self.clock.lap() if unread.seconds is None else unread.seconds
        if values["skipped"]:
            self.ledger.write("skip", step=step)
        if hopeless := self.guard.observe(step, values):
            raise TrainingError(f"{hopeless} Lower optim.lr or raise schedule.warmup_steps, look at the batch of "
                                f"update {step}, or go back by removing the newest checkpoints in "
                                f"{self.cfg.run_dir}/checkpoints.")
        record = step_record(self.cfg, step, values, seconds, unread.wait_seconds, self.mesh)
        record |= {f"data/tokens/{name}": count for name, count in unread.source_tokens.items()}
        if router is not None:
            self.loads.write(step, router["load"])
            record |= router_record(self.cfg, router)
        if unread.gradient is not None and unread.data is not None:
            with self.clock.apart("gradient log"):
                self.attendance.keep_gradient(step, unread.gradient, self._extra(unread.data, record))
        return record

    def _compare_devices(self, batch: Batch) -> None:
        """Before a save of the same update. Raises TrainingError, with the device and what is to be trusted no more."""
        with self.clock.apart("comparison"):
            found = self.comparison(self.state, batch)
        if not all_agree(found is None):
            trusted = self.compared_at
            from_process_0(lambda: self.checkpoints.set_aside_after(trusted) or 0)
            self.ledger.write("corruption", step=self.step, why=found or "found by another process")
            raise TrainingError(
                f"{found or 'another process found a device with other bits than its peers'}, at update {self.step} "
                f"(guard.compare_devices_every). Checkpoints after update {trusted} are set aside: up to there all "
                f"devices agreed. Leave that device out, and the same command continues from update {trusted}.")
        self.compared_at = self.step

    def _start_profile(self, unread: Unread | None) -> None:
        """Once all updates before are done and read, so that the trace holds its own alone, and so do their times."""
        record = None if unread is None else self._read(unread)
        with self.clock.apart("profile"):
            self.attendance.fetch(self.state.step)
            self.profile.start()
        if unread is not None and record is not None:
            self._write(unread.step, record)

    def _stop_profile(self, step_fn: jax.stages.Compiled | LoggedProgram) -> None:
        with self.clock.apart("profile"):
            told = self.profile.stop(step_fn.as_text() or "")
        if told is not None:
            self.console.note(told)

    def _save(self, wait: bool) -> None:
        self.attendance.check()
        with self.clock.apart("checkpoint"):
            self.checkpoints.save(self.step, self.state, self._extra())
        if wait:
            self._wait()

    def _extra(self, data: dict[str, Any] | None = None, record: Record | None = None) -> dict[str, Any]:
        """Of the update that was dispatched last, or of an earlier one with this position in the data and record."""
        return saved_extra(self.cfg, self.mesh, data or self.batches.get_state(), record or self.record,
                           self.guard.skips)

    def _snapshot(self, wait: bool) -> bool:
        with self.clock.apart("snapshot"):
            return self.attendance.snapshot(self.step, self.state, self._extra(), wait)

    def _wait(self) -> None:
        with self.clock.apart("checkpoint"):
            self.checkpoints.wait()

    def _evaluate(self) -> Record:
        if not self.evaluate:
            return Record()
        with self.clock.apart("eval"):
            began = time.perf_counter()
            scores = self.evaluate(on_devices(self.state.params))
        seconds = time.perf_counter() - began
        self.console.evaluation(self.step, scores, seconds)
        return scores | {"throughput/in-loop eval time (s)": seconds}

    def _sample(self) -> None:
        assert self.samples is not None
        with self.clock.apart("samples"):
            for one in self.samples(self.step, on_devices(self.state.params)):
                self.console.sample(self.step, one.prompt, one.text)

    def _write(self, step: int, record: Record) -> None:
        self.attendance.check()
        if self.lease is not None:
            self.lease.refuse_if_late()
        self.writer.write(step, record | self.clock.take_apart())
        if "train/CE loss" in record and (step % self.cfg.log.every == 0 or step == self.cfg.train.steps):
            self.console.step(step, self.cfg.train.steps, record)
        if self.listener is not None:
            self.listener(step, record)
