"""`python -m maxtext.elastic.worker SPEC NUMBER`: one worker of an elastic run. The supervisor starts it.

Its main thread never touches a device. It beats, follows the generation, and runs one attempt after another in a
thread; between two attempts it drops devices, programs and the client of the former group. What was under way is kept
with all that it holds, so after `LEFT_BEHIND` such attempts the process starts itself anew, in place.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from maxtext.elastic.membership import Beat, Control, Generation, Journal

if TYPE_CHECKING:
    from maxtext.elastic.attempt import Attempt, Requests, Shapes

POLL_SECONDS, BEAT_SECONDS = 0.01, 0.1
LEFT_BEHIND = 8
JOIN_SECONDS = 20
SAVES = 1_000_000  # more than one generation makes
BLAME_SECONDS = 2.0  # that an error waits for the news of a death which would explain it
ALONE_SECONDS = 25.0  # that a worker without a supervisor may take to save
DONE, CRASHED, MISTAKE, FAILED, TRY_AGAIN = 0, 1, 2, 3, 75


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the supervisor tells all workers."""

    config: str  # path of the resolved YAML
    root: str  # folder of snapshots and control files, in memory
    run: str
    devices: int  # each worker's
    workers: int
    supervisor: int  # its process id
    peer: bool

    @staticmethod
    def read(path: str) -> Spec:
        with open(path) as file:
            return Spec(**json.load(file))


