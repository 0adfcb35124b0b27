"""The supervisor of an elastic run: starts workers, finds the dead and the hung, and opens generations.

It uses no device and imports no JAX. A death is noticed by the system's own word (`last_breath`, and waitpid). Deaths
are gathered for a moment before a generation is opened, and a generation is opened only when all of its members have
answered, so that nobody waits for one that died before. See `membership` for the files, and docs/reliability.md for the
whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any

from maxtext.config.schema import Config
from maxtext.elastic.coordinator import Coordinator
from maxtext.elastic.last_breath import killed_by
from maxtext.elastic.membership import Beat, Control, Generation, Journal
from maxtext.elastic.policy import LEAVE_SECONDS, START_SECONDS, Budget, back_off, choose_members, phase_limits
from maxtext.elastic.worker import DONE, FAILED, MISTAKE, TRY_AGAIN, Spec

WORKER = (sys.executable, "-m", "maxtext.elastic.worker")
POLL_SECONDS, LOOK_SECONDS = 0.005, 0.05  # between looks at processes, and at all else
GATHER_SECONDS = 0.05
DUMP_SECONDS = 0.3  # between asking a hung worker for its stacks and killing it
WORDS_SECONDS = 1.0  # that rank 0 may say why the run ends later than another worker
FRUITLESS = 5  # deaths a worker, without an update in between, after which the run stops
LAST_SECONDS = 60.0  # that workers may take to exit once one has finished


@dataclasses.dataclass
class Process:
    """One worker's process."""

    popen: subprocess.Popen[bytes]
    started: float
    kill_at: float | None = None
    why: str = ""


