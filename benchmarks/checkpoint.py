"""What saving and restoring cost, beside a plain copy of the same bytes on the same disk in the same run.

    python benchmarks/checkpoint.py [--gb 1.0] [--rounds 5] [--folder DIR] [--write]

A state like that of AdamW (weights and two moments, float32, shared by 4 virtual devices) is saved, its files are read
and copied plainly, and it is restored, by turns. A plain copy reads the checkpoint's files and writes them again, to
the disk (fsync). The system has the files in its memory neither at a copy, nor at a read, nor at a restore. Medians are
shown. `--write` keeps them in docs/measured/checkpoint.json and puts the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_page import Cell, keep, machine, shown

DEVICES, CHUNK = 4, 1 << 24


def make_state(gb: float) -> dict[str, dict[str, Any]]:
    """Random weights and moments of so many 1e9 bytes together, and their number of updates."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("fsdp",), devices=jax.devices()[:DEVICES])
    layers = max(1, round(gb * 1e9 / 4 / 3 / 1024 / 4096 * 0.6))
    rows = max(DEVICES, round(gb * 1e9 / 4 / 3 / 1024 * 0.4) // DEVICES * DEVICES)
    rng = np.random.default_rng(0)

    def tree() -> dict[str, Any]:
        shapes = {"blocks": ((layers, 1024, 4096), PartitionSpec(None, "fsdp")),
                  "embed": ((rows, 1024), PartitionSpec("fsdp"))}
        return {name: jax.device_put(rng.random(shape, np.float32), NamedSharding(mesh, spec))
                for name, (shape, spec) in shapes.items()}

    return {"params": tree(), "mu": tree(), "nu": tree()}


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def drop(folder: Path) -> int:
    """Removes what the system remembers of the files; their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(file.fileno()).st_size
    return total


def copy_plainly(step_dir: Path, folder: Path) -> None:
    folder.mkdir()
    for number, path in enumerate(path for path in step_dir.rglob("*") if path.is_file()):
        with open(path, "rb") as source, open(folder / str(number), "wb") as file:
            shutil.copyfileobj(source, file, CHUNK)
            file.flush()
            os.fsync(file.fileno())


def read_plainly(folder: Path) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def measure(gb: float, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each part by round, and `bytes`, the size of what is saved."""
    import jax

    from maxtext.checkpoint import manifest
    from maxtext.checkpoint.manager import Checkpoints
    from maxtext.checkpoint.tiers import Snapshots, memory_folder
    from maxtext.config.schema import CheckpointConfig

    state = make_state(gb)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found: dict[str, list[float]] = {
        name: [] for name in ("save", "tidied", "held", "copy", "read", "restore", "snapshot", "sealed")}
    checkpoints = Checkpoints(str(folder / "checkpoints"), CheckpointConfig(keep_last=1))
    memory = tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=memory_folder())
    snapshots = Snapshots(memory, 0, "benchmark", 0, None, print)
    commit, committed = manifest.commit, [0.0]

    def noted(step_dir: str, token: int) -> None:
        commit(step_dir, token)
        committed[0] = time.perf_counter()

    manifest.commit = noted
    try:
        for turn in range(rounds + 1):  # the first compiles and imports, and does not count
            began = time.perf_counter()
            checkpoints.save(turn, state, {})
            found["held"].append(time.perf_counter() - began)
            checkpoints.wait()
            found["save"].append(committed[0] - began)
            found["tidied"].append(time.perf_counter() - began)
            step_dir = folder / "checkpoints" / f"step_{turn:08d}"
            found["bytes"] = [drop(step_dir)]
            found["copy"].append(timed(lambda step_dir=step_dir: copy_plainly(step_dir, folder / "copy")))
            shutil.rmtree(folder / "copy")
            drop(step_dir)
            found["read"].append(timed(lambda step_dir=step_dir: read_plainly(step_dir)))
            drop(step_dir)
            found["restore"].append(timed(lambda turn=turn: jax.block_until_ready(
                checkpoints.restore(abstract, turn).state)))
            began = time.perf_counter()
            snapshots.take(turn, state, {})
            found["snapshot"].append(snapshots.stall_seconds)
            assert snapshots.wait()
            found["sealed"].append(time.perf_counter() - began)
    finally:
        manifest.commit = commit
        checkpoints.close()
        shutil.rmtree(memory)
    return {name: values[1:] if len(values) > 1 else values for name, values in found.items()}


COLUMNS, FORMATS = ("", "seconds", "GB/s", "beside"), {"GB/s": ",.2f"}


def table(found: dict[str, list[float]]) -> list[tuple[Cell, ...]]:
    """What each part took, and against what it is held: rows of COLUMNS."""
    from maxtext.config.schema import CheckpointConfig

    size, cfg = found["bytes"][0], CheckpointConfig()
    of = {name: statistics.median(values) for name, values in found.items()}

    def rate(name: str) -> tuple[float, float]:
        return round(of[name], 2), round(size / of[name] / 1e9, 2)

    def share(plain: str, ours: str) -> str:
        ratios = [one / other for one, other in zip(found[plain], found[ours], strict=True)]
        return f"{statistics.median(ratios):.0%} of a plain {plain}'s rate"

    return [("plain copy", *rate("copy"), None),
            ("save: written, hashed, committed", *rate("save"), share("copy", "save")),
            ("until it has been read back and the old one is deleted", round(of["tidied"], 2), None, None),
            ("of that the caller waits", round(of["held"], 3), None,
             f"{of['held'] / cfg.every:.4%} of updates of 1 s, one save in {cfg.every:,}"),
            ("restore: hashed, read, fingerprints compared", *rate("restore"), share("copy", "restore")),
            ("plain read", *rate("read"), None),
            ("snapshot into memory: the caller waits", round(of["snapshot"], 3), None,
             f"{of['snapshot'] / cfg.snapshot_every:.3%} of updates of 1 s, one snapshot in {cfg.snapshot_every}"),
            ("until it is sealed", *rate("sealed"), None)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="1e9 bytes of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; by default that of temporary files")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/, write the page's table")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    where = machine()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-benchmark-") as folder:
        found = measure(options.gb, options.rounds, Path(folder))
    for name, values in found.items():
        print(f"{name}: {' '.join(f'{value:.3f}' for value in values)}")
    print(shown(COLUMNS, table(found), FORMATS))
    if options.write:
        keep("checkpoint", "reliability.md", COLUMNS, table(found), formats=FORMATS, machine=where, raw=found,
             what=f"{found['bytes'][0] / 1e9:.2f} GB, medians of {options.rounds} rounds",
             command="python benchmarks/checkpoint.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
