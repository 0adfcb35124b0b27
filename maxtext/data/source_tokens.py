"""How many tokens of each source a run has read: exact, and the same on any number of hosts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from maxtext.data.tokens import ResolvedData


class SourceTokens:
    """Tokens of each source in instances, padding not counted.

    Args:
      data: the resolved data.
    """

    def __init__(self, data: ResolvedData):
        self.names = list(dict.fromkeys(part.source for part in data.parts))
        self._source_of = np.array([self.names.index(part.source) for part in data.parts], np.int64)
        self._ends = np.cumsum([part.n_instances for part in data.parts])
        self._T, self._packing = data.sequence_length, data.packing
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def of(self, ids: np.ndarray) -> np.ndarray:
        """int64, shape (sources,): the tokens that instances, given by global id, hold of each source."""
        if self._packing is None:
            parts = np.searchsorted(self._ends, ids, side="right")
            return self._T * np.bincount(self._source_of[parts], minlength=len(self.names))
        if self._arrays is None:
            self._arrays = self._packing.arrays()
        documents, first = self._arrays
        rows = np.concatenate([documents[int(first[one]):int(first[one + 1])] for one in ids.astype(np.int64)])
        counts = np.zeros(len(self.names), np.int64)
        np.add.at(counts, self._source_of[rows["file"]], rows["length"].astype(np.int64))
        return counts

    def sum_of(self, batches: Iterable[np.ndarray]) -> np.ndarray:
        """`of` of several batches of ids together."""
        return sum(map(self.of, batches), np.zeros(len(self.names), np.int64))
