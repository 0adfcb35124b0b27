"""The weights and tokens of the tiny models, drawn from names: nothing of them is stored.

numpy's RandomState is frozen, so that every version draws the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def draw(name: str, shape: Sequence[int], kind: str) -> np.ndarray:
    """A float32 tensor: gains, biases and sinks far from the values that a model begins with."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    values = random.standard_normal(tuple(shape)).astype(np.float32)
    if "norm" in name:  # gains
        return random.uniform(0.5, 1.5, tuple(shape)).astype(np.float32) - np.float32(kind == "gemma3_text")
    if len(shape) == 1 or name.endswith("_bias"):
        return values * np.float32(0.1 if "e_score" in name else 0.5)
    return values * np.float32(shape[-1] ** -0.5)


def token_ids(name: str, vocabulary: int, length: int = 24) -> np.ndarray:
    """One row of int32 ids."""
    return np.random.RandomState(zlib.crc32(name.encode())).randint(0, vocabulary, (1, length)).astype(np.int32)
