"""Reads the instances of a step; imported by Grain's worker processes, therefore without jax.

Shapes: T tokens of one instance, R rows of the global batch that a process needs.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxtext.config.schema import DataConfig
from maxtext.data import DataError
from maxtext.data.documents import segments, segments_of_lengths
from maxtext.data.journal import Jump, data_step
from maxtext.data.order import GlobalOrder
from maxtext.data.preflight import check_ids, read_tokens
from maxtext.data.repetition import RepetitionRule, repetitive
from maxtext.data.tokens import ResolvedData

# More steps than any run has; Grain slices its index lazily.
ENDLESS = 1 << 40
Rows = dict[str, np.ndarray]


def begin_worker(number: int, count: int) -> None:
    """Set-up of a worker process, called in it by Grain.

    A signal to all processes of a run is for the run to answer, which may need a batch more before it stops. In return
    the worker watches its parent: nobody else would end it when that is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class Reader(Protocol):
    """Reads instances by global id; small enough to be sent to worker processes."""

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the instances `ids`, shape (len(ids), T), in the type of the files; padded where they are short.

        Raises:
          DataError: a file became shorter or unreadable.
        """
        ...

    def blank(self) -> np.ndarray:
        """One instance of padding, (1, T), in the type of the files."""
        ...

    def lengths(self, ids: np.ndarray) -> Sequence[np.ndarray] | None:
        """Lengths of the documents packed into each instance; None when instances are full and cut anywhere."""
        ...

    def pieces(self, instance: int) -> list[tuple[str, int, int]]:
        """File, first token in it and number of tokens of each piece that an instance is made of."""
        ...

    def check(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """Refuses tokens of the instances `ids` that the vocabulary does not have.

        Raises:
          DataError: with file and byte offset.
        """
        ...


class InstanceReader:
    """Reads instances that are consecutive pieces of the files.

    Args:
      data: the resolved data.
    """

    def __init__(self, data: ResolvedData):
        self._paths = [part.path for part in data.parts]
        self._ends = np.cumsum([part.n_instances for part in data.parts])
        self._dtype = data.dtype
        self._T = data.sequence_length
        self._vocab_size, self._pad_id = data.vocab_size, data.pad_id

    def read(self, ids: np.ndarray) -> np.ndarray:
        """As `Reader.read`."""
        tokens = np.empty((len(ids), self._T), self._dtype)
        for row, instance in enumerate(ids):
            path, start = self.locate(int(instance))
            tokens[row] = read_tokens(path, self._dtype, start, self._T)
        return tokens

    def blank(self) -> np.ndarray:
        """As `Reader.blank`."""
        return np.full((1, self._T), self._pad_id, self._dtype)

    def lengths(self, ids: np.ndarray) -> None:
        """As `Reader.lengths`."""
        return None

    def check(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """As `Reader.check`."""
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            for row, instance in zip(tokens, ids, strict=True):
                path, start = self.locate(int(instance))
                check_ids(row, self._vocab_size, path, start)

    def pieces(self, instance: int) -> list[tuple[str, int, int]]:
        """As `Reader.pieces`."""
        return [(*self.locate(instance), self._T)]

    def locate(self, instance: int) -> tuple[str, int]:
        """The file of an instance, and the token in it at which the instance begins."""
        part = int(np.searchsorted(self._ends, instance, side="right"))
        before = int(self._ends[part - 1]) if part else 0
        return self._paths[part], (instance - before) * self._T


class PackedReader:
    """Reads instances of packed documents, padded on the right.

    Args:
      data: the resolved data, with a packing.
    """

    def __init__(self, data: ResolvedData):
        assert data.packing is not None
        self._index = data.packing
        self._paths = [part.path for part in data.parts]
        self._dtype = data.dtype
        self._T = data.sequence_length
        self._vocab_size, self._pad_id = data.vocab_size, data.pad_id
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def read(self, ids: np.ndarray) -> np.ndarray:
        """As `Reader.read`."""
        tokens = np.full((len(ids), self._T), self._pad_id, self._dtype)
        for row, instance in zip(tokens, ids, strict=True):
            begin = 0
            for path, start, length in self.pieces(int(instance)):
                row[begin:begin + length] = read_tokens(path, self._dtype, start, length)
                begin += length
        return tokens

    def blank(self) -> np.ndarray:
        """As `Reader.blank`."""
        return np.full((1, self._T), self._pad_id, self._dtype)

    def lengths(self, ids: np.ndarray) -> list[np.ndarray]:
        """As `Reader.lengths`."""
        return [np.array([length for _, _, length in self.pieces(int(instance))]) for instance in ids]

    def check(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """As `Reader.check`."""
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            for row, instance in zip(tokens, ids, strict=True):
                begin = 0
                for path, start, length in self.pieces(int(instance)):
                    check_ids(row[begin:begin + length], self._vocab_size, path, start)
                    begin += length

    def pieces(self, instance: int) -> list[tuple[str, int, int]]:
        """As `Reader.pieces`: the documents."""
        if self._arrays is None:
            self._arrays = self._index.arrays()
        documents, first = self._arrays
        rows = documents[int(first[instance]):int(first[instance + 1])]
        return [(self._paths[file], start, length) for start, file, length in rows.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the packing itself: it is not sent through the pickle.
        return self.__dict__ | {"_arrays": None}


def make_reader(data: ResolvedData) -> Reader:
    """The reader of resolved data."""
    return InstanceReader(data) if data.packing is None else PackedReader(data)


@dataclasses.dataclass(frozen=True)
class RowRules:
    """What is worked out for each row beside its tokens.

    Attributes:
      eos_id: the id that ends a document.
      segments: whether rows carry document numbers: True, or False for none.
      boundaries_known: whether documents end where the reader says, and not only where eos_id stands.
      repetition: rule of the instance filter, or None.
      packed: whether instances may end in padding.
    """

    eos_id: int
    segments: bool = False
    boundaries_known: bool = False
    repetition: RepetitionRule | None = None
    packed: bool = False

    @classmethod
    def of(cls, data: DataConfig, eos_id: int) -> RowRules:
        """The rules of a data section."""
        rule = data.instance_filter
        return cls(eos_id, data.document_masking, data.document_boundaries == "csv",
                   RepetitionRule(rule.min_period, rule.max_period, rule.max_count) if rule.enabled else None,
                   data.packs_documents)

    def rows(self, tokens_RT: np.ndarray, lengths: Sequence[np.ndarray] | None) -> Rows:
        """`tokens` and, by the rules, `real` (R,), `segments` (R, T) int32 and `rejected` (R,) bool."""
        rows = {"tokens": tokens_RT}
        if lengths is not None:
            rows["real"] = np.array([documents.sum() for documents in lengths], np.int64)
        if self.segments:
            rows["segments"] = (segments_of_lengths(lengths, tokens_RT, self.eos_id)
                                if lengths is not None and self.boundaries_known else segments(tokens_RT, self.eos_id))
        if self.repetition is not None:
            # On the padded row, as the reference does it.
            rows["rejected"] = repetitive(tokens_RT, self.repetition)
        return rows

    def blank(self, tokens_1T: np.ndarray) -> Rows:
        """The row of an instance that is left out: one document of padding, which nothing rejects."""
        rows = {"tokens": tokens_1T}
        if self.packed:
            rows["real"] = np.ones(1, np.int64)
        if self.segments:
            rows["segments"] = np.zeros_like(tokens_1T, np.int32)
        if self.repetition is not None:
            rows["rejected"] = np.zeros(1, bool)
        return rows


class StepSource:
    """What Grain indexes: element i holds the rows of update i+1 that this process needs, with raw ids.

    An instance that cannot be read is a row of padding and is `unread`, (R,) bool, where any is.
    """

    def __init__(self, order: GlobalOrder, reader: Reader, rows: np.ndarray, rules: RowRules,
                 jumps: Sequence[Jump] = ()):
        self._order, self._reader, self._rows, self._rules = order, reader, rows, rules
        self._jumps = list(jumps)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Rows:
        ids = self._order.instance_ids(data_step(int(index) + 1, self._jumps))[self._rows]
        try:
            return self._rules.rows(self._reader.read(ids), self._reader.lengths(ids))
        except (DataError, OSError):
            return self._one_by_one(ids)

    def _one_by_one(self, ids: np.ndarray) -> Rows:
        """The rows of a step of which some cannot be read."""
        found: list[Rows] = []
        unread = np.zeros(len(ids), bool)
        for row in range(len(ids)):
            one = ids[row:row + 1]
            try:
                found.append(self._rules.rows(self._reader.read(one), self._reader.lengths(one)))
            except (DataError, OSError):
                unread[row] = True
                found.append(self._rules.blank(self._reader.blank()))
        return {name: np.concatenate([rows[name] for rows in found]) for name in found[0]} | {"unread": unread}
