"""The faults of the campaign and the guards against them: what is changed inside a process that trains.

A fault is a name and its numbers, so that it can be sent to a process; `train` there runs the command line as it is,
but for these faults, and without the guards that are named. See faults.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401  here, so that it is loaded before a process is split off

from maxtext import cli
from maxtext.checkpoint import arrays, lease, manager, manifest, tiers, upkeep
from maxtext.data import DataError, pipeline, reader
from maxtext.data.journal import Journal
from maxtext.elastic.attempt import ElasticAttendance
from maxtext.elastic.supervisor import Supervisor
from maxtext.elastic.worker import Worker
from maxtext.train import lock, loop, optim, step, watchdog
from maxtext.train.corruption import Comparison
from maxtext.train.metrics import MetricsWriter
from maxtext.train.stop import Stopper

Fault = tuple[str, dict[str, Any]]


def train(arguments: Sequence[str], faults: Sequence[Fault], without: Sequence[str], log: str, devices: int) -> None:
    """Trains in this process, on so many virtual devices, and ends it with the exit code of the command line."""
    _begin(log, without)
    count = "--xla_force_host_platform_device_count"
    os.environ["XLA_FLAGS"] = re.sub(rf"{count}=\d+", f"{count}={devices}", os.environ["XLA_FLAGS"])
    for name, numbers in faults:
        FAULTS[name](**numbers)
    code = cli.train(list(arguments))
    sys.stdout.flush()
    sys.exit(code)


def answer(function: Callable[..., Any], given: Sequence[Any], without: Sequence[str], to: Connection,
           log: str) -> None:
    """Sends what a function returns."""
    _begin(log, without)
    to.send(function(*given))


def _begin(log: str, without: Sequence[str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for guard in without:
        GUARDS[guard]()


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Does something before each call of a function, with its arguments."""
    original = getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        action(*given, **named)
        return original(*given, **named)

    instead(owner, name, wrapped)


def instead(owner: Any, name: str, other: Any) -> None:
    """Puts something else in the place of a name. AttributeError when nothing has this name (any more)."""
    getattr(owner, name)
    setattr(owner, name, other)


def after_update(update: int, action: Callable[[], None]) -> None:
    """Does something once, when the metrics of an update have been written; the next is dispatched by then."""
    write = MetricsWriter.write

    def wrapped(self: MetricsWriter, step: int, scalars: Any) -> None:
        write(self, step, scalars)
        if step == update:
            action()

    instead(MetricsWriter, "write", wrapped)


def around_step(run: Callable[[Any, Any, Any], Any]) -> None:
    """Calls `run(compiled, state, batch)` wherever the loop would call the compiled train step."""
    compile_train_step = loop.compile_train_step

    def changed(cfg: Any) -> Any:
        step = compile_train_step(cfg)
        return SimpleNamespace(lower=lambda *given: SimpleNamespace(
            compile=lambda: functools.partial(run, step.lower(*given).compile())))

    instead(loop, "compile_train_step", changed)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- faults


def die_after(seconds: float) -> None:
    """SIGKILL at a moment, counted from the end of the first update."""
    after_update(1, lambda: threading.Timer(seconds, die).start())


def die_at(update: int) -> None:
    """SIGKILL once the metrics of an update are written, and what was to be saved before is on the disk."""
    def now() -> None:
        found[-1].join()
        die()

    found: list[manager.Checkpoints] = []
    before(manager.Checkpoints, "save", lambda self, *given: found.append(self))
    after_update(update, now)


def die_after_decision() -> None:
    """SIGKILL between the journal's line and what it decides."""
    before(loop.GoBack, "__init__", lambda *given: die())


def quick_retry() -> None:
    """A failed save is tried again in the next update, not seconds later."""
    if manager._RETRY_SECONDS[0] < 1e6:
        instead(manager, "_RETRY_SECONDS", (0.0, 0.0))


def die_in_save(number: int, point: str) -> None:
    """SIGKILL at a named point inside the N-th save of the process."""
    saves = [0]
    before(manager.Checkpoints, "save", lambda *given: saves.__setitem__(0, saves[0] + 1))

    def now(*given: Any, **named: Any) -> None:
        if saves[0] >= number:
            die()

    owner, name = {"begun": (arrays.Orbax, "start"), "arrays written": (manifest, "record_files"),
                   "hashed": (manifest, "stage"), "manifest staged": (manifest, "commit"),
                   "committed": (manager.Checkpoints, "_tidy"), "read back": (upkeep, "delete"),
                   "deleting": (upkeep.shutil, "rmtree")}[point]
    before(owner, name, now)