class Supervisor:
    """Runs one job to its end; `run` returns the exit code."""

    def __init__(self, cfg: Config, config_text: str, workers: int, devices: int, root: str, peer: bool,
                 environment: Mapping[str, str], command: Sequence[str] = WORKER) -> None:
        """
        Args:
          config_text: the resolved config.
          workers, devices: their number, and the devices of each.
          root: an empty folder in memory, for snapshots and control files.
          peer: whether each worker's snapshots are copied to the next one.
          environment: of the workers.
          command: of a worker; the paths of its spec and its number are added.
        """
        self.cfg, self.workers, self.devices, self.root = cfg, workers, devices, root
        self.control = Control(os.path.join(root, "control"))
        self.journal = Journal(os.path.join(cfg.run_dir, "elastic.jsonl"), "supervisor")
        self.logs = os.path.join(cfg.run_dir, "workers")
        os.makedirs(self.logs, exist_ok=True)
        config, self._spec = os.path.join(root, "config.yml"), os.path.join(root, "spec.json")
        with open(config, "w") as file:
            file.write(config_text)
        spec = Spec(config, root, uuid.uuid4().hex[:12], devices, workers, os.getpid(), peer)
        with open(self._spec, "w") as file:
            json.dump(dataclasses.asdict(spec), file)
        self._environment, self._command = dict(environment), command
        self._coordinator = self._new_coordinator()
        self.processes: dict[int, Process] = {}
        self._leaving: dict[int, subprocess.Popen[bytes]] = {}  # killed, and not yet ended by the system
        self.generation: Generation | None = None
        self._finished: dict[int, float] = {}
        self._start_at: dict[int, float] = dict.fromkeys(range(workers), 0.0)
        self._changed: float | None = None  # since when the generation is not what it should be
        self._first_death: float | None = None  # of those that no generation has answered
        self._fruitless, self._best = 0, -1  # deaths since the last progress, and the step it reached
        self._limits = phase_limits(cfg.watchdog)
        self._budget = Budget(cfg.elastic.regroups_per_hour)
        self._stop: signal.Signals | None = None
        self._told_stop = 0.0
        self._code: int | None = None
        self._begun, self._proposed = time.monotonic(), 0.0

    def request_stop(self, number: int) -> None:
        """Save and end the run; a second time: at once. For signal handlers."""
        if self._stop is not None:
            self._code = TRY_AGAIN
        self._stop = signal.Signals(number)

    def run(self) -> int:
        try:
            look = 0.0
            while self._code is None:
                self._reap()  # all that is done at every turn: a death must be known at once
                moving = self._changed is not None or (self.generation is not None and not self.generation.open)
                if moving or time.monotonic() >= look:
                    look = time.monotonic() + LOOK_SECONDS
                    self._start_due()
                    self._watch()
                    self._pass_stop_on()
                    self._arrange()
                time.sleep(POLL_SECONDS)
            return self._code
        finally:
            for process in self.processes.values():
                process.popen.kill()
            for popen in (*self._leaving.values(), *(process.popen for process in self.processes.values())):
                popen.wait()
            self._coordinator.close()
            self.journal.write("end", code=self._code)
            shutil.rmtree(self.root, ignore_errors=True)

    # ---- processes

    def _log(self, name: str) -> IO[bytes]:
        return open(os.path.join(self.logs, f"{name}.log"), "ab", buffering=0)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker, at in list(self._start_at.items()):
            if now < at or self._stop is not None or worker in self._leaving:
                continue
            del self._start_at[worker]
            self.control.forget(worker)
            with self._log(f"worker_{worker}") as log:
                popen = subprocess.Popen([*self._command, self._spec, str(worker)], env=self._environment, stderr=log,
                                         start_new_session=True)
            self.processes[worker] = Process(popen, now)
            self._coordinator.knows(popen.pid)
            self.journal.write("started", worker=worker, pid=popen.pid)

    def _reap(self) -> None:
        self._leaving = {worker: popen for worker, popen in self._leaving.items() if popen.poll() is None}
        for worker, process in list(self.processes.items()):
            code = process.popen.poll()
            if code is None and (number := killed_by(process.popen.pid)) is not None:
                code, self._leaving[worker] = -number, process.popen
            if code is None:
                continue
            del self.processes[worker]
            if code == DONE:
                self._finished[worker] = time.monotonic()
            elif code in (MISTAKE, FAILED):
                if self._code is None:
                    print(self._last_words(worker), file=sys.stderr)
                self._code = code
            else:
                self._died(worker, process, code)

    def _last_words(self, worker: int) -> str:
        """Why the run ends: what rank 0 says if it does so soon, because it may know more than the others."""
        first, deadline = (*self._members, worker)[0], time.monotonic() + WORDS_SECONDS
        while (words := self.control.outcome_of(first)) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        words = words or self.control.outcome_of(worker)
        return "the worker gave no reason" if words is None else str(words["error"])

    def _died(self, worker: int, process: Process, code: int) -> None:
        now = time.monotonic()
        self.journal.write("death", worker=worker, pid=process.popen.pid, code=code, why=process.why or _said(code),
                           member=worker in self._members)
        self._say(f"worker {worker} died ({process.why or _said(code)}); its log is {self.logs}/worker_{worker}.log")
        self._fruitless += 1
        self._start_at[worker] = now + back_off(self._fruitless - self.workers + 1)
        if self._fruitless > FRUITLESS * self.workers:
            self._say(f"{self._fruitless} deaths without an update in between; the run stops")
            self._code = TRY_AGAIN
        if worker in self._members:
            self._changed = self._changed or now
            self._first_death = self._first_death or now

    @property
    def _members(self) -> tuple[int, ...]:
        return () if self.generation is None else self.generation.members

    # ---- hangs

    def _watch(self) -> None:
        now = time.monotonic()
        for worker, process in self.processes.items():
            if process.kill_at is not None:
                if now >= process.kill_at:
                    process.popen.kill()
                continue
            beat = self.control.beat_of(worker)
            if beat is None or beat.pid != process.popen.pid:
                if now - process.started > START_SECONDS:
                    self._give_up(worker, f"no sign of life in {START_SECONDS:g} s")
                continue
            self._note_progress(beat)
            limit = self._limit(beat)
            if now - beat.at > self.cfg.elastic.hang_seconds:
                self._give_up(worker, f"no sign of life for {now - beat.at:.1f} s, in phase {beat.phase}")
            elif beat.phase != "step" and now - beat.since > limit:
                self._give_up(worker, f"{now - beat.since:.1f} s in phase {beat.phase}; the limit is {limit:g} s")
        self._watch_update(now)

    def _limit(self, beat: Beat) -> float:
        if beat.phase == "step":
            return max(self.cfg.elastic.hang_seconds, 3 * beat.longest)
        return self._limits.get(beat.phase, float("inf"))

    def _watch_update(self, now: float) -> None:
        """An update that does not end has no one to blame: all leave it, and who cannot is killed then.

        A member in another phase explains the wait of the others, and has a limit of its own.
        """
        if self.generation is None or not self.generation.open or self._changed is not None:
            return
        beats = [self.control.beat_of(worker) for worker in self._members]
        stuck = [beat for beat in beats if beat is not None and beat.phase == "step"
                 and beat.generation == self.generation.number and now - beat.since > self._limit(beat)]
        dying = any(worker in self.processes and self.processes[worker].kill_at is not None for worker in self._members)
        if dying or not beats or len(stuck) < len(beats):
            return
        seconds = min(now - beat.since for beat in stuck)
        self._say(f"update {stuck[0].step} does not end ({seconds:.1f} s); all workers leave it")
        self.journal.write("stuck", step=stuck[0].step, seconds=round(seconds, 2))
        for worker in self._members:
            if worker in self.processes:
                self.processes[worker].popen.send_signal(signal.SIGUSR1)
        self._changed = now

    def _note_progress(self, beat: Beat) -> None:
        if beat.step > self._best:
            self._best, self._fruitless = beat.step, 0

    def _give_up(self, worker: int, why: str) -> None:
        """Asks for the stacks of a worker, which go to its log, and kills it a moment later."""
        self._say(f"worker {worker} hangs: {why}")
        self.journal.write("hang", worker=worker, why=why)
        process = self.processes[worker]
        process.why, process.kill_at = why, time.monotonic() + DUMP_SECONDS
        process.popen.send_signal(signal.SIGUSR1)

    # ---- generations

    def _arrange(self) -> None:
        """Moves the group towards what it should be."""
        if self._code is not None or self._end():
            return
        now = time.monotonic()
        if not self._members:
            waited = now - self._begun > START_SECONDS
            if len(self._ready()) == self.workers or (waited and self._ready()):
                self._propose(gentle=False)
        elif self._changed is not None:
            if now - self._changed >= GATHER_SECONDS and not self._pauses(now):
                self._propose(gentle=False)
        elif not self.generation.open:
            self._open_or_blame(now)
        elif self._can_grow():
            self._propose(gentle=True)

    def _ready(self) -> set[int]:
        """Workers that can belong to a generation: alive, warm, and not given up."""
        found = set()
        for worker, process in self.processes.items():
            beat = self.control.beat_of(worker)
            if process.kill_at is None and beat is not None and beat.pid == process.popen.pid and beat.phase != "start":
                found.add(worker)
        return found

    def _pauses(self, now: float) -> bool:
        """Whether the policy waits for replacements still."""
        assert self._changed is not None
        pause = self.cfg.elastic.policy == "pause" and self._stop is None and self._first_death is not None
        return pause and now - self._changed < self.cfg.elastic.pause_seconds and len(self._ready()) < self.workers

    def _can_grow(self) -> bool:
        """Whether a larger group is ready, and the present one has done an update since it was formed."""
        assert self.generation is not None
        if self._stop is not None or self._finished or len(self._members) == self.workers:
            return False
        beats = [self.control.beat_of(worker) for worker in self._members]
        settled = all(beat is not None and beat.generation == self.generation.number and beat.phase == "step"
                      and beat.longest > 0 for beat in beats)
        return settled and len(self._choose()) > len(self._members)

    def _choose(self) -> tuple[int, ...]:
        return choose_members(self.cfg, self._ready(), self._members, self.workers, self.devices)

    def _new_coordinator(self) -> Coordinator:
        with self._log("coordinator") as log:
            return Coordinator(self.root, self._environment, log)

    def _open_service(self, members: int) -> str:
        """The address of a coordination service; its host is started again when it has died, with all its workers."""
        try:
            return self._coordinator.open(members)
        except (OSError, ValueError):
            self._say("the host of the coordination services died; it is started again")
            self.journal.write("coordinator died")
            self._coordinator.close()
            self._coordinator = self._new_coordinator()
            for process in self.processes.values():
                self._coordinator.knows(process.popen.pid)
            return self._coordinator.open(members)

    def _propose(self, gentle: bool) -> None:
        members, now = self._choose(), time.monotonic()
        if not members:
            return  # a replacement may still come; it is being started
        if self._first_death is not None:
            if self._budget.exhausted(now):
                self._say(f"{self.cfg.elastic.regroups_per_hour} changes of members within an hour "
                          f"(elastic.regroups_per_hour); the run stops, and the same command tries again")
                self._code = TRY_AGAIN
                return
            self._budget = self._budget.after(now)
        number = 0 if self.generation is None else self.generation.number + 1
        address = self._open_service(len(members))
        self._proposed = now
        self.generation = Generation(number, members, gentle, address, False, now)
        self.control.publish(self.generation)
        self._changed = self._first_death = None
        self.journal.write("proposed", generation=number, members=members, gentle=gentle)

    def _open_or_blame(self, now: float) -> None:
        """Opens the generation once all members have left their group; kills who does not come."""
        assert self.generation is not None
        answered = self.control.answered(self.generation.number)
        late = [worker for worker in self._members if worker not in answered]
        if not late:
            self.generation = dataclasses.replace(self.generation, open=True)
            self.control.publish(self.generation)
            self.journal.write("opened", generation=self.generation.number, members=self._members)
            if self.generation.number:
                self._say(f"generation {self.generation.number}: {len(self._members)} of {self.workers} workers go on")
            return
        if self.generation.gentle or now - self.generation.opened < LEAVE_SECONDS:
            return  # where all leave after an update, one or a save that takes long is watched by its own limits
        for worker in late:
            beat = self.control.beat_of(worker)
            anew = beat is not None and beat.phase == "start"
            if not anew and worker in self.processes and self.processes[worker].kill_at is None:
                self._give_up(worker, f"it did not leave its group within {LEAVE_SECONDS:g} s")

    # ---- the end

    def _pass_stop_on(self) -> None:
        now = time.monotonic()
        if self._stop is None or now - self._told_stop < 1.0:
            return
        if not self._told_stop:
            self._say(f"{self._stop.name}: all workers save and stop")
            self.journal.write("stop", signal=self._stop.name)
        self._told_stop = now
        for process in self.processes.values():
            process.popen.send_signal(signal.SIGTERM)
        if not self.processes and not self._finished:
            self._code = TRY_AGAIN

    def _end(self) -> bool:
        """Whether the run has come to an end, or its last workers are on their way out."""
        if not self._finished:
            return False
        alive = [worker for worker in self._members if worker in self.processes  # itself, not its replacement
                 and self.processes[worker].started <= self._proposed]
        if self._members and self._members[0] in self._finished:  # process 0 commits what is saved
            if not alive or time.monotonic() - min(self._finished.values()) > LAST_SECONDS:
                self._code = DONE
            return True
        if alive or self._stop is not None:
            if not alive:
                self._code = TRY_AGAIN if self._members else DONE
            return not alive
        # Process 0 died while it saved the end, and the others have gone: once more, from the newest state.
        self._finished.clear()
        self.generation = None if self.generation is None else dataclasses.replace(self.generation, members=())
        self._changed, self._begun = None, time.monotonic()
        self._start_at |= {worker: 0.0 for worker in range(self.workers) if worker not in self.processes}
        return False

    def _say(self, text: str) -> None:
        print(f"supervisor: {text}", flush=True)


def _said(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def signals_to(supervisor: Supervisor) -> dict[int, Any]:
    """Makes SIGTERM and SIGINT stop the run; returns the handlers of before."""
    return {number: signal.signal(number, lambda got, frame: supervisor.request_stop(got))
            for number in (signal.SIGTERM, signal.SIGINT)}