class Worker:
    def __init__(self, spec: Spec, number: int, born: int | None = None) -> None:
        """`born` is the newest generation that is not this process's, by default the one that there is."""
        from maxtext.config.load import load
        from maxtext.elastic.attempt import Attempt, Requests

        self.spec, self.number = spec, number
        self.cfg = load(spec.config)
        self.control = Control(os.path.join(spec.root, "control"))
        self.journal = Journal(os.path.join(self.cfg.run_dir, "elastic.jsonl"), f"worker {number}")
        self.requests: Requests = Requests()
        self.attempt: Attempt | None = None
        self.generation: Generation | None = None
        there = self.control.generation()
        self.born = (-1 if there is None else there.number) if born is None else born
        self.attempts, self._kept = 0, list[Attempt]()
        self._shapes: Shapes = {}
        self._phase, self._since, self._next_beat = "start", time.monotonic(), 0.0
        self._alone_since: float | None = None
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the supervisor passes it on

    def _on_stop(self, number: int, frame: Any) -> None:
        self.requests.stop = signal.Signals(number)

    # ---- the main thread

    def run(self) -> int:
        """Follows generations until an attempt ends the run; returns the exit code."""
        problem = self._beat_while(self._warm_up, "start")
        if problem is not None:
            return self._failed(problem)
        self._set_phase("ready")
        while True:
            time.sleep(POLL_SECONDS)
            self._beat()
            self._look_for_supervisor()
            newest = self.control.generation()
            if newest is not None and newest.number <= self.born:
                newest = None  # of the process that this one replaces
            if newest is not None and (self.generation is None or newest.number > self.generation.number):
                self._follow(newest)
            elif self.attempt is not None and not self.attempt.running:
                code = self._ended(self.attempt.result)
                if code is not None:
                    return code
            elif self.attempt is None and self._may_join(newest):
                self._begin(newest)
            elif self.attempt is None and self.requests.stop is not None and not self._belongs(newest):
                return DONE  # a spare has nothing to save

    def _belongs(self, generation: Generation | None) -> bool:
        return generation is not None and self.number in generation.members

    def _may_join(self, newest: Generation | None) -> bool:
        return self._belongs(newest) and newest is not None and newest.open

    def _follow(self, newest: Generation) -> None:
        """Leaves the group for another generation: at once, or after an update like all others."""
        if self.attempt is not None and newest.gentle and self.attempt.running and self._belongs(self.generation):
            self.requests.regroup = True
            return
        self._leave(newest)

    def _leave(self, newest: Generation) -> None:
        from maxtext.train.attendance import MembersChanged

        began, stuck = time.monotonic(), False
        self._set_phase("leave")
        if self.attempt is not None:
            stuck = not self.attempt.leave()
            clean = newest.gentle and isinstance(self.attempt.result, MembersChanged)
            if not clean:
                # To destroy what a dead computation still uses would be to wait for it, in whichever thread does it.
                self._kept.append(self.attempt)
                gc.freeze()
            self.attempt = None
            if len(self._kept) >= LEFT_BEHIND or not self._drop_devices():
                self._start_anew(newest.number)
        self.requests.regroup = False
        self.generation = dataclasses.replace(newest, open=False)
        self._set_phase("ready")
        self.control.answer(self.number, newest.number)
        self.journal.write("left", generation=newest.number, hung=stuck, seconds=round(time.monotonic() - began, 4),
                           left_behind=len(self._kept), memory_mib=_memory_mib())

    def _drop_devices(self) -> bool:
        """Whether it worked: a thread that was left behind may hold what JAX needs for it."""
        from maxtext.elastic.private import leave

        dropping = threading.Thread(target=leave, daemon=True)
        dropping.start()
        dropping.join(5.0)
        return not dropping.is_alive()

    def _start_anew(self, number: int) -> None:
        """Replaces this process by a fresh one of the same id, for generation `number`; what it leaks goes with it."""
        self.journal.write("started anew", left_behind=len(self._kept))
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(sys.stdout.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-m", "maxtext.elastic.worker", *sys.argv[1:3], str(number - 1)])

    def _begin(self, generation: Generation | None) -> None:
        from maxtext.elastic.attempt import Attempt, ElasticAttendance, Requests
        from maxtext.elastic.policy import resized

        assert generation is not None
        stop, self.requests = self.requests.stop, Requests()
        self.requests.stop = stop
        spec, rank = self.spec, generation.members.index(self.number)
        members = generation.members
        cfg = resized(self.cfg, spec.devices * len(members), spec.devices * spec.workers)
        assert cfg is not None, "the supervisor chooses groups that fit"
        attendance = ElasticAttendance(
            self.requests, self._snapshots(generation), cfg.checkpoint.snapshot_every,
            lambda topic, words: _exchange(generation, rank, topic, words), self.attempts == 0,
            lambda event, **details: self.journal.write(event, generation=generation.number, **details), self._shapes)
        self.attempts += 1
        self.generation = generation
        self.attempt = Attempt(lambda: self._train(cfg, generation, rank, attendance), attendance)

    def _snapshots(self, generation: Generation) -> Any:
        from maxtext.checkpoint.tiers import Snapshots

        members = generation.members
        following = members[(members.index(self.number) + 1) % len(members)]
        peer = following if self.spec.peer and following != self.number else None
        return Snapshots(self.spec.root, self.number, self.spec.run, generation.number, peer, self._told)

    def _ended(self, result: Any) -> int | None:
        """The exit code for what an attempt ended with; None when the worker goes on."""
        from maxtext.train.attendance import MembersChanged
        from maxtext.train.loop import Outcome

        if isinstance(result, Outcome):
            return DONE
        newest = self.control.generation()
        if isinstance(result, MembersChanged) and newest is not None and self.generation is not None:
            if newest.number > self.generation.number:
                self._leave(newest)
            return None
        # A peer that died may show as an error here before the supervisor has said so.
        if self._phase != "failed":
            self._set_phase("failed")
        elif time.monotonic() - self._since > BLAME_SECONDS:
            return self._failed(result)
        return None

    def _failed(self, error: BaseException) -> int:
        from maxtext.train.loop import TrainingError

        if isinstance(error, _mistakes()):
            self._say(str(error))
            return MISTAKE
        if isinstance(error, TrainingError):
            self._say(f"training stopped: {error}")
            return FAILED
        self._told("".join(traceback.format_exception(error)))
        return CRASHED

    def _say(self, text: str) -> None:
        """The last words of a worker; the supervisor shows those of one."""
        self.control.say_outcome(self.number, {"error": text})

    def _told(self, text: str) -> None:
        print(f"worker {self.number}: {text}", file=sys.stderr, flush=True)
        self.journal.write("note", text=text[:500])

    # ---- heartbeat

    def _set_phase(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()
        self._beat(now=True)

    def _beat(self, now: bool = False) -> None:
        at = time.monotonic()
        if at < self._next_beat and not now:
            return
        self._next_beat = at + BEAT_SECONDS
        phase, since, step, longest = self._phase, self._since, 0, 0.0
        if self.attempt is not None:
            of = self.attempt.attendance
            step, longest = of.step, of.longest
            if self._phase == "ready":
                phase, since = of.phase_name, of.since
        number = -1 if self.generation is None else self.generation.number
        self.control.beat(self.number, Beat(os.getpid(), number, phase, step, since, longest, at))

    def _beat_while(self, function: Callable[[], None], phase: str) -> BaseException | None:
        """Runs what takes long before there is an attempt, and beats meanwhile; returns what it raised."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                raised.append(error)

        self._set_phase(phase)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            self._beat()
            self._look_for_supervisor()
        return raised[0] if raised else None

    def _look_for_supervisor(self) -> None:
        """Without a supervisor nobody would end this process: it saves and goes."""
        if os.getppid() == self.spec.supervisor:
            return
        if self._alone_since is None:
            self._alone_since = time.monotonic()
            self._told("the supervisor is gone; saving and leaving")
            self.requests.stop = signal.SIGTERM
        if self.attempt is None or time.monotonic() - self._alone_since > ALONE_SECONDS:
            os._exit(TRY_AGAIN)

    # ---- threads

    def _warm_up(self) -> None:
        """What a first attempt would wait for."""
        from maxtext.elastic.private import cache_every_rank, check_names
        from maxtext.parallel.runtime import prepare_runtime

        prepare_runtime()
        check_names()
        cache_every_rank()
        import grain  # noqa: F401
        import orbax.checkpoint  # noqa: F401

        import maxtext.train.loop  # noqa: F401

    def _train(self, cfg: Any, generation: Generation, rank: int, attendance: Any) -> Any:
        from maxtext.elastic.private import count_saves_from, join
        from maxtext.parallel.exchange import tell_through
        from maxtext.train.loop import train

        began, numbers = time.monotonic(), itertools.count()
        join(generation.address, rank, len(generation.members), JOIN_SECONDS)
        count_saves_from(SAVES * generation.number)
        tell_through(lambda words: [bytes.fromhex(heard) for heard in _exchange(
            generation, rank, f"values {next(numbers)}", words.hex())])
        attendance.entered("init")
        self.journal.write("joined", generation=generation.number, rank=rank, of=len(generation.members),
                           seconds=round(time.monotonic() - began, 4))
        return train(cfg, attendance=attendance)


def _memory_mib() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return 0


def _exchange(generation: Generation, rank: int, topic: str, words: str) -> list[str]:
    """Tells all members of the generation, and returns what each has told."""
    from maxtext.elastic.private import hear, tell

    tell(f"{topic}/{rank}", words)
    return [hear(f"{topic}/{other}", 60.0) for other in range(len(generation.members))]


def _mistakes() -> tuple[type[Exception], ...]:
    from maxtext.elastic.private import PrivateNamesGone
    from maxtext.train.mistakes import mistakes

    return PrivateNamesGone, *mistakes()


def main() -> None:
    # Libraries write to descriptor 1 whatever they like; the console of the run is for the run's own lines.
    console = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(console, "w", buffering=1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # to stderr, which is the worker's log
    code = Worker(Spec.read(sys.argv[1]), *map(int, sys.argv[2:])).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that were left behind never end


if __name__ == "__main__":
    main()
