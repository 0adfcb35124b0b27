"""The rows of the fault campaign: each draws one fault, injects it, and says how the run must end."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.fault_ground import (
    EVERY,
    INSTANCES,
    STEPS,
    Failed,
    Row,
    Trial,
    records,
    saved_bits,
    wait_for_token,
    wait_for_update,
)

SAVE_POINTS = ("begun", "arrays written", "hashed", "manifest staged", "committed")
SETTLED = 13  # from this update on norms are alike enough for an outlier to be one
PATIENCE = 1.5  # seconds after which a lease of another machine is taken over


def kill(trial: Trial) -> None:
    """A run is killed again and again, goes on each time on another mesh, and has the bits of one that nothing befell.

    A moment is drawn from the time of three saves, counted from an attempt's first update.
    """
    ground, steps = trial.ground, STEPS + 2 * EVERY * trial.faults
    options = ("train.determinism=any_mesh", f"train.steps={steps}", "schedule.total_steps=1000")
    killed = 0
    while killed < trial.faults:
        data, fsdp = trial.rng.choice(((4, 1), (2, 2), (1, 4), (2, 1), (1, 2), (1, 1)))
        mesh, seconds = (f"mesh.data={data}", f"mesh.fsdp={fsdp}"), trial.rng.uniform(0, 3 * EVERY * 0.03)
        ended = ground.train(trial.name, *options, *mesh, devices=data * fsdp, faults=[
            ("slow_updates", {"seconds": 0.02}), ("die_after", {"seconds": seconds})])
        if ended.code == 0:
            break  # it was over before
        trial.must(ended, -signal.SIGKILL)
        killed += 1
    if killed < max(1, trial.faults - 2):
        raise Failed(f"the run was over after {killed} of {trial.faults} kills")
    ground.finish(trial.name, *options)
    ground.same(trial.name, *options, step=steps)
    trial.account(most_lost=2 * EVERY)  # a save in the background may be one cadence behind


def kill_in_save(trial: Trial) -> None:
    ground, point = trial.ground, trial.rng.choice((*SAVE_POINTS, "read back", "deleting"))
    keep = ("checkpoint.keep_last=1",)
    trial.must(ground.train(trial.name, *keep, faults=[
        ("die_in_save", {"number": trial.rng.randint(2, 5), "point": point})]), -signal.SIGKILL)
    ground.finish(trial.name, *keep)
    ground.same(trial.name)
    left = [str(path) for path in (ground.directory(trial.name) / "checkpoints").rglob("*.tmp")]
    if left:
        raise Failed(f"left behind: {left}")
    trial.account(most_lost=2 * EVERY)


def _damaged(trial: Trial, harm: Callable[[Path], None], *, sure: bool = True) -> None:
    """A run that stands at its end is harmed, thrown back to update 12, and must come out the same."""
    ground = trial.ground
    shutil.copytree(ground.straight(), ground.directory(trial.name))
    checkpoints = ground.directory(trial.name) / "checkpoints"
    for step in range(16, STEPS + 1, EVERY):
        shutil.rmtree(checkpoints / f"step_{step:08d}")
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    harm(checkpoints)
    changed = any(not path.exists() or path.read_bytes() != data for path, data in before.items())
    ended = ground.train(trial.name)
    trial.must(ended, 0)
    if sure and changed and "resuming" in ended.log and "from update 12 of" in ended.log:
        raise Failed("the damaged step was used")
    ground.same(trial.name)


def _one_file(trial: Trial, folder: Path) -> Path:
    return trial.rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))


def bit_flip(trial: Trial) -> None:
    from benchmarks import fault_damage

    _harmed(trial, fault_damage.checkpoints, "flip", fault_damage.flip)


def torn_write(trial: Trial) -> None:
    from benchmarks import fault_damage

    _harmed(trial, fault_damage.checkpoints, "torn", fault_damage.tear)


def bit_flip_in_memory(trial: Trial) -> None:
    from benchmarks import fault_damage

    _harmed(trial, fault_damage.snapshots, "flip")


def torn_in_memory(trial: Trial) -> None:
    from benchmarks import fault_damage

    _harmed(trial, fault_damage.snapshots, "torn")


def _harmed(trial: Trial, restore: Callable[..., list[str]], how: str,
            harm: Callable[[random.Random, Path], str] | None = None) -> None:
    """With a harm to files, one trial in ten (the only one, of one) is the whole command; the others restore alone."""
    ground, whole = trial.ground, 0 if harm is None else -(-trial.faults // 10)
    if rest := trial.faults - whole:
        trial.failures += ground.apart(restore, str(ground.yaml), [], str(ground.straight()), trial.seed, rest, how)
    for number in range(whole):
        part = Trial(ground, f"{trial.name}_{number}", f"{trial.seed}/{number}")
        try:
            _damaged(part, lambda checkpoints, part=part: harm(
                part.rng, _one_file(part, checkpoints / "step_00000012")))
        except Failed as failure:
            trial.failures.append(str(failure))
        finally:
            shutil.rmtree(ground.directory(part.name), ignore_errors=True)


def bad_memory(trial: Trial) -> None:
    """The bytes were wrong before they were hashed: files and hashes agree."""
    from benchmarks.fault_injection import flip_bit

    def spoil(checkpoints: Path) -> None:
        step_dir = checkpoints / "step_00000012"
        path = max(step_dir.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        flip_bit(str(path), trial.rng.uniform(0.1, 0.9), trial.rng.randrange(8))
        document = json.loads((step_dir / "manifest.json").read_text())
        document["body"]["files"][str(path.relative_to(step_dir))]["sha256"] = hashlib.sha256(
            path.read_bytes()).hexdigest()
        body = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
        document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
        (step_dir / "manifest.json").write_text(json.dumps(document))

    _damaged(trial, spoil)


def strays(trial: Trial) -> None:
    def litter(checkpoints: Path) -> None:
        how = trial.rng.choice(("empty", "number", "copy", "file", "moved"))
        newest = checkpoints / "step_00000012"
        if how == "empty":
            (checkpoints / "step_00000099").mkdir()
        elif how == "number":
            shutil.copytree(newest, checkpoints / "40")
        elif how == "copy":
            shutil.copytree(newest / next(name for name in os.listdir(newest) if name.startswith("arrays")),
                            checkpoints / "step_00000099" / "arrays-1")
        elif how == "file":
            (checkpoints / "step_00000099").write_text("")
        else:
            shutil.copytree(newest, checkpoints / "step_00000099")

    _damaged(trial, litter, sure=False)


def failing_store(trial: Trial) -> None:
    ground, first = trial.ground, trial.rng.randint(1, 12)
    last = first + trial.rng.randint(1, 6)
    kind = trial.rng.choice(("ENOSPC", "EROFS", "EIO", "quota"))
    fault = ("small_disk", {"first": first, "last": last, "most": 20_000}) if kind == "quota" else (
        "failing_writes", {"first": first, "last": last, "error": kind,
                           "place": trial.rng.choice(("arrays", "hashes", "manifest", "rename"))})
    options = ("checkpoint.every=2",)
    ended = ground.train(trial.name, *options, faults=[("slow_updates", {"seconds": 0.02}), fault])
    trial.must(ended, 0, "was not saved to")
    ground.same(trial.name)


def retried_save(trial: Trial) -> None:
    """The only save before the end fails; it must be made up for before the end."""
    ground, at = trial.ground, trial.rng.randint(3, 8)
    ended = ground.train(trial.name, f"checkpoint.every={at + 12}", faults=[
        ("quick_retry", {}), ("slow_updates", {"seconds": 0.02}),
        ("failing_writes", {"first": at + 12, "last": at + 12, "error": "ENOSPC", "place": "arrays"})])
    trial.must(ended, 0, f"step {at + 12} was not saved to")
    between = [name for name in os.listdir(ground.directory(trial.name) / "checkpoints")
               if at + 12 < int(name[5:13]) < STEPS]
    if not between:
        raise Failed("the failed save was not tried again before the end")
    ground.same(trial.name)


def lying_disk(trial: Trial) -> None:
    ground, at = trial.ground, trial.rng.choice((8, 12, 16))
    keep = ("checkpoint.keep_last=1",)
    trial.must(ground.train(trial.name, *keep, faults=[
        ("lying_disk", {"update": at}), ("slow_updates", {"seconds": 0.02}),
        ("die_at", {"update": at + 3})]), -signal.SIGKILL, "read back right after it was written")
    ground.finish(trial.name, *keep)
    ground.same(trial.name)
    trial.account(most_lost=2 * EVERY)


def slow_store(trial: Trial) -> None:
    ground = trial.ground
    trial.must(ground.train(trial.name, faults=[("slow_store", {"seconds": trial.rng.uniform(0.1, 0.4)})]), 0)
    ground.same(trial.name)


def two_trainers(trial: Trial) -> None:
    ground, slow = trial.ground, [("slow_updates", {"seconds": 0.1})]
    first = ground.start(trial.name, faults=slow)
    wait_for_update(ground, trial.name, trial.rng.randint(1, 8))
    second = ground.train(trial.name, faults=[])
    ended = ground.end(first, trial.name)
    trial.must(ended, 0)
    if second.code != 2:
        raise Failed(f"the second trainer was not refused: it exited with {second.code}")
    ground.same(trial.name)


def take_over(trial: Trial) -> None:
    """A trainer on another machine stands still, a second takes over and finishes, the first wakes up."""
    ground = trial.ground
    first = ground.start(trial.name, faults=[("other_machine", {"name": "a", "patience": PATIENCE}),
                                             ("slow_updates", {"seconds": 0.08})])
    wait_for_update(ground, trial.name, trial.rng.randint(2, 10))
    os.kill(first.pid, signal.SIGSTOP)
    try:
        second = ground.start(trial.name, faults=[("other_machine", {"name": "b", "patience": PATIENCE}),
                                                  ("slow_updates", {"seconds": 0.05})])
        wait_for_token(ground, trial.name, 2)
        time.sleep(trial.rng.uniform(0, 1.5))
    finally:
        os.kill(first.pid, signal.SIGCONT)
    second.join(60)
    ended = ground.end(first, trial.name)
    if second.exitcode != 0:
        raise Failed(f"the second trainer exited with {second.exitcode}: {ended.log[-400:]}")
    trial.must(ended, 3, "another process took over")
    ground.same(trial.name)


def bad_data(trial: Trial) -> None:
    ground, share = trial.ground, "data.bad_instances=0.2"
    numbers = sorted(trial.rng.sample(range(INSTANCES), 40))
    how = trial.rng.choice(("unreadable", "ids"))
    ended = ground.train(trial.name, share, faults=[("bad_instances", {"numbers": numbers, "how": how})])
    if "may be left out" in ended.log:
        raise Failed("more instances were met than planned")
    trial.must(ended, 0)
    journal = ground.directory(trial.name) / "journal.jsonl"
    found = [json.loads(line)["instance"] for line in journal.read_text().splitlines()] if journal.exists() else []
    if not found or not set(found) <= set(numbers):
        raise Failed(f"the journal names {found}, bad were {numbers}")
    whole = "".join(json.dumps({"kind": "masked", "instance": number, "why": ""}) + "\n" for number in sorted(found))
    ground.same(trial.name, straight=ground.straight(share, journal=whole))


def stalled_data(trial: Trial) -> None:
    ground, at, limit = trial.ground, trial.rng.randint(2, 20), "watchdog.data_seconds=2"
    if trial.rng.random() < 0.3:  # slow, but moving
        trial.must(ground.train(trial.name, limit, faults=[("stall", {"update": at, "seconds": 1})]), 0)
    else:
        trial.must(ground.train(trial.name, limit, faults=[("stall", {"update": at, "seconds": 600})]), 75,
                   "stuck in phase data")
        ground.finish(trial.name)
        trial.account(most_lost=2 * EVERY)
    ground.same(trial.name)


def not_finite(trial: Trial) -> None:
    """One update that is skipped: weights and moments after it are those before it, to the bit."""
    ground, at = trial.ground, trial.rng.randint(2, STEPS - 2)
    kind = trial.rng.choice(("adamw", "skip_step_adamw"))
    options = ("checkpoint.every=1", f"optim.kind={kind}", "optim.skip.window=128")  # too long for outliers to count
    trial.must(ground.train(trial.name, *options, faults=[
        ("spoilt_batches", {"numbers": [at], "how": "nan"})]), 0)
    skipped = [record["step"] for record in records(ground, trial.name) if record.get("optim/step skipped")]
    if skipped != [at]:
        raise Failed(f"updates {skipped} were skipped, {at} was not finite")
    before, after = (saved_bits(ground.directory(trial.name), step) for step in (at - 1, at))
    held = [name for name in before if name.startswith(("params.", "optimizer.mu", "optimizer.nu", "optimizer.count"))]
    if changed := [name for name in held if before[name] != after[name]]:
        raise Failed(f"the skipped update changed {', '.join(changed[:3])}")


def bad_stretch(trial: Trial) -> None:
    """More skipped updates than are borne: back and past them; the process may die right after it has decided so.

    Two losses of NaN, or one outlier: in the windows of the rule an outlier makes room for the next.
    """
    ground, first = trial.ground, trial.rng.randint(EVERY + 2, STEPS - 8)
    how = trial.rng.choice(("nan", "outlier"))
    first = max(first, SETTLED) if how == "outlier" else first
    numbers = [first, first + 1] if how == "nan" else [first]
    options = (f"guard.skips_in_a_row={len(numbers) - 1}", "checkpoint.asynchronous=false",
               "optim.skip.sigma=20")  # which no batch reaches by itself
    faults = [("spoilt_batches", {"numbers": numbers, "how": how})]
    die = trial.rng.random() < 0.5
    ended = ground.train(trial.name, *options, faults=[*faults, *([("die_after_decision", {})] if die else [])])
    if die:
        trial.must(ended, -signal.SIGKILL)
        ground.finish(trial.name, *options)
    else:
        trial.must(ended, 0, "going back to update")
    back_to = (first - 1) // EVERY * EVERY
    line = json.dumps({"kind": "jump", "update": numbers[-1], "back_to": back_to, "first": first, "last": numbers[-1],
                       "why": ""}) + "\n"
    ground.same(trial.name, straight=ground.straight(*options, journal=line))
    trial.account()


def corrupted_device(trial: Trial) -> None:
    ground, at = trial.ground, trial.rng.randint(1, STEPS - 4)
    device = trial.rng.randrange(4)
    option = "guard.compare_devices_every=3"
    ended = ground.train(trial.name, option, faults=[("flipped_state", {
        "update": at, "device": device, "leaf": trial.rng.randrange(100), "bit": trial.rng.randrange(31)})])
    trial.must(ended, 3, "has other bits of", f"device {device} (")
    ground.finish(trial.name)
    ground.same(trial.name)
    trial.account(most_lost=3 * EVERY)


def stop_signal(trial: Trial) -> None:
    ground, at = trial.ground, trial.rng.randint(1, STEPS - 3)
    number = trial.rng.choice((signal.SIGTERM, signal.SIGINT))
    where = trial.rng.choice(("update", "save", "manifest"))
    ended = ground.train(trial.name, faults=[("slow_updates", {"seconds": 0.02}), (
        "signals", {"update": at, "number": int(number), "times": 1, "where": where})])
    trial.must(ended, 0, f"stopped by {number.name}")
    ground.finish(trial.name)
    ground.same(trial.name)
    trial.account(most_lost=0)


def two_signals(trial: Trial) -> None:
    ground, at = trial.ground, trial.rng.randint(1, STEPS - 3)
    ended = ground.train(trial.name, faults=[("slow_updates", {"seconds": 0.02}), (
        "signals", {"update": at, "number": int(signal.SIGTERM), "times": 2, "where": "update"})])
    trial.must(ended, -signal.SIGTERM)
    ground.finish(trial.name)
    ground.same(trial.name)
    trial.account(most_lost=2 * EVERY)


def clock_jump(trial: Trial) -> None:
    ground = trial.ground
    trial.must(ground.train(trial.name, faults=[("clock_jump", {
        "update": trial.rng.randint(1, STEPS - 1), "hours": trial.rng.choice((-1, 1))})]), 0)
    ground.same(trial.name)


def other_config(trial: Trial) -> None:
    ground, at = trial.ground, trial.rng.randint(2, 20)
    trial.must(ground.train(trial.name, faults=[("signals", {
        "update": at, "number": int(signal.SIGTERM), "times": 1, "where": "update"})]), 0)
    change = trial.rng.choice(("data.seed=7", "train.global_batch=16", "data.sequence_length=16",
                               "optim.skip.window=16"))
    trial.must(ground.train(trial.name, change), 2, change.split("=")[0])
    ground.finish(trial.name)
    ground.same(trial.name)


def spike(trial: Trial) -> None:
    """One update that is an outlier is skipped, and again so by a run that was killed right after and goes on."""
    ground, at = trial.ground, trial.rng.randint(SETTLED, STEPS - 6)
    options = ("optim.skip.sigma=20",)  # which no batch reaches by itself
    faults = [("spoilt_batches", {"numbers": [at], "how": "outlier"})]
    straight = ground.straight(*options, faults=faults)
    trial.must(ground.train(trial.name, *options, faults=[
        *faults, ("slow_updates", {"seconds": 0.02}), ("die_at", {"update": at + trial.rng.randint(0, 3)})]),
               -signal.SIGKILL)
    trial.must(ground.train(trial.name, *options, faults=faults), 0)
    skipped = [record["step"] for record in records(ground, trial.name) if record.get("optim/step skipped")]
    if skipped != [at]:
        raise Failed(f"updates {skipped} were skipped, {at} was the outlier")
    ground.same(trial.name, straight=straight)
    trial.account()


ROWS = (
    Row("kill", "SIGKILL at any moment, going on on another mesh", ("fixed sums",), kill, 200, 10),
    Row("kill in save", "SIGKILL at any point of a save", (), kill_in_save, 20),
    Row("bit flip", "one bit of any file of the newest checkpoint", ("hashes",), bit_flip, 300, 100),
    Row("torn write", "the newest checkpoint cut off at a boundary of pages or files, a page zeroed, a file gone",
        ("hashes",), torn_write, 200, 100),
    Row("bit flip in memory", "one bit of a snapshot", ("block hashes",), bit_flip_in_memory, 200, 100),
    Row("torn in memory", "a snapshot cut off between writes or at a boundary, a page zeroed, gone", ("block hashes",),
        torn_in_memory, 100, 100),
    Row("bad memory", "arrays that were wrong before they were hashed", ("fingerprints",), bad_memory),
    Row("strays", "folders and files that look like checkpoints", (), strays),
    Row("failing store", "full, read-only or broken for a while", (), failing_store),
    Row("retried save", "the only save fails", ("retry",), retried_save),
    Row("lying disk", "what is read back is not what was written", ("hashes",), lying_disk),
    Row("slow store", "saves that take long", (), slow_store),
    Row("two trainers", "on one machine", ("lock",), two_trainers),
    Row("take-over", "of a trainer that was stopped, by another machine", ("fence",), take_over),
    Row("bad data", "instances that cannot be read or hold other ids", ("masks",), bad_data),
    Row("stalled data", "a batch that takes long, or for ever", ("watchdog",), stalled_data),
    Row("not finite", "one update", ("skips",), not_finite),
    Row("spike", "one outlier, and a kill soon after", ("skips",), spike),
    Row("bad stretch", "updates in a row, and a kill right after the decision", ("journal",), bad_stretch),
    Row("corrupted device", "one bit in the memory of one device", ("comparison",), corrupted_device),
    Row("stop signal", "SIGTERM or SIGINT after an update or in a save", ("stop",), stop_signal),
    Row("two signals", "SIGTERM twice", (), two_signals),
    Row("clock jump", "of an hour, while training", (), clock_jump),
    Row("other config", "at a resume", ("config",), other_config),
)
