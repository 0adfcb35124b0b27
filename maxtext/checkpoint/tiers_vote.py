"""Which snapshot a job goes on from, decided alike by all its processes, and how it is put together again.

Every process publishes the slots that it can see; each then computes the same pure function of all of them. What turns
out to be damaged while it is read is published too, and the vote is taken again without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.integrity import named_leaves
from maxtext.checkpoint.tiers import BadSnapshot, Block, Box, Slot, SnapshotId, box_of

PyTree = Any
Exchange = Callable[[str, str], list[str]]  # (topic, own words) to the words of all processes, in their order


@dataclasses.dataclass(frozen=True)
class Listed:
    """What a vote needs to know of a slot: where it lies and which parts of which arrays it holds."""

    path: str
    id: SnapshotId
    parts: frozenset[tuple[str, Box]]


def listed(slot: Slot) -> Listed:
    return Listed(slot.path, slot.id, frozenset((block.leaf, block.box) for block in slot.blocks))


def newest_complete(slots: Iterable[Listed], shapes: Mapping[str, tuple[int, ...]]) -> SnapshotId | None:
    """The newest id of which the slots together hold every element of every array; None when there is none.

    Parts of one id come from one mesh, so that two of them are the same or do not overlap.
    """
    by_id: dict[SnapshotId, set[tuple[str, Box]]] = {}
    for slot in slots:
        by_id.setdefault(slot.id, set()).update(slot.parts)
    for found in sorted(by_id, reverse=True):
        held = dict.fromkeys(shapes, 0)
        for leaf, box in by_id[found]:
            if leaf in held:
                held[leaf] += _volume(box)
        if held.keys() == {leaf for leaf, _ in by_id[found]} and all(
                held[name] == math.prod(shape) for name, shape in shapes.items()):
            return found
    return None


class Source:
    """The blocks of one snapshot over several slots; each is read and verified once, from the first that has it."""

    def __init__(self, at: SnapshotId, slots: Sequence[Slot]) -> None:
        self._at = at
        self._blocks: dict[str, dict[Box, tuple[Slot, Block]]] = {}
        for slot in slots:
            for block in slot.blocks:
                self._blocks.setdefault(block.leaf, {}).setdefault(block.box, (slot, block))
        self._read: dict[tuple[str, Box], np.ndarray] = {}

    def values(self, leaf: str, box: Box, dtype: np.dtype[Any]) -> np.ndarray:
        """The elements of `box`, of `dtype`.

        Raises BadSnapshot when a block is damaged or missing; its second argument is what not to use again: the path of
        the slot, or the id of the whole snapshot.
        """
        blocks = self._blocks.get(leaf, {})
        if box in blocks:
            return self._block(leaf, box, dtype)
        whole, missing = np.empty([stop - start for start, stop in box], dtype), _volume(box)
        for other in blocks:
            shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
            if all(start < stop for start, stop in shared):
                to = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(shared, box, strict=True))
                of = tuple(slice(s - c, e - c) for (s, e), (c, _) in zip(shared, other, strict=True))
                whole[to] = self._block(leaf, other, dtype)[of]
                missing -= _volume(shared)
        if missing:
            raise BadSnapshot(f"snapshot of update {self._at.step}: {leaf} cannot be read here in full", str(self._at))
        return whole

    def _block(self, leaf: str, box: Box, dtype: np.dtype) -> np.ndarray:
        if (leaf, box) not in self._read:
            slot, block = self._blocks[leaf][box]
            if block.dtype != dtype.name:
                raise BadSnapshot(f"snapshot {slot.path}: {leaf} is {block.dtype}, not {dtype.name}", slot.path)
            try:
                self._read[leaf, box] = slot.read(block)
            except BadSnapshot as bad:
                raise BadSnapshot(str(bad), slot.path) from None
        return self._read[leaf, box]


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


@dataclasses.dataclass(frozen=True)
class Found:
    """A state that came out of snapshots."""

    id: SnapshotId
    state: PyTree
    extra: dict[str, Any]


def restore(abstract_state: PyTree, slots: Sequence[Slot], exchange: Exchange, newer_than: int,
            told: Callable[[str], None]) -> Found | None:
    """The newest complete snapshot on the shardings of `abstract_state`; the same one in every process.

    Args:
      slots: the sealed slots that this process can read.
      exchange: tells all processes what this one has, and it what they have.
      newer_than: a snapshot of an earlier step is not wanted; there is a checkpoint of this step.
      told: hears of each damaged slot.

    Returns None when no snapshot is complete and new enough.
    """
    wanted = named_leaves(abstract_state)
    shapes = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    everywhere = [_listed_of(text) for text in exchange("slots", json.dumps([_text_of(listed(s)) for s in slots]))]
    known, bad = set(itertools.chain(*everywhere)), set[str]()

    def usable(slot: Slot | Listed) -> bool:
        return bad.isdisjoint((slot.path, str(slot.id)))

    for attempt in itertools.count():  # each pass rules out a slot or a snapshot
        chosen = newest_complete(filter(usable, known), shapes)
        if chosen is None or chosen.step < newer_than:
            return None
        of_id = [slot for slot in slots if slot.id == chosen and usable(slot)]
        parts, broken = None, ""
        try:
            parts = _local_parts(wanted, Source(chosen, of_id))
        except BadSnapshot as error:
            told(str(error.args[0]))
            broken = error.args[1]
        broken_anywhere = {text for text in exchange(f"read {attempt}", broken) if text}
        if not broken_anywhere and parts is not None:
            return Found(chosen, _assembled(abstract_state, wanted, parts), of_id[0].extra)
        bad |= broken_anywhere
    raise AssertionError("unreachable")


def _local_parts(wanted: Mapping[str, Any], source: Source) -> dict[str, dict[Box, np.ndarray]]:
    """What the devices of this process need of every leaf."""
    parts: dict[str, dict[Box, np.ndarray]] = {}
    for name, leaf in wanted.items():
        boxes = {box_of(index, leaf.shape) for index in leaf.sharding.addressable_devices_indices_map(
            leaf.shape).values()}
        parts[name] = {box: source.values(name, box, leaf.dtype) for box in boxes}
    return parts


def _assembled(abstract_state: PyTree, wanted: Mapping[str, Any], parts: Mapping[str, dict[Box, np.ndarray]]) -> PyTree:
    leaves = [jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, name=name, shape=leaf.shape:
                                           parts[name][box_of(index, shape)])
              for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _text_of(slot: Listed) -> list[Any]:
    return [slot.path, dataclasses.astuple(slot.id), sorted(slot.parts)]


def _listed_of(text: str) -> list[Listed]:
    return [Listed(path, SnapshotId(*at), frozenset((leaf, tuple((a, b) for a, b in box)) for leaf, box in parts))
            for path, at, parts in json.loads(text)]
