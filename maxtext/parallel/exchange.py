"""What all processes of a job tell each other outside of a train step, in one place.

By default it goes through the devices, as `jax.experimental.multihost_utils` does it, which compiles a program for each
shape. An elastic run has words of its own with the coordination service, and no time to compile.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

Teller = Callable[[bytes], list[bytes]]  # this process's words to those of all, by rank
_teller: Teller | None = None


def tell_through(teller: Teller | None) -> None:
    """From now on `all_values` uses `teller`; None: the devices."""
    global _teller
    _teller = teller


def all_values(mine: np.ndarray) -> np.ndarray:
    """What every process gives, (P, ...) by rank. All call it in the same order, with the same shape and type."""
    if jax.process_count() == 1:
        return mine[None]
    if _teller is None:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, *mine.shape)
    return np.stack([np.frombuffer(words, mine.dtype).reshape(mine.shape) for words in _teller(mine.tobytes())])