def failing_writes(first: int, last: int, error: str, place: str) -> None:
    """Saves of updates first to last meet an error of the file system."""
    code = getattr(errno, error)

    def fail(*given: Any, **named: Any) -> None:
        if first <= step[0] <= last:
            raise OSError(code, os.strerror(code), "the store")

    step = [0]
    before(manager.Checkpoints, "save", lambda self, at, *given: step.__setitem__(0, at))
    owner, name = {"arrays": (arrays.Orbax, "start"), "hashes": (manifest, "record_files"),
                   "manifest": (manifest, "stage"), "rename": (manifest, "commit")}[place]
    before(owner, name, fail)


def small_disk(first: int, last: int, most: int) -> None:
    """Between two updates no file may grow beyond so many bytes: the system itself refuses the write."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    after_update(first, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard)))
    after_update(last, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


def lying_disk(update: int) -> None:
    """The save of an update is not on the disk as it was written, though the disk says so."""
    commit = manifest.commit

    def rot(step_dir: str, token: int = 0) -> None:
        commit(step_dir, token)
        if step_dir.endswith(f"{update:08d}"):
            flip_bit(max((os.path.join(folder, name) for folder, _, names in os.walk(step_dir) for name in names),
                         key=os.path.getsize), 0.5, 3)

    instead(manifest, "commit", rot)


def slow_store(seconds: float) -> None:
    """Each save takes longer in the background."""
    before(manifest, "record_files", lambda *given: time.sleep(seconds))


def slow_updates(seconds: float) -> None:
    """Each update takes longer, so that others come in between."""
    for attendance in (loop.Attendance, ElasticAttendance):
        before(attendance, "fetch", lambda *given: time.sleep(seconds))


def stall(update: int, seconds: float) -> None:
    """The data of an update take long, or for ever."""
    take = pipeline.Batches.__next__

    def wrapped(self: pipeline.Batches) -> Any:
        if self._step + 1 == update:
            time.sleep(seconds)
        return take(self)

    instead(pipeline.Batches, "__next__", wrapped)


def bad_instances(numbers: Sequence[int], how: str) -> None:
    """Some instances cannot be read, or hold ids that the vocabulary has not."""
    read = reader.InstanceReader.read

    def wrapped(self: reader.InstanceReader, ids: np.ndarray) -> np.ndarray:
        bad = np.isin(ids, numbers)
        if bad.any() and how == "unreadable":
            raise DataError(f"the store: instance {ids[bad][0]} cannot be read")
        tokens = read(self, ids)
        tokens[bad] = np.iinfo(tokens.dtype).max
        return tokens

    instead(reader.InstanceReader, "read", wrapped)


def spoilt_batches(numbers: Sequence[int], how: str) -> None:
    """Some batches of the data's order give a loss of NaN, or count one token alone, whose gradient is an outlier."""
    take, taken = pipeline.Batches.__next__, []

    def wrapped(self: pipeline.Batches) -> Any:
        taken.append(self.data_step(self._step + 1))
        return take(self)

    def run(compiled: Any, state: Any, batch: Any) -> Any:
        if taken[-1] in numbers:
            weights = batch.weights_BT * jnp.float32(jnp.nan)
            if how == "outlier":
                one = np.zeros(weights.shape, np.float32)
                one[0, 0] = 1
                weights = jax.device_put(one, weights.sharding)
            batch = batch.replace(weights_BT=weights)
        return compiled(state, batch)

    instead(pipeline.Batches, "__next__", wrapped)
    around_step(run)


def flipped_state(update: int, device: int, leaf: int, bit: int) -> None:
    """One bit of what one device holds of the state turns over, in memory, without a word."""
    def run(compiled: Any, state: Any, batch: Any) -> Any:
        state, metrics = compiled(state, batch)
        if int(state.step) == update:
            leaves, treedef = jax.tree.flatten(state)
            floats = [i for i, one in enumerate(leaves) if one.dtype == jnp.float32 and one.size > 1]
            place = floats[leaf % len(floats)]
            leaves[place] = flipped(leaves[place], jax.devices()[device], bit)
            state = jax.tree.unflatten(treedef, leaves)
        return state, metrics

    around_step(run)


