"""Where the fault campaign runs its trials: small runs, in processes that start fast, and what to compare them with."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

DEVICES, STEPS, EVERY, INSTANCES = 4, 24, 4, 600
HANG_SECONDS = 240.0
IDLE = 0.02  # of one core: a process that uses less for so long hangs; one that is starved of the CPU uses more
CONFIG = """\
model: {{vocab_size: 256, d_model: 32, n_layers: 2, n_heads: 4, d_ff: 64, layer_pattern: [window, full], window: 8}}
data: {{vocab_size: 200, eos_id: 1, pad_id: 2, sequence_length: 32, sources: {{all: {{paths: [{tokens}]}}}}}}
optim: {{lr: 1e-2, skip: {{window: 8}}}}
schedule: {{warmup_steps: 10, total_steps: 40}}
train: {{steps: {steps}, global_batch: 8, compute_dtype: float32, remat: {{mode: none}}}}
mesh: {{data: {devices}}}
checkpoint: {{every: {every}, keep_last: null}}
eval: {{every: null}}
log: {{tensorboard: false, report: false}}
output_dir: {folder}/runs
"""


def prepare_environment() -> None:
    """Before jax is imported, here and in the processes that train."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={DEVICES}")
    if not any("optimization_level" in flag for flag in flags):
        flags.append("--xla_backend_optimization_level=0")  # what is tested is no speed
    os.environ |= {"XLA_FLAGS": " ".join(flags), "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PJRT_NPROC": "18",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


class Failed(AssertionError):
    """A trial did not end as it should; the text says how."""


@dataclasses.dataclass
class Ended:
    """A process that trained."""

    code: int
    log: str
    seconds: float


def write_config(folder: Path) -> Path:
    """Random tokens, and the config of small runs on them; returns the config's path."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(3, 200, INSTANCES * 32).astype(np.uint8)
    tokens[::29] = 1
    tokens.tofile(folder / "tokens.npy")
    path = folder / "run.yml"
    path.write_text(CONFIG.format(tokens=folder / "tokens.npy", steps=STEPS, devices=DEVICES, every=EVERY,
                                  folder=folder))
    return path


class Ground:
    """Where trials are run: data, undisturbed runs to compare with, and processes that start fast."""

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        self.folder, self.without, self.yaml = folder, list(without), write_config(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.fault_injection"])
        self._straight: dict[tuple[str, ...], Any] = {}

    def start(self, name: str, *overrides: str, faults: Iterable[Any] = (), guarded: bool = False,
              devices: int = DEVICES) -> Any:
        """Starts a process that trains the run `name` on so many virtual devices."""
        from benchmarks import fault_injection

        (self.folder / "logs").mkdir(exist_ok=True)
        log = str(self.folder / "logs" / f"{name}.txt")
        arguments = [str(self.yaml), f"run_name={name}", *overrides]
        process = self._context.Process(target=fault_injection.train, daemon=False, args=(
            arguments, list(faults), [] if guarded else self.without, log, devices))
        process.start()
        return process

    def apart(self, function: Callable[..., Any], *given: Any, seconds: float = 600.0) -> Any:
        """What `function(*given)` returns in a process of its own, without the guards that are off."""
        from benchmarks import fault_injection

        ours, theirs = self._context.Pipe(duplex=False)
        log = str(self.folder / "apart.txt")
        process = self._context.Process(target=fault_injection.answer,
                                        args=(function, given, self.without, theirs, log))
        process.start()
        theirs.close()
        try:
            _outlast(process, ours.poll, function.__name__, seconds)
            return ours.recv()
        except EOFError:
            raise Failed(f"{function.__name__} ended without an answer: {Path(log).read_text()[-2000:]}") from None
        finally:
            process.kill()
            process.join()

    def end(self, process: Any, name: str, seconds: float = HANG_SECONDS) -> Ended:
        """Waits for a process; Failed when it hangs for so long."""
        def ended(pause: float) -> bool:
            process.join(pause)
            return process.exitcode is not None

        began = time.monotonic()
        try:
            _outlast(process, ended, name, seconds)
        except Failed:
            process.kill()
            process.join()
            raise
        log = (self.folder / "logs" / f"{name}.txt").read_text()
        return Ended(process.exitcode, log, time.monotonic() - began)

    def train(self, name: str, *overrides: str, faults: Iterable[Any] = (), guarded: bool = False,
              seconds: float = HANG_SECONDS, devices: int = DEVICES) -> Ended:
        return self.end(self.start(name, *overrides, faults=faults, guarded=guarded, devices=devices), name, seconds)

    def finish(self, name: str, *overrides: str, seconds: float = HANG_SECONDS, devices: int = DEVICES) -> None:
        """Starts the command again, as a person would; Failed unless the run is then complete."""
        ended = self.train(name, *overrides, seconds=seconds, devices=devices)
        if ended.code != 0:
            raise Failed(f"started again, {name} exited with {ended.code}: {ended.log.strip()[-300:]}")

    def straight(self, *overrides: str, journal: str = "", faults: Iterable[Any] = ()) -> Path:
        """An undisturbed run, made once: with the decisions of a journal as if known before, or faults in its data."""
        key, faults = (*overrides, journal, repr(faults)), list(faults)
        if key not in self._straight:
            name = f"straight{len(self._straight)}"
            run_dir = self.folder / "runs" / name
            if journal:
                run_dir.mkdir(parents=True)
                (run_dir / "journal.jsonl").write_text(journal)
                faults = [*faults, ("known_decisions", {})]
            ended = self.train(name, *overrides, faults=faults, guarded=True, seconds=600)
            if ended.code != 0:
                raise RuntimeError(f"the undisturbed run exited with {ended.code}: {ended.log[-2000:]}")
            self._straight[key] = run_dir
        return self._straight[key]

    def directory(self, name: str) -> Path:
        return self.folder / "runs" / name

    def same(self, name: str, *overrides: str, straight: Path | None = None, step: int = STEPS) -> None:
        """Failed unless the run's last state, and every update's loss and batch, are those of an undisturbed run."""
        from maxtext.report.run_files import read_metrics

        other = straight or self.straight(*overrides)
        if saved_bits(self.directory(name), step) != saved_bits(other, step):
            raise Failed(f"the state of {name} after update {step} is not that of the undisturbed run")
        kept = [[(record["step"], record.get("train/CE loss"), record.get("data/fingerprint"))
                 for record in read_metrics(str(folder / "metrics.jsonl"))] for folder in (self.directory(name), other)]
        if repr(kept[0]) != repr(kept[1]):
            raise Failed(f"the updates that {name} has logged are not those of the undisturbed run")

    def outcome(self, name: str) -> tuple[list[float], int]:
        """Seconds of each recovery, and the most updates that one of them did again, from the run's own ledger."""
        from maxtext.report.goodput import goodput
        from maxtext.report.run_files import read_run

        run = read_run(str(self.directory(name)))
        found = goodput(run)
        if found is None:
            return [], 0
        skipped = sum(bool(record.get("optim/step skipped")) for record in run.records)
        return found.recoveries, skipped + max((e["updates"] for e in run.events if e["event"] == "lost"), default=0)


def _outlast(process: Any, ended: Callable[[float], bool], name: str, seconds: float) -> None:
    """Waits until `ended` (given a pause to wait) is true, for as long as the process computes.

    Failed when it has been all but idle for so many seconds, or has used DEVICES times as many of the CPU.
    """
    used, since = 0.0, time.monotonic()
    while not ended(min(1.0, seconds / 4)):
        spent = _cpu_seconds(process.pid)
        if spent - used > IDLE * seconds:
            used, since = spent, time.monotonic()
        if time.monotonic() - since > seconds:
            raise Failed(f"{name} hung for {seconds:g} s")
        if spent > DEVICES * seconds:
            raise Failed(f"{name} came to no end in {spent:.0f} s of CPU time")


def _cpu_seconds(pid: int) -> float:
    """Of all threads of a process; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc_pid_stat(5)


def saved_bits(run_dir: Path, step: int) -> dict[str, tuple[str, bytes]]:
    """Every array of a verified checkpoint, as type and bytes by name."""
    import numpy as np

    from maxtext.checkpoint import arrays, manifest

    step_dir = str(run_dir / "checkpoints" / manifest.step_name(step))
    try:
        saved = manifest.read(step_dir)
        manifest.check_files(step_dir, saved)
    except (manifest.Damaged, OSError) as error:
        raise Failed(f"{step_dir} is not whole: {error}") from None
    whole = (np.asarray(arrays.read_leaf(os.path.join(step_dir, saved.arrays), name)) for name in saved.leaves)
    return {name: (leaf.dtype.name, leaf.tobytes()) for name, leaf in zip(saved.leaves, whole, strict=True)}


@dataclasses.dataclass
class Trial:
    """One run through a number of faults: its random numbers, and what its recoveries took.

    Attributes:
      faults: how many it injects. When it fails, all of them count as failed.
      failures: of single faults, where they can be told apart.
    """

    ground: Ground
    name: str
    seed: str
    faults: int = 1
    failures: list[str] = dataclasses.field(default_factory=list)
    recoveries: list[float] = dataclasses.field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def must(self, ended, code: int, *words: str) -> None:
        """Failed unless a process ended with this exit code and said so."""
        if ended.code != code:
            raise Failed(f"exit code {ended.code} instead of {code}: {ended.log.strip()[-400:]}")
        for word in words:
            if word not in ended.log:
                raise Failed(f"nothing was said of {word!r}: {ended.log.strip()[-400:]}")

    def account(self, most_lost: int | None = None) -> None:
        """Takes over recoveries and lost updates from the ledger; Failed when more were lost than may be."""
        self.recoveries, self.lost = self.ground.outcome(self.name)
        if most_lost is not None and self.lost > most_lost:
            raise Failed(f"{self.lost} updates were done again, at most {most_lost} may be")


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind of fault.

    Attributes:
      guards: those without which its trials fail.
      full: trials in the full campaign.
      at_once: the most faults that go into one run.
    """

    name: str
    doc: str
    guards: tuple[str, ...]
    run: Callable[[Trial], None]
    full: int = 10
    at_once: int = 1


def records(ground: Ground, name: str) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    from maxtext.report.run_files import read_metrics

    return read_metrics(str(ground.directory(name) / "metrics.jsonl"))


def wait_for_update(ground: Ground, name: str, update: int, seconds: float = 60.0) -> None:
    """Waits until the metrics of an update are written."""
    from maxtext.report.run_files import last_step

    _wait(lambda: last_step(str(ground.directory(name))) >= update, f"update {update} of {name}", seconds)


def wait_for_token(ground: Ground, name: str, token: int, seconds: float = 60.0) -> None:
    """Waits until a lease has been claimed under this token."""
    _wait((ground.directory(name) / ".lease" / f"{token:08d}.json").exists, f"token {token} of {name}", seconds)


def _wait(ready: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise Failed(f"no {what} in {seconds:g} s")
        time.sleep(0.02)
