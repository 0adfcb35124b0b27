"""Decisions that all processes of a job must take alike; with one process they cost nothing."""

from collections.abc import Callable

import jax
import numpy as np

from maxtext.checkpoint.manifest import CheckpointError
from maxtext.parallel.exchange import all_values


def from_process_0(function: Callable[[], int]) -> int:
    """What `function` (a number from -1 on) returns in process 0, in every process; its error is one for all."""
    if jax.process_count() == 1:
        return function()
    value, error = -2, None
    if jax.process_index() == 0:
        try:
            value = function()
        except Exception as caught:  # raised below, once the others know
            error = caught
    value = int(all_values(np.int32([value]))[0, 0])
    if value == -2:
        raise error or CheckpointError("process 0 failed; its log says why")
    return value


def all_agree(ok: bool) -> bool:
    """Whether it holds in every process."""
    if jax.process_count() == 1:
        return ok
    return bool(all_values(np.array([ok])).all())
