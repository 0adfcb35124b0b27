"""Packing: whole documents side by side in instances of T tokens, the rest padding; here best-fit, the reference's.

Files are put in order by a seed and taken in groups; in each group documents are placed longest first, each into the
instance with the least space that is enough (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). A
document longer than T is cut to its first T tokens. Source: OLMo-core `data/numpy_dataset.py`, NumpyPackedFSLDataset.

First-fit takes the documents as they come, each into the first instance that has room; padded gives each its own.

The result is one file, worked out once: documents in the order of the instances, and where each instance begins.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from maxtext.data.cache import open_or_make
from maxtext.data.documents import companion_hashes, read_companion, scan

MAGIC = b"MTPACK01"
HEADER = np.dtype([("magic", "S8"), ("documents", "<u8"), ("instances", "<u8"), ("summary_bytes", "<u8")])
DOCUMENT = np.dtype([("start", "<u8"), ("file", "<u4"), ("length", "<u4")])
READ_THREADS = 16
FILES_AT_ONCE = 128


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """All that the packing is a function of, besides the content of the files.

    Attributes:
      paths: token files in data-set order, a repeated file once for each pass; n_tokens: their lengths.
      dtype, eos_id: how documents are found in them.
      length: T. group: files packed together. seed: of the order of files, or None.
      stable_ties: whether documents of equal length keep the order of the files.
      from_csv: whether documents are those of the `.csv.gz` companions.
      kind: best_fit, first_fit or padded.
    """

    paths: tuple[str, ...]
    n_tokens: tuple[int, ...]
    dtype: np.dtype
    eos_id: int
    length: int
    group: int
    seed: int | None
    stable_ties: bool
    from_csv: bool
    kind: str = "best_fit"

    def file_order(self) -> list[int]:
        """Positions in `paths` in the order of packing: Python's shuffle of 0..n-1."""
        order = list(range(len(self.paths)))
        if self.seed is not None:
            random.Random(self.seed).shuffle(order)
        return order

    def groups(self) -> list[list[int]]:
        """Positions in `paths` that are packed together."""
        order = self.file_order()
        return [order[i:i + self.group] for i in range(0, len(order), self.group)]

    def documents(self, file: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and full lengths of the documents of one file."""
        path, n_tokens = self.paths[file], self.n_tokens[file]
        return read_companion(path, n_tokens) if self.from_csv else scan(path, self.dtype, n_tokens, self.eos_id)


@dataclasses.dataclass(frozen=True)
class PackedIndex:
    """A packing on disk; it is mapped where it is used, and sent to worker processes by name.

    Attributes:
      path: the file. n_instances: instances in one epoch.
      summary: `file_order`; per file of the plan `documents`, `truncated` (how many of them), `tokens` (kept) and
        `dropped` (cut off, or behind the last document); and `sha256` of the packing itself.
    """

    path: str
    n_instances: int
    summary: dict[str, Any]

    @property
    def file_order(self) -> list[int]:
        """Positions of the files in the order of packing."""
        return self.summary["file_order"]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The mapped documents (DOCUMENT), and the first document of each instance, (n_instances + 1,) uint64."""
        header = np.fromfile(self.path, HEADER, 1)[0]
        n_documents = int(header["documents"])
        documents = np.memmap(self.path, DOCUMENT, "r", HEADER.itemsize, (n_documents,))
        starts = np.memmap(self.path, "<u8", "r", HEADER.itemsize + n_documents * DOCUMENT.itemsize,
                           (self.n_instances + 1,))
        return documents, starts


def sort_longest_first(lengths: np.ndarray, stable: bool) -> np.ndarray:
    """The order in which documents are placed.

    Args:
      lengths: in tokens.
      stable: False leaves equal lengths as numpy's default argsort does. That is the reference's order, but numpy
        promises none: it differs between kinds of CPU.
    """
    return np.argsort(-lengths.astype(np.int64), kind="stable" if stable else None)


def best_fit(lengths: Sequence[int], capacity: int) -> np.ndarray:
    """Places items in the given order, each into the bin with the least space that is enough; the oldest of equals.

    Args:
      lengths: from 1 to `capacity`.
      capacity: of each bin.

    Returns:
      int64, the bin of each item; bins are counted from 0 in the order in which they were opened.
    """
    bin_of = np.empty(len(lengths), np.int64)
    n_bins = 0
    by_space: list[deque[int]] = [deque() for _ in range(capacity + 1)]
    # Which spaces have a bin, as bits of one number for each 2^shift spaces, and which of those numbers are not 0.
    shift = max(1, (capacity.bit_length() + 1) // 2)
    below = (1 << shift) - 1
    words, filled = [0] * ((capacity >> shift) + 1), 0
    for item, length in enumerate(lengths):
        high = length >> shift
        word = words[high] >> (length & below)
        if word:
            space = length + (word & -word).bit_length() - 1
        elif upper := filled >> (high + 1):
            high += (upper & -upper).bit_length()
            space = (high << shift) + (words[high] & -words[high]).bit_length() - 1
        else:
            space = 0
        if space:
            bin_of[item] = number = by_space[space].popleft()
            if not by_space[space]:
                words[high] &= ~(1 << (space & below))
                if not words[high]:
                    filled &= ~(1 << high)
            left = space - length
        else:
            bin_of[item] = number = n_bins
            n_bins += 1
            left = capacity - length
        if left:
            by_space[left].append(number)
            words[left >> shift] |= 1 << (left & below)
            filled |= 1 << (left >> shift)
    return bin_of


def first_fit(lengths: Sequence[int], capacity: int) -> np.ndarray:
    """Places items in the given order, each into the first bin that has room; else as `best_fit`.

    A tree over the bins holds the most space of each half, so that the first one with room is found from its root.
    """
    leaves = 1 << max(1, len(lengths) - 1).bit_length()
    most = [capacity] * (2 * leaves)
    bin_of = np.empty(len(lengths), np.int64)
    for item, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < length
        bin_of[item] = node - leaves
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return bin_of


def pack_group(starts: np.ndarray, lengths: np.ndarray, files: np.ndarray, capacity: int,
               stable_ties: bool, kind: str = "best_fit") -> tuple[np.ndarray, np.ndarray]:
    """Packs the documents of one group.

    Args:
      starts, lengths, files: of each document, in the order of the files; lengths up to `capacity`.

    Returns:
      Documents (DOCUMENT) in the order of the instances, and the number of documents in each instance.
    """
    by_length = sort_longest_first(lengths, stable_ties) if kind == "best_fit" else np.arange(len(lengths))
    bin_of = (by_length if kind == "padded" else
              (best_fit if kind == "best_fit" else first_fit)(lengths[by_length].tolist(), capacity))
    placed = by_length[np.argsort(bin_of, kind="stable")]
    documents = np.empty(len(placed), DOCUMENT)
    documents["start"], documents["file"], documents["length"] = starts[placed], files[placed], lengths[placed]
    return documents, np.bincount(bin_of)


def pack(plan: PackingPlan, identity: str, cache_dir: str | Path) -> PackedIndex:
    """The packing of a plan: read from `cache_dir`, or worked out and written there by one process.

    Working it out reads every token once (or the companions), on several threads, and places about half a million
    documents a second; memory is some 100 bytes for each document of FILES_AT_ONCE files.

    Args:
      identity: of the files' content, part of the cache file's name.

    Raises:
      DataError: a file without documents, or one that cannot be read or written.
    """
    settings = [plan.length, plan.eos_id, plan.dtype.name, plan.group, plan.seed, plan.stable_ties, plan.n_tokens,
                companion_hashes(plan.paths) if plan.from_csv else None]
    settings += [plan.kind] if plan.kind != "best_fit" else []  # as it was when there was no other kind
    key = hashlib.sha256(json.dumps([identity, settings]).encode()).hexdigest()
    return open_or_make(Path(cache_dir, f"packing_{key[:24]}.bin"), _open, lambda file: _write(plan, file))


def _open(path: Path) -> PackedIndex | None:
    """The packing in a file; None when there is none, or when it is not whole."""
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER.itemsize), HEADER, 1)[0]
            n_documents, n_instances, n_summary = (
                int(header[key]) for key in ("documents", "instances", "summary_bytes"))
            body = n_documents * DOCUMENT.itemsize + (n_instances + 1) * 8
            if header["magic"] != MAGIC or os.fstat(file.fileno()).st_size != HEADER.itemsize + body + n_summary:
                return None
            file.seek(HEADER.itemsize + body)
            return PackedIndex(str(path), n_instances, json.loads(file.read()))
    except (OSError, ValueError):
        return None