def signals(update: int, number: int, times: int, where: str) -> None:
    """A signal after an update, in the save that follows, or in an evaluation."""
    def send(*given: Any, **named: Any) -> None:
        if not sent:
            sent.append(1)
            for _ in range(times):
                os.kill(os.getpid(), number)

    sent: list[int] = []
    if where == "update":
        after_update(update, send)
    else:
        before(manifest, "record_files" if where == "save" else "stage", send)


def known_decisions() -> None:
    """A new run takes over the journal that stands in its folder."""
    instead(Journal, "forget", lambda self: None)


def clock_jump(update: int, hours: float) -> None:
    """The time of day jumps."""
    real = time.time
    after_update(update, lambda: setattr(time, "time", lambda: real() + 3600 * hours))


def other_machine(name: str, patience: float) -> None:
    """The process looks as if it ran on another machine: file locks do not reach there."""
    instead(lease, "this_machine", lambda: name)
    instead(lease, "BEAT_SECONDS", patience / 5)
    acquire = lease.acquire
    instead(lease, "acquire", lambda *given, **named: acquire(*given, **named | {"patience": patience}))
    instead(lock, "_lock", lambda *given: False)


FAULTS: dict[str, Callable[..., None]] = {fault.__name__: fault for fault in (
    die_after, die_at, die_after_decision, die_in_save, quick_retry, failing_writes, small_disk, lying_disk, slow_store,
    slow_updates, stall, bad_instances, spoilt_batches, flipped_state, signals, clock_jump, other_machine,
    known_decisions)}


# ---- what guards against them, switched off


def _no_fence() -> None:
    instead(lease.Fence, "refusal", lambda *given: None)
    instead(lease.Lease, "check", lambda self: None)
    instead(lease.Lease, "refuse_if_late", lambda self: None)


def _no_lock() -> None:
    instead(loop.Attendance, "lock", lambda self, run_dir: contextlib.nullcontext())


def _no_masks() -> None:
    instead(pipeline.Batches, "_without_bad", lambda self, rows, ids: (rows, None))


def _no_retry() -> None:
    instead(manager, "_RETRY_SECONDS", (1e9, 1e9))


def _no_journal() -> None:
    instead(Journal, "_write", lambda self, entry: None)
    instead(Journal, "state", lambda self: {})


def _no_skips() -> None:
    instead(optim, "_is_ordinary", lambda *given: jnp.bool_(True))


def _no_watchdog() -> None:
    instead(watchdog.Watchdog, "_limit", lambda self, phase: 1e9)


def _no_comparison() -> None:
    instead(Comparison, "__call__", lambda self, state, batch: None)


def _no_hashes() -> None:
    instead(manifest, "check_files", lambda *given: None)


def _no_fingerprints() -> None:
    instead(manager.integrity, "tree_fingerprints", lambda state: {})


def _no_block_hashes() -> None:
    instead(tiers, "_digest", lambda data: "")


def _no_fixed_sums() -> None:
    """Sums are in the order that each mesh gives, under the name of a promise that they are not."""
    instead(step, "gradient_of_shards", step.batch_gradient)


def _no_supervisor() -> None:
    instead(Worker, "_look_for_supervisor", lambda self: None)


def _no_beats() -> None:
    instead(Supervisor, "_watch", lambda self: None)


def _no_stop() -> None:
    instead(Stopper, "_receive", lambda *given: None)


def _no_config_check() -> None:
    instead(loop, "check_same_run", lambda *given: None)
    instead(pipeline.Batches, "_identity", lambda self: {})


GUARDS: dict[str, Callable[[], None]] = {
    "fence": _no_fence, "lock": _no_lock, "masks": _no_masks, "retry": _no_retry, "journal": _no_journal,
    "skips": _no_skips, "watchdog": _no_watchdog, "comparison": _no_comparison, "hashes": _no_hashes,
    "fingerprints": _no_fingerprints, "stop": _no_stop, "config": _no_config_check,
    "block hashes": _no_block_hashes, "fixed sums": _no_fixed_sums, "supervisor": _no_supervisor, "beats": _no_beats}


# ---- pieces of faults


def flip_bit(path: str, where: float, bit: int) -> None:
    """Turns one bit of a file over; `where` is a share of its length."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(int(where * size), size - 1))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << bit)]))


def flipped(x: jax.Array, device: jax.Device, bit: int = 0) -> jax.Array:
    """The array with one bit of one element of what one device holds of it turned over."""
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device == device:
            part.reshape(-1).view(np.uint32)[part.size // 2] ^= np.uint32(1 << bit)
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
