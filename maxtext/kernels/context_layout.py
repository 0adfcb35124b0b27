"""Which pairs of blocks the devices of an axis compute, and which blocks they fetch for it; numpy, before any compile.

Each device cuts its two chunks (see parallel/sequence.py) into blocks. A block of queries meets the blocks of keys that
some query in it sees. Keys on the device itself come first, so that others travel meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable

import numpy as np

from maxtext.kernels.block_pairs import OFFSET, VALID
from maxtext.parallel.sequence import chunks_of, holder

Permutation = tuple[tuple[int, int], ...]  # (from, to)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of one attention: chunks of `chunk` tokens, cut into blocks of `block`, the last of which may be short."""

    devices: int
    chunk: int
    block: int
    window: int | None

    @property
    def blocks(self) -> int:
        """Of one chunk."""
        return -(-self.chunk // self.block)

    @property
    def hops(self) -> int:
        """How many chunks before its own a query sees; all of them without a window."""
        most = 2 * self.devices - 1
        return most if self.window is None else min(most, -(-(self.window - 1) // self.chunk))

    @property
    def near(self) -> bool:
        """Whether fetching what the window holds from neighbours moves less than fetching everything."""
        return self.window is not None and 2 * (self.window - 1) < 2 * self.chunk * (self.devices - 1)

    def first_block(self, hop: int) -> int:
        """The first block that a window reaches in the chunk that lies `hop` chunks back."""
        assert self.window is not None
        return max(0, self.chunk - (self.window - 1 - (hop - 1) * self.chunk)) // self.block


@dataclasses.dataclass(frozen=True)
class Message:
    """Blocks fetched at once: each permutation brings those of one half of a device, from block `first` on."""

    first: int
    halves: tuple[tuple[int, Permutation], ...]


@functools.cache
def messages(layout: Layout) -> tuple[Message, ...]:
    """What the window of each half needs from neighbours, one message for each half and distance in chunks."""
    devices, found = layout.devices, []
    for half in (0, 1):
        for hop in range(1, layout.hops + 1):
            sent: tuple[list, list] = ([], [])
            for device in range(devices):
                chunk = chunks_of(device, devices)[half] - hop
                if chunk < 0:
                    continue
                source, place = holder(chunk, devices)
                if source != device:
                    sent[place].append((source, device))
            halves = tuple((place, tuple(pairs)) for place, pairs in enumerate(sent) if pairs)
            found.append(Message(layout.first_block(hop), halves))
    return tuple(found)


@functools.cache
def own_pairs(layout: Layout) -> np.ndarray:
    """Pairs of a device's own blocks, int32 (C, P, 4), with the columns of kernels/block_pairs.py."""

    def find(device: int) -> dict[int, int]:
        return {chunk: place * layout.blocks for place, chunk in enumerate(chunks_of(device, layout.devices))}

    return _pairs(layout, find)


@functools.cache
def ring_pairs(layout: Layout) -> np.ndarray:
    """Pairs of a device's queries and the keys of the device 1, 2, ... before it on the ring, (C - 1, C, P, 4)."""

    def hop(distance: int) -> np.ndarray:
        def find(device: int) -> dict[int, int]:
            source = (device - distance) % layout.devices
            return {chunk: place * layout.blocks for place, chunk in enumerate(chunks_of(source, layout.devices))}

        return _pairs(layout, find)

    return _stack([hop(distance) for distance in range(1, layout.devices)])


@functools.cache
def gathered_pairs(layout: Layout) -> np.ndarray:
    """Pairs of a device's queries and the keys of all other devices, gathered in the order of the devices."""

    def find(device: int) -> dict[int, int]:
        places = {chunk: holder(chunk, layout.devices) for chunk in range(2 * layout.devices)}
        return {chunk: (2 * source + half) * layout.blocks for chunk, (source, half) in places.items()
                if source != device}

    return _pairs(layout, find)


@functools.cache
def fetched_pairs(layout: Layout) -> np.ndarray:
    """Pairs of a device's queries and the keys that `messages` brought, in their order."""

    def find(device: int) -> dict[tuple[int, int], int]:
        places, start = {}, 0
        for (half, hop), message in zip(np.ndindex(2, layout.hops), messages(layout), strict=True):
            chunk = chunks_of(device, layout.devices)[half] - hop - 1
            if chunk >= 0 and holder(chunk, layout.devices)[0] != device:
                places[half, chunk] = start - message.first
            start += layout.blocks - message.first
        return places

    return _pairs(layout, find)


def _pairs(layout: Layout, find) -> np.ndarray:
    """For each device, the pairs in which a query sees a key; shorter lists are filled with empty pairs.

    Args:
      find: gives for a device where the first block of each chunk lies among the keys, by chunk, or by (half, chunk)
        when the halves have keys of their own.
    """
    block = np.arange(layout.blocks)
    lists = []
    for device in range(layout.devices):
        pairs = [np.zeros((0, 4), np.int32)]
        for half, chunk in enumerate(chunks_of(device, layout.devices)):
            for place, first in find(device).items():
                if isinstance(place, tuple) and place[0] != half:
                    continue
                other = place[1] if isinstance(place, tuple) else place
                q, k = (axis.reshape(-1) for axis in np.meshgrid(block, block, indexing="ij"))
                offset = (chunk - other) * layout.chunk + (q - k) * layout.block
                rows, keys = (np.minimum(layout.block, layout.chunk - index * layout.block) for index in (q, k))
                seen = offset + rows - 1 >= 0
                if layout.window is not None:
                    seen &= offset - (keys - 1) < layout.window
                pairs.append(np.stack([half * layout.blocks + q, first + k, offset, keys], 1)[seen])
        lists.append(np.concatenate(pairs).astype(np.int32))
    return _stack(lists)


def _stack(lists: list[np.ndarray]) -> np.ndarray:
    """Lists of pairs (..., P, 4) on a new first dim; shorter ones are filled with empty pairs."""
    longest = max(pairs.shape[-2] for pairs in lists)
    return np.stack([np.pad(pairs, [(0, 0)] * (pairs.ndim - 2) + [(0, longest - pairs.shape[-2]), (0, 0)])
                     for pairs in lists])


def by_kind(pairs: np.ndarray, kind_of: Callable[[int], Hashable]) -> dict[Hashable, np.ndarray]:
    """Lists of pairs (..., P, 4), one for each kind of offset."""
    flat = pairs.reshape(-1, *pairs.shape[-2:])
    kinds = {kind_of(int(offset)): None for offset in np.unique(flat[flat[..., VALID] > 0][:, OFFSET])}
    kind = {int(offset): kind_of(int(offset)) for offset in np.unique(flat[..., OFFSET])}

    def part(wanted: Hashable) -> np.ndarray:
        lists = [one[[row[VALID] > 0 and kind[int(row[OFFSET])] == wanted for row in one]] for one in flat]
        stacked = _stack(lists)
        return stacked.reshape(*pairs.shape[:-2], *stacked.shape[-2:])

    return {wanted: part(wanted) for wanted in kinds}


def has_empty(pairs_P4: np.ndarray) -> bool:
    return bool((pairs_P4[..., VALID] == 0).any())
