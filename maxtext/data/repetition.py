"""The reference's instance filter: text that repeats a short pattern many times teaches nothing.

Shapes: R rows (instances), T tokens of one instance.
"""

from __future__ import annotations

import dataclasses

import numpy as np

LEAST_COUNT = 3  # the reference reports runs of more than two repetitions only


@dataclasses.dataclass(frozen=True)
class RepetitionRule:
    """Reject an instance in which a pattern of min_period to max_period tokens stands max_count times in a row."""

    min_period: int
    max_period: int
    max_count: int


def repetitive(tokens_RT: np.ndarray, rule: RepetitionRule) -> np.ndarray:
    """Which instances the rule rejects.

    OLMo-core (`data/utils.py`, `find_periodic_sequences`) looks at rows of p tokens and extends runs of equal rows to
    both sides; its comparison of the first row with the last, padded one never matches at the end where it would
    count. What is left of it: n consecutive tokens that each equal the one p before are (n + p) // p repetitions.

    Args:
      tokens_RT: integer ids, padding included.
      rule: the limits.

    Returns:
      bool, shape (R,).
    """
    R, T = tokens_RT.shape
    count = max(rule.max_count, LEAST_COUNT)
    rejected_R = np.zeros(R, bool)
    for period in range(rule.min_period, rule.max_period + 1):
        needed = (count - 1) * period
        if needed > T - period:
            break
        for row in np.flatnonzero(_may_repeat(tokens_RT, period, needed) & ~rejected_R):
            rejected_R[row] = _longest_run(tokens_RT[row, period:] == tokens_RT[row, :-period]) >= needed
    return rejected_R


def _may_repeat(tokens_RT: np.ndarray, period: int, needed: int) -> np.ndarray:
    """Rows that may hold `needed` consecutive tokens that equal the one `period` before: nearly all text is ruled out
    after comparing a few tokens in each block, because such a run covers a whole aligned block of half its length."""
    block = (needed + 1) // 2
    blocks = (tokens_RT.shape[1] - period) // block
    maybe_RN = np.ones((tokens_RT.shape[0], blocks), bool)
    for offset in sorted({0, block // 2, block - 1}):
        places = slice(period + offset, period + offset + (blocks - 1) * block + 1, block)
        before = slice(places.start - period, places.stop - period, block)
        maybe_RN &= tokens_RT[:, places] == tokens_RT[:, before]
    return maybe_RN.any(axis=1)


def _longest_run(equal: np.ndarray) -> int:
    """Length of the longest run of True in a vector."""
    breaks = np.flatnonzero(~equal)
    return int(np.diff(breaks, prepend=-1, append=len(equal)).max()) - 1
