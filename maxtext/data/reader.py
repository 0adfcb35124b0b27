"""Reads the instances of a step; imported by Grain's worker processes, therefore without jax.

Shapes: T tokens of one instance, R rows of the global batch that a process needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext.data.order import GlobalOrder
from maxtext.data.preflight import check_ids, read_tokens
from maxtext.data.tokens import ResolvedData

# More steps than any run has; Grain slices its index lazily.
ENDLESS = 1 << 40


class InstanceReader:
    """Reads instances by global id; small enough to be sent to worker processes.

    Args:
      data: the resolved data.
    """

    def __init__(self, data: ResolvedData):
        self._paths = [part.path for part in data.parts]
        self._ends = np.cumsum([part.n_instances for part in data.parts])
        self._dtype = data.dtype
        self._T = data.sequence_length
        self._vocab_size = data.vocab_size

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the instances `ids`, shape (len(ids), T), in the type of the files.

        Raises:
          DataError: a file became shorter or unreadable.
        """
        tokens = np.empty((len(ids), self._T), self._dtype)
        for row, instance in enumerate(ids):
            path, start = self.locate(int(instance))
            tokens[row] = read_tokens(path, self._dtype, start, self._T)
        return tokens

    def check(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """Refuses tokens of the instances `ids` that the vocabulary does not have.

        Raises:
          DataError: with file and byte offset.
        """
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            for row, instance in zip(tokens, ids, strict=True):
                path, start = self.locate(int(instance))
                check_ids(row, self._vocab_size, path, start)

    def locate(self, instance: int) -> tuple[str, int]:
        """The file of an instance, and the token in it at which the instance begins."""
        part = int(np.searchsorted(self._ends, instance, side="right"))
        before = int(self._ends[part - 1]) if part else 0
        return self._paths[part], (instance - before) * self._T


class StepSource:
    """What Grain indexes: element i holds the rows of update i+1 that this process needs, shape (R, T), raw ids."""

    def __init__(self, order: GlobalOrder, reader: InstanceReader, rows: np.ndarray):
        self._order, self._reader, self._rows = order, reader, rows

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._reader.read(self._order.instance_ids(int(index) + 1)[self._rows])
