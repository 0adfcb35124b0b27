"""Damage to what is stored, checkpoints on disk and snapshots in memory, and what a restore then makes of it.

Each trial harms a copy, restores it in this process as a run does, on one mesh or another, and compares every bit with
what was stored. So hundreds of trials take minutes. The same is asked of both tiers: either the newest state with its
own bits, where the harm touched nothing that counts, or an older one with its own bits.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.fault_injection import flip_bit
from maxtext.checkpoint import manifest, tiers
from maxtext.checkpoint.integrity import named_leaves
from maxtext.checkpoint.manager import Checkpoints
from maxtext.checkpoint.tiers import HostPart, SnapshotId, box_of, memory_folder, slots_below, worker_folder, write_slot
from maxtext.checkpoint.tiers_vote import restore
from maxtext.config.load import load
from maxtext.config.schema import Config
from maxtext.parallel.mesh import make_mesh
from maxtext.train.state import abstract_state

MESHES = ((4, 1), (2, 2), (1, 4), (2, 1), (1, 2), (1, 1))  # data x fsdp
OLDER, NEWER, RUN = 8, 12, "campaign"  # steps of both tiers
PAGE = 4096
Bits = dict[str, bytes]


def bits_of(state: Any) -> Bits:
    return {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state).items()}


class Asked:
    """What runs of one config would ask a restore for, by mesh."""

    def __init__(self, config: str, overrides: list[str]) -> None:
        self._cfg, self._made = load(config, overrides), dict[tuple[int, int], Any]()

    @property
    def checkpoint(self) -> Any:
        return self._cfg.checkpoint

    def on(self, shape: tuple[int, int]) -> Any:
        """The abstract state on data x fsdp devices."""
        if shape not in self._made:
            mesh_config = dataclasses.replace(self._cfg.mesh, data=shape[0], fsdp=shape[1])
            cfg: Config = dataclasses.replace(self._cfg, mesh=mesh_config)
            mesh = make_mesh(cfg, jax.devices()[:shape[0] * shape[1]])
            with jax.set_mesh(mesh):
                self._made[shape] = abstract_state(cfg, mesh)
        return self._made[shape]


# ---- harm to files


def flip(rng: random.Random, path: Path) -> str:
    where, bit = rng.random(), rng.randrange(8)
    flip_bit(str(path), where, bit)
    return f"bit {bit} at {where:.4f} of {path.name}"


def tear(rng: random.Random, path: Path) -> str:
    """A write that did not end, or a page that came back as zeros, at a boundary of pages; or nothing at all."""
    data, how = path.read_bytes(), rng.choice(("cut", "cut", "page", "page", "empty", "gone"))
    at = rng.randrange(0, len(data), PAGE)
    if how == "cut" and at == 0:
        at = len(data) - 1  # the last byte alone
    if how == "gone":
        path.unlink()
    else:
        page = data[:at] + bytes(len(data[at:at + PAGE])) + data[at + PAGE:]
        path.write_bytes({"cut": data[:at], "page": page, "empty": b""}[how])
    return f"{how} at {at} of {path.name}, {len(data)} bytes"


def cut_off(rng: random.Random, step_dir: Path) -> str:
    """A save that was cut off between or within its writes: files up to some place, and no commit.

    Arrays are written in any order, so they are shuffled; the manifest comes last, under a name that does not count.
    """
    (step_dir / manifest.NAME).rename(step_dir / f"{manifest.NAME}.t0.tmp")
    (step_dir / manifest.MARKER).touch()
    files = sorted(path for path in step_dir.rglob("*") if path.is_file() and path.parent != step_dir)
    rng.shuffle(files)
    files.append(step_dir / f"{manifest.NAME}.t0.tmp")
    kept = rng.randrange(len(files) + 1)
    for path in files[kept:]:
        data = path.read_bytes()
        if path is files[kept] and rng.random() < 0.5:
            path.write_bytes(data[:rng.randrange(0, len(data) + 1, PAGE)])
        else:
            path.unlink()
    return f"cut off after {kept} of {len(files)} files"


# ---- checkpoints


def checkpoints(config: str, overrides: list[str], source: str, seed: str, count: int, how: str) -> list[str]:
    """Harms the step NEWER of copies of a run directory; what went wrong, a line each."""
    rng, asked, wrong = random.Random(seed), Asked(config, overrides), list[str]()
    with tempfile.TemporaryDirectory(dir=memory_folder(), prefix="faults-") as folder:
        pristine = _two_steps(source, Path(folder) / "pristine")
        expected = {step: bits_of(Checkpoints(f"{pristine}/checkpoints", asked.checkpoint, writer=False).restore(
            asked.on((1, 1)), step).state) for step in (OLDER, NEWER)}
        assert expected[OLDER] != expected[NEWER]
        for number in range(count):
            copy = Path(folder) / "copy"
            shutil.copytree(pristine, copy)
            step_dir, shape = copy / "checkpoints" / manifest.step_name(NEWER), rng.choice(MESHES)
            before = {path: path.read_bytes() for path in step_dir.rglob("*") if path.is_file()}
            if how == "torn" and rng.random() < 0.3:
                done = cut_off(rng, step_dir)
            else:
                path = rng.choice(sorted(path for path, data in before.items() if data))
                done = flip(rng, path) if how == "flip" else tear(rng, path)
            changed = any(not path.exists() or path.read_bytes() != data for path, data in before.items())
            try:
                found = Checkpoints(f"{copy}/checkpoints", asked.checkpoint).restore(asked.on(shape))
                step, bits = found.step, bits_of(found.state)
            except Exception as error:
                wrong.append(f"checkpoint {number} on {shape}: {done}: {type(error).__name__}: {error}"[:400])
            else:
                if step != (OLDER if changed else NEWER) or bits != expected[step]:
                    wrong.append(f"checkpoint {number} on {shape}: {done}: update {step} was restored, its bits "
                                 f"{'right' if bits == expected[step] else 'WRONG'}")
            shutil.rmtree(copy)
    return wrong


def _two_steps(source: str, to: Path) -> Path:
    """A copy of a run directory with the steps OLDER and NEWER alone."""
    shutil.copytree(source, to)
    for path in (to / "checkpoints").iterdir():
        if path.name not in (manifest.step_name(OLDER), manifest.step_name(NEWER)):
            shutil.rmtree(path)
    return to


# ---- snapshots in memory


def snapshots(config: str, overrides: list[str], source: str, seed: str, count: int, how: str) -> list[str]:
    """Harms one slot of the step NEWER, of a job of as many workers as devices; what went wrong, a line each.

    Half of the jobs keep a second copy of each part at the next worker, which must then make good the harm.
    """
    rng, asked, wrong = random.Random(seed), Asked(config, overrides), list[str]()
    saved = Checkpoints(f"{source}/checkpoints", asked.checkpoint, writer=False)
    states = {step: saved.restore(asked.on((1, 4)), step).state for step in (OLDER, NEWER)}
    expected = {step: bits_of(state) for step, state in states.items()}
    for number in range(count):
        with tempfile.TemporaryDirectory(dir=memory_folder(), prefix="faults-") as root:
            copies, shape, victim = rng.random() < 0.5, rng.choice(MESHES), rng.randrange(4)
            _write(root, OLDER, states[OLDER], copies)
            if how == "torn" and rng.random() < 0.3:
                writes = rng.randrange(1, 40)
                done = f"cut off after {writes} writes"
                _write(root, NEWER, states[NEWER], copies, {victim: writes})
            else:
                _write(root, NEWER, states[NEWER], copies)
                path = Path(_slot(root, victim, victim, NEWER))
                done = flip(rng, path) if how == "flip" else tear(rng, path)
            told: list[str] = []
            try:
                found = restore(asked.on(shape), list(slots_below(root, RUN, told.append)),
                                lambda topic, words: [words], -1, told.append)
                step, bits = found.id.step, bits_of(found.state)
            except Exception as error:
                wrong.append(f"snapshot {number} on {shape}: {done}: {type(error).__name__}: {error}"[:400])
                continue
            # The newer state, though harmed, is right where a copy made the harm good, or it lies in unused bytes.
            silent = not told and not done.startswith("gone")  # of a slot that is not there nobody can tell
            if bits != expected[step] or (step == OLDER and (copies or silent)):
                wrong.append(f"snapshot {number} on {shape}{' with copies' if copies else ''}: {done}: update {step} "
                             f"was restored, its bits {'right' if bits == expected[step] else 'WRONG'}; {told}")
    return wrong


def _slot(root: str, of: int, at: int, step: int) -> str:
    kind = "own" if of == at else f"of_{of}"
    return os.path.join(worker_folder(root, at), f"{kind}_{step % 8 // 4}.slot")


def _write(root: str, step: int, state: Any, copies: bool, cut: dict[int, int] | None = None) -> None:
    """Each device's parts as a worker's slot, and in the next worker's folder; a worker in `cut` dies amid its own."""
    leaves = named_leaves(state)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    for worker, device in enumerate(jax.devices()):
        parts = [HostPart(name, box_of(shard.index, leaf.shape), np.asarray(shard.data))
                 for name, leaf in leaves.items() for shard in leaf.addressable_shards if shard.device == device]
        for at in {worker, (worker + 1) % 4} if copies else {worker}:
            os.makedirs(worker_folder(root, at), exist_ok=True)
            with _cut_after((cut or {}).get(worker, 0) if at == worker else 0):
                write_slot(_slot(root, worker, at, step), SnapshotId(0, step, RUN), parts, {"step": step}, shapes)


class _CutOff(Exception):
    pass


@contextmanager
def _cut_after(writes: int) -> Iterator[None]:
    """The process dies, as it were, after so many writes; 0: it does not."""
    if not writes:
        yield
        return
    write, left = os.pwrite, [writes]

    def counted(*given: Any) -> int:
        if not left[0]:
            raise _CutOff
        left[0] -= 1
        return write(*given)

    tiers.os.pwrite = counted
    try:
        yield
    except _CutOff:
        pass
    finally:
        tiers.os.pwrite = write
