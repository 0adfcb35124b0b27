"""Rows of the campaign in which an elastic job loses workers, its memory or its supervisor.

A job is stopped after its faults, and a plain process goes on from there to a set number of updates. So each trial also
goes from several processes to one; every bit and every update is compared with a run that nothing befell.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import elastic, fault_worker
from benchmarks.elastic import Job
from benchmarks.fault_ground import ROOT, Failed, Row, Trial

WORKERS, TOTAL, SECONDS = 4, 400, 0.1  # of a worker one device; of an update at least
HANG_SECONDS = 4.0
SNAPSHOTS, SAVES = 5, 20
OPTIONS = ("mesh.data=-1", "mesh.fsdp=1", "train.determinism=any_mesh", "schedule.total_steps=5000")
OF_JOB = (*OPTIONS, "train.steps=100000", f"checkpoint.snapshot_every={SNAPSHOTS}", f"checkpoint.every={SAVES}",
          "checkpoint.keep_last=2", "elastic.regroups_per_hour=1000", f"elastic.hang_seconds={HANG_SECONDS}")
MOST_LOST = 3 * SNAPSHOTS  # a snapshot that was being written, and updates in flight


@contextmanager
def _job(trial: Trial, workers: int = WORKERS) -> Iterator[Job]:
    """The trial's run as a job; what it asks for and does not get is a failure of the trial."""
    ground = trial.ground
    environment = os.environ | fault_worker.setting(SECONDS, ground.without)
    command = str(ROOT / "benchmarks" / "fault_worker.py")
    try:
        with elastic.job(ground.yaml, ground.directory(trial.name), workers, 1, OF_JOB, environment,
                         command=command) as one:
            yield one
    except AssertionError as error:
        raise error if isinstance(error, Failed) else Failed(str(error)[-1500:]) from None


def _end(trial: Trial, one: Job, deaths: int | None) -> None:
    """Stops the job, lets a plain process go on, and compares; `deaths` are those that may have happened."""
    one.supervisor.send_signal(signal.SIGTERM)
    if one.end() != 0:
        raise Failed(f"the job did not end well: {one.tail()[-400:]}")
    died = one.events("death")
    if deaths is not None and len(died) != deaths:
        raise Failed(f"{len(died)} workers died, {deaths} were killed: {[event['why'] for event in died]}")
    _go_on(trial)


def _go_on(trial: Trial) -> None:
    ground, steps = trial.ground, TOTAL
    while steps < elastic.Job.step_of(ground.directory(trial.name)):
        steps += TOTAL
    total = f"train.steps={steps}"
    ground.finish(trial.name, *OPTIONS, total, f"checkpoint.every={TOTAL}", seconds=600)
    ground.same(trial.name, *OPTIONS, total, f"checkpoint.every={TOTAL}", step=steps)


def _note(trial: Trial, found: elastic.Recovery) -> None:
    trial.recoveries.append(found.resumed)
    trial.lost = max(trial.lost, found.lost)
    if found.source == "memory" and found.lost > MOST_LOST:
        raise Failed(f"{found.lost} updates were done again, at most {MOST_LOST} may be")


def lost_worker(trial: Trial) -> None:
    """Any member of the group dies, of a whole one or of one that has not grown back yet."""
    with _job(trial) as one:
        elastic.wait_until_whole(one, WORKERS)
        for _ in range(trial.faults):
            if len(one.members()) < 2 or trial.rng.random() < 0.5:
                elastic.wait_until_whole(one, WORKERS)
            one.wait_for_step(one.step() + trial.rng.randint(1, 2 * SNAPSHOTS))
            _note(trial, elastic.kill_and_recover(one, [trial.rng.choice(one.members())]))
        _end(trial, one, trial.faults)


def three_of_four(trial: Trial) -> None:
    with _job(trial) as one:
        for _ in range(trial.faults):
            elastic.wait_until_whole(one, WORKERS)
            one.wait_for_step(one.step() + trial.rng.randint(1, 2 * SNAPSHOTS))
            killed = trial.rng.sample(one.members(), 3)
            _note(trial, elastic.kill_and_recover(one, killed))
        elastic.wait_until_whole(one, WORKERS)
        _end(trial, one, 3 * trial.faults)


def killed_in_regroup(trial: Trial) -> None:
    """A second worker dies at a point of the regroup that the death of a first one began."""
    with _job(trial) as one:
        for _ in range(trial.faults):
            elastic.wait_until_whole(one, WORKERS)
            one.wait_for_step(one.step() + trial.rng.randint(1, 2 * SNAPSHOTS))
            first, second = trial.rng.sample(one.members(), 2)
            point, delay = trial.rng.choice(("proposed", "opened", "joined", "restore", "compile")), trial.rng.random()
            before, step = len(one.events(point)), one.step()
            at = one.send([first], signal.SIGKILL)
            one.wait_for(lambda point=point, before=before: len(one.events(point)) > before, 30, point)
            time.sleep(0.05 * delay)
            one.send([second], signal.SIGKILL)
            one.wait_for(lambda second=second, at=at: any(
                event["worker"] == second and event["monotonic"] > at for event in one.events("death")), 30, "death")
            _note(trial, one.wait_for(lambda at=at, step=step: elastic.recovery(one.events(), at, step), 120,
                                      "recovery"))
        _end(trial, one, 2 * trial.faults)


