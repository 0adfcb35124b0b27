"""Snapshots of a training state in the hosts' memory: files in /dev/shm, which outlive the process that wrote them.

Each worker owns a folder with two slots and overwrites the older one, so that a whole snapshot exists at every moment.
A slot is

    header   magic, place and length of the index, hash of the index: the seal. It is zeroed first and written last.
    blocks   the worker's own parts of the arrays, each with its place in the whole array and a hash
    index    JSON: run, generation, step, `extra`, and what the blocks are

A torn write therefore has no seal, and a changed bit does not have its hash. A worker that dies can leave nothing that
passes for a snapshot. Optionally a second copy lies in the folder of the next worker, for the loss of a whole folder.

The idea of memory tiers with a copy on a peer: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with
In-Memory Checkpoints", SOSP 2023.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint.integrity import is_key, named_leaves
from maxtext.config.reason import placed

PyTree = Any
Box = tuple[tuple[int, int], ...]  # [start, stop) along each dim of the whole array
SLOTS = 2
_HEADER = struct.Struct("<8sQQ32s")
_MAGIC = b"MTSNAP01"
_SPACE = 4096  # bytes kept for the header


class BadSnapshot(ValueError):
    """A slot, or a block of it, is not what was written; the message names it."""


@dataclasses.dataclass(frozen=True, order=True)
class SnapshotId:
    """Newer is greater: the generation that lived last first, then the step."""

    generation: int
    step: int
    run: str


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of one array as it lies in a slot."""

    leaf: str
    box: Box
    dtype: str
    offset: int
    length: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Slot:
    """A sealed slot whose index is whole; its blocks are verified when they are read."""

    path: str
    id: SnapshotId
    blocks: tuple[Block, ...]
    extra: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # of the whole arrays

    def read(self, block: Block) -> np.ndarray:
        """The values of one block. Raises BadSnapshot when they are not those that were written."""
        try:
            with open(self.path, "rb") as file:
                file.seek(block.offset)
                data = file.read(block.length)
        except OSError as error:
            raise BadSnapshot(f"snapshot {placed(error)}") from None
        if _digest(data) != block.digest:
            raise BadSnapshot(f"snapshot {self.path}: the bytes of {block.leaf} at {_said(block.box)} are not those "
                              f"that were written")
        shape = tuple(stop - start for start, stop in block.box)
        return np.frombuffer(data, np.dtype(block.dtype)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class HostPart:
    """A part of one array in this process's memory."""

    leaf: str
    box: Box
    values: np.ndarray


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _said(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a device's index into an array of `shape`."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def host_parts(state: PyTree) -> list[HostPart]:
    """This process's parts of every array, each once. The arrays may be donated afterwards.

    All copies are started before the first is waited for. On CPU nothing is copied: a part is a view of the device's
    memory, and JAX leaves a buffer that somebody views alone and puts the output elsewhere.
    """
    shards = []
    for name, leaf in named_leaves(state).items():
        if is_key(leaf.dtype):
            raise TypeError(f"leaf {name} holds typed random keys; a snapshot takes their words (jax.random.key_data)")
        distinct = {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        shards += [(name, box, data) for box, data in distinct.items()]
    for _, _, data in shards:
        data.copy_to_host_async()
    return [HostPart(name, box, np.asarray(data)) for name, box, data in shards]


def write_slot(path: str, at: SnapshotId, parts: list[HostPart], extra: dict[str, Any],
               shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Overwrites a slot; until the last of its writes it has no seal. Raises OSError, as on a full memory."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, bytes(_HEADER.size), 0)
        blocks, offset = [], _SPACE
        for part in parts:
            data = memoryview(np.ascontiguousarray(part.values).reshape(-1).view(np.uint8))
            _write_all(file, data, offset)
            blocks.append(Block(part.leaf, part.box, part.values.dtype.name, offset, len(data), _digest(data)))
            offset += len(data)
        index = json.dumps({"id": dataclasses.astuple(at), "extra": extra,
                            "shapes": {name: list(shape) for name, shape in shapes.items()},
                            "blocks": [dataclasses.astuple(block) for block in blocks]}).encode()
        _write_all(file, memoryview(index), offset)
        os.ftruncate(file, offset + len(index))
        os.pwrite(file, _HEADER.pack(_MAGIC, offset, len(index), hashlib.blake2b(index, digest_size=32).digest()), 0)
    finally:
        os.close(file)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def read_slot(path: str) -> Slot:
    """The index of a slot. Raises BadSnapshot when it has no seal or its index is damaged."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not any(header):
                raise BadSnapshot(f"snapshot {path} has no seal: its writer was cut off")
            magic, offset, length, digest = _HEADER.unpack(header)
            index = b""
            if magic == _MAGIC and offset + length == os.fstat(file.fileno()).st_size:  # else no place to look at
                file.seek(offset)
                index = file.read()
    except OSError as error:
        raise BadSnapshot(f"snapshot {path}: {placed(error)}") from None
    if hashlib.blake2b(index, digest_size=32).digest() != digest:
        raise BadSnapshot(f"snapshot {path}: its seal does not fit its index")
    found = json.loads(index)
    blocks = tuple(Block(leaf, tuple((a, b) for a, b in box), dtype, offset, length, digest)
                   for leaf, box, dtype, offset, length, digest in found["blocks"])
    return Slot(path, SnapshotId(*found["id"]), blocks, found["extra"],
                {name: tuple(shape) for name, shape in found["shapes"].items()})


def slots_below(root: str, run: str, told: Callable[[str], None], ending: str = ".slot") -> Iterator[Slot]:
    """Every sealed slot of run `run` in the workers' folders below `root`; what is passed over is told by name.

    Args:
      ending: of the files: of snapshots, or of the log of gradients (`tiers_log`).
    """
    for path in sorted(Path(root).glob(f"worker_*/*{ending}")):
        try:
            slot = read_slot(str(path))
        except BadSnapshot as bad:
            told(str(bad))
            continue
        if slot.id.run != run:
            told(f"snapshot {path} is of another run ({slot.id.run}, not {run})")
            continue
        yield slot


def memory_folder() -> str:
    """A folder of a file system in memory; on systems without one, that of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def memory_prefix(run_dir: str) -> str:
    """How the names of a run's folders there begin."""
    return f"maxtext-{hashlib.blake2b(os.path.abspath(run_dir).encode(), digest_size=6).hexdigest()}-"


def worker_folder(root: str, worker: int) -> str:
    return os.path.join(root, f"worker_{worker}")


class Snapshots:
    """Writes the snapshots of one worker: the copy out of the devices at once, the rest in a thread."""

    def __init__(self, root: str, worker: int, run: str, generation: int, peer: int | None,
                 told: Callable[[str], None]) -> None:
        """`peer` is the worker whose folder takes a second copy, None for no copy; `told` hears of failures."""
        self.root, self.worker, self.run, self.generation, self.peer, self.told = (root, worker, run, generation, peer,
                                                                                   told)
        folder = worker_folder(root, worker)
        self._own = [os.path.join(folder, f"own_{number}.slot") for number in range(SLOTS)]
        self._copies = [] if peer is None else [
            os.path.join(worker_folder(root, peer), f"of_{worker}_{number}.slot") for number in range(SLOTS)]
        self._thread: threading.Thread | None = None
        self._sealed = True
        self.stall_seconds = 0.0  # that the last `take` kept its caller
        os.makedirs(folder, exist_ok=True)

    def take(self, step: int, state: PyTree, extra: dict[str, Any]) -> None:
        """Begins a snapshot. When it returns the arrays may be donated. One snapshot is under way at a time."""
        began = time.perf_counter()
        self.wait()
        parts = host_parts(state)
        shapes = {name: leaf.shape for name, leaf in named_leaves(state).items()}
        at = SnapshotId(self.generation, step, self.run)
        self._thread = threading.Thread(target=self._write, args=(at, parts, extra, shapes), name=f"snapshot {step}",
                                        daemon=True)
        self._thread.start()
        self.stall_seconds = time.perf_counter() - began

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the snapshot under way; whether the last one is sealed."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return self._sealed

    def forget(self) -> None:
        """Removes what this worker has written, for a run that goes back: it will do updates of the same number."""
        self.wait()
        for path in (*self._own, *self._copies):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def sealed(self) -> list[SnapshotId]:
        """Of the run, in this worker's own slots, ascending."""
        found = []
        for path in self._own:
            with contextlib.suppress(BadSnapshot):
                found.append(read_slot(path).id)
        return sorted(one for one in found if one.run == self.run)

    def _write(self, at: SnapshotId, parts: list[HostPart], extra: dict[str, Any],
               shapes: dict[str, tuple[int, ...]]) -> None:
        try:
            for slots in filter(None, (self._own, self._copies)):
                os.makedirs(os.path.dirname(slots[0]), exist_ok=True)
                write_slot(min(slots, key=self._age), at, parts, extra, shapes)
            self._sealed = True
        except OSError as error:
            self._sealed = False
            self.told(f"no snapshot of update {at.step} was kept in memory: {placed(error)}")

    def _age(self, path: str) -> tuple[bool, SnapshotId]:
        """What to overwrite first: a slot that holds nothing whole of this run, then the older one."""
        nothing = SnapshotId(-1, -1, "")
        try:
            found = read_slot(path).id
        except BadSnapshot:
            return False, nothing
        return (True, found) if found.run == self.run else (False, nothing)
