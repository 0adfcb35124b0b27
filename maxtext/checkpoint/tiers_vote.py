"""Which snapshot a job goes on from, decided alike by all its processes, and how it is put together again.

Every process publishes the slots that it can see; each then computes the same pure function of all of them. What turns
out to be damaged while it is read is published too, and the vote is taken again without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint.integrity import named_leaves
from maxtext.checkpoint.tiers import BadSnapshot, Block, Box, Slot, SnapshotId, box_of

PyTree = Any
Exchange = Callable[[str, str], list[str]]  # (topic, own words) to the words of all processes, in their order


@dataclasses.dataclass(frozen=True)
class Listed:
    """What a vote needs to know of a slot: where it lies and which parts of which arrays it holds.

    Attributes:
      follows, update: of an entry of the log of gradients (`tiers_log`): the state that its update began with, and what
        the update was made of besides.
    """

    path: str
    id: SnapshotId
    parts: frozenset[tuple[str, Box]]
    follows: SnapshotId | None = None
    update: str = ""


def listed(slot: Slot) -> Listed:
    return Listed(slot.path, slot.id, frozenset((block.leaf, block.box) for block in slot.blocks))


def newest_complete(slots: Iterable[Listed], shapes: Mapping[str, tuple[int, ...]]) -> SnapshotId | None:
    """The newest id of which the slots together hold every element of every array; None when there is none.

    Parts of one id come from one mesh, so that two of them are the same or do not overlap.
    """
    by_id: dict[SnapshotId, set[tuple[str, Box]]] = {}
    for slot in slots:
        by_id.setdefault(slot.id, set()).update(slot.parts)
    return next((found for found in sorted(by_id, reverse=True) if _complete(by_id[found], shapes)), None)


def _complete(parts: Collection[tuple[str, Box]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    held = dict.fromkeys(shapes, 0)
    for leaf, box in parts:
        if leaf in held:
            held[leaf] += _volume(box)
    return held.keys() == {leaf for leaf, _ in parts} and all(
        held[name] == math.prod(shape) for name, shape in shapes.items())


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


class Vote:
    """The slots of one kind that all processes see, less those that turn out to be damaged; in all processes alike."""

    def __init__(self, abstract: PyTree, slots: Mapping[str, Slot], mine: Iterable[Listed], exchange: Exchange,
                 topic: str, told: Callable[[str], None]) -> None:
        """
        Args:
          abstract: what a whole one of them holds, with the shardings that it is wanted on.
          slots: the sealed ones that this process can read, by path; `mine` says what they hold.
          exchange: tells all processes what this one has, and it what they have; topics begin with `topic`.
          told: hears of each damaged slot.
        """
        self._abstract, self._wanted, self._slots = abstract, named_leaves(abstract), slots
        self._shapes = {name: tuple(leaf.shape) for name, leaf in self._wanted.items()}
        self._exchange, self._topic, self._told = exchange, topic, told
        self._known = {*itertools.chain(*map(_listed_of, exchange(f"{topic}slots", _text_of(mine))))}
        self._bad, self._reads = set[str](), itertools.count()

    def usable(self) -> list[Listed]:
        return [slot for slot in self._known if self._bad.isdisjoint((slot.path, str(slot.id)))]

    def newest(self) -> SnapshotId | None:
        return newest_complete(self.usable(), self._shapes)

    def complete(self, at: SnapshotId) -> bool:
        parts = {part for slot in self.usable() if slot.id == at for part in slot.parts}
        return bool(parts) and _complete(parts, self._shapes)

    def read(self, at: SnapshotId) -> tuple[PyTree, dict[str, Any]] | None:
        """A complete one, and its `extra`; None when something of it is damaged, which is then ruled out."""
        mine = [self._slots[slot.path] for slot in sorted(self.usable(), key=lambda slot: slot.path)
                if slot.id == at and slot.path in self._slots]
        parts, broken = None, ""
        try:
            parts = _local_parts(self._wanted, Source(at, mine))
        except BadSnapshot as error:
            self._told(str(error.args[0]))
            broken = error.args[1]
        broken_anywhere = {text for text in self._exchange(f"{self._topic}read {next(self._reads)}", broken) if text}
        if not broken_anywhere and parts is not None:
            return _assembled(self._abstract, self._wanted, parts), mine[0].extra
        self._bad |= broken_anywhere
        return None


def restore(abstract_state: PyTree, slots: Sequence[Slot], exchange: Exchange, newer_than: int,
            told: Callable[[str], None], reach: Callable[[SnapshotId], int] = lambda at: at.step) -> Found | None:
    """The newest complete snapshot on the shardings of `abstract_state`; the same one in every process.

    Args:
      slots: the sealed slots that this process can read.
      exchange: tells all processes what this one has, and it what they have.
      newer_than: a snapshot from which no later step is reached is not wanted; there is a checkpoint of this step.
      told: hears of each damaged slot.
      reach: the step that can be reached from a snapshot.

    Returns None when no snapshot is complete and new enough.
    """
    vote = Vote(abstract_state, {slot.path: slot for slot in slots}, map(listed, slots), exchange, "", told)
    while True:  # each pass rules out a slot or a snapshot
        chosen = vote.newest()
        if chosen is None or reach(chosen) < newer_than:
            return None
        found = vote.read(chosen)
        if found is not None:
            return Found(chosen, *found)


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


def _text_of(slots: Iterable[Listed]) -> str:
    """Slots of one worker mostly hold the same parts, which are written once."""
    layouts: dict[frozenset[tuple[str, Box]], int] = {}
    rows = [[slot.path, dataclasses.astuple(slot.id), layouts.setdefault(slot.parts, len(layouts)),
             None if slot.follows is None else dataclasses.astuple(slot.follows), slot.update] for slot in slots]
    return json.dumps([[sorted(parts) for parts in layouts], rows])


def _listed_of(text: str) -> list[Listed]:
    layouts, rows = json.loads(text)
    parts = [frozenset((leaf, tuple((a, b) for a, b in box)) for leaf, box in layout) for layout in layouts]
    return [Listed(path, SnapshotId(*at), parts[layout], None if follows is None else SnapshotId(*follows), update)
            for path, at, layout, follows, update in rows]