def stopped_worker(trial: Trial) -> None:
    """A worker stands still for a while around the time after which it is given up, and wakes up if it still can."""
    deaths = 0
    with _job(trial) as one:
        for _ in range(trial.faults):
            elastic.wait_until_whole(one, WORKERS)
            one.wait_for_step(one.step() + trial.rng.randint(1, 2 * SNAPSHOTS))
            worker, seconds = trial.rng.choice(one.members()), trial.rng.choice((1.0, HANG_SECONDS, 30.0))
            step, at = one.step(), one.send([worker], signal.SIGSTOP)

            def gone(worker: int = worker, at: float = at) -> bool:
                return any(e["worker"] == worker and e["monotonic"] > at for e in one.events("death"))

            while time.monotonic() < at + seconds and not gone():
                time.sleep(0.02)
            if not gone():
                if seconds > 2 * HANG_SECONDS:
                    raise Failed(f"a worker that stood still for {seconds:g} s was not given up")
                one.send([worker], signal.SIGCONT)
                one.wait_for(lambda step=step, gone=gone: gone() or one.step() > step + 2 * SNAPSHOTS, 120, "an update")
            if gone():
                deaths += 1
                _note(trial, one.wait_for(lambda at=at, step=step: elastic.recovery(one.events(), at, step), 120,
                                          "recovery"))
            elif seconds > 1.5 * HANG_SECONDS:
                raise Failed(f"a worker that stood still for {seconds:g} s was not given up")
        _end(trial, one, None)


def killed_supervisor(trial: Trial) -> None:
    """Its workers save and go, none lives longer than 30 s, and the same command goes on."""
    with _job(trial) as one:
        elastic.wait_until_whole(one, WORKERS)
        one.wait_for_step(one.step() + trial.rng.randint(1, SAVES))
        before = one.step()
        one.supervisor.kill()
        one.supervisor.wait()
        began = time.monotonic()
        while alive := [pid for pid in one.pids().values() if Path(f"/proc/{pid}").exists()]:
            if time.monotonic() - began > 35:
                raise Failed(f"{len(alive)} workers are left 35 s after their supervisor was killed")
            time.sleep(0.05)
    restores = len(one.events("restored from"))
    with _job(trial) as one:
        one.wait_for(lambda: len(one.events("restored from")) > restores, 120, "restore")
        trial.lost = max(0, before - one.events("restored from")[-1]["step"])
        if trial.lost:
            raise Failed(f"{trial.lost} updates were lost, though the workers that were left could save")
        one.wait_for_step(one.step() + SNAPSHOTS)
        _end(trial, one, None)


def lost_memory(trial: Trial) -> None:
    """All workers die, and their snapshots are gone, older than thought, or damaged."""
    from maxtext.checkpoint.tiers import memory_folder, memory_prefix

    with _job(trial) as one:
        for _ in range(trial.faults):
            elastic.wait_until_whole(one, WORKERS)
            one.wait_for_step(max(one.step(), SAVES) + trial.rng.randint(1, 2 * SNAPSHOTS))
            [root] = Path(memory_folder()).glob(f"{memory_prefix(str(one.run_dir))}*")
            workers, step = list(one.pids()), one.step()
            one.send(workers, signal.SIGSTOP)
            how, slots = trial.rng.choice(("wiped", "damaged", "torn")), sorted(root.glob("worker_*/*.slot"))
            for slot in slots:
                if how == "wiped":
                    shutil.rmtree(slot.parent, ignore_errors=True)
                elif how == "torn":
                    os.truncate(slot, trial.rng.randrange(0, slot.stat().st_size, 4096))
                else:
                    data = bytearray(slot.read_bytes())
                    data[trial.rng.randrange(4096, len(data))] ^= 1 << trial.rng.randrange(8)
                    slot.write_bytes(data)
            at = one.send(workers, signal.SIGKILL)
            found = one.wait_for(lambda at=at, step=step: elastic.recovery(one.events(), at, step), 180, "recovery")
            if found.source != "checkpoint":
                raise Failed(f"the job went on from {found.source}, though every snapshot was {how}")
            trial.recoveries.append(found.resumed)
            trial.lost = max(trial.lost, found.lost)
        _end(trial, one, None)


def stopped_in_regroup(trial: Trial) -> None:
    """SIGTERM comes while the group is formed anew."""
    with _job(trial) as one:
        elastic.wait_until_whole(one, WORKERS)
        one.wait_for_step(one.step() + trial.rng.randint(1, 2 * SNAPSHOTS))
        point = trial.rng.choice(("death", "proposed", "opened", "joined", "restore"))
        before = len(one.events(point))
        one.send([trial.rng.choice(one.members())], signal.SIGKILL)
        one.wait_for(lambda: len(one.events(point)) > before, 30, point)
        _end(trial, one, None)


ELASTIC_ROWS = (
    Row("lost worker", "SIGKILL of a worker of an elastic job, at any rank", ("fixed sums",), lost_worker, 100, 20),
    Row("three of four", "SIGKILL of 75% of the workers at once, and growth", ("fixed sums",), three_of_four, 10, 5),
    Row("killed in regroup", "a second worker, while the group is formed anew", (), killed_in_regroup, 20, 10),
    Row("stopped worker", "SIGSTOP, and SIGCONT around the limit", ("beats",), stopped_worker, 10, 5),
    Row("killed supervisor", "and the same command again", ("supervisor",), killed_supervisor, 5),
    Row("lost memory", "all workers die, and every snapshot is wiped, damaged or torn", ("block hashes",), lost_memory,
        10, 5),
    Row("stopped in regroup", "SIGTERM while the group is formed anew", (), stopped_in_regroup, 5),
)