def _write(plan: PackingPlan, file: IO[bytes]) -> None:
    file.write(bytes(HEADER.itemsize))
    digest = hashlib.sha256()
    counts = [np.zeros(1, np.int64)]
    n_documents = 0
    summary: dict[str, Any] = {key: [0] * len(plan.paths) for key in ("documents", "truncated", "tokens", "dropped")}
    summary["file_order"] = plan.file_order()
    for group in _documents_of_groups(plan):
        for number, _, full in group:
            kept = int(np.minimum(full, plan.length).sum())
            summary["documents"][number] = len(full)
            summary["truncated"][number] = int((full > plan.length).sum())
            summary["tokens"][number] = kept
            summary["dropped"][number] = plan.n_tokens[number] - kept
        documents, per_instance = pack_group(
            np.concatenate([starts for _, starts, _ in group]),
            np.concatenate([np.minimum(full, plan.length) for _, _, full in group]),
            np.concatenate([np.full(len(full), number) for number, _, full in group]), plan.length, plan.stable_ties,
            plan.kind)
        data = documents.tobytes()
        file.write(data)
        digest.update(data)
        counts.append(per_instance)
        n_documents += len(documents)
    first = np.cumsum(np.concatenate(counts)).astype("<u8")
    file.write(first.tobytes())
    digest.update(first.tobytes())
    summary["sha256"] = digest.hexdigest()
    text = json.dumps(summary).encode()
    file.write(text)
    file.seek(0)
    file.write(np.array([(MAGIC, n_documents, len(first) - 1, len(text))], HEADER).tobytes())


def _documents_of_groups(plan: PackingPlan) -> Iterator[list[tuple[int, np.ndarray, np.ndarray]]]:
    """For each group of files: position of the file in the plan, starts and full lengths of its documents.

    Files are read on several threads, a limited number ahead of the packing.
    """
    groups = plan.groups()
    at_once = max(1, FILES_AT_ONCE // plan.group)
    with concurrent.futures.ThreadPoolExecutor(READ_THREADS) as pool:
        for begin in range(0, len(groups), at_once):
            window = groups[begin:begin + at_once]
            found = pool.map(plan.documents, [number for group in window for number in group])
            for group in window:
                yield [(number, *next(found)) for number in group]
