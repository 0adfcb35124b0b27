"""The global batch of one update.

Shapes: B instances, T tokens of one instance.
"""

from __future__ import annotations

import flax.struct
import jax
import numpy as np


@flax.struct.dataclass
class Batch:
    """Tokens and next-token targets of B instances.

    tokens_BT: int32 ids. targets_BT: int32, tokens shifted left inside the instance, 0 at the last position.
    weights_BT: float32, 1 where the target is real, 0 at the last position.
    segments_BT: int32 number of each token's document in its instance, or None when attention crosses documents.
    rejected_B: float32, 1 for an instance that the filter rejected (its weights are 0), or None without a filter.
    real_B: int32 number of tokens before the padding of each instance, or None when there is never padding.
    """

    tokens_BT: jax.Array | np.ndarray
    targets_BT: jax.Array | np.ndarray
    weights_BT: jax.Array | np.ndarray
    segments_BT: jax.Array | np.ndarray | None = None
    rejected_B: jax.Array | np.ndarray | None = None
    real_B: jax.Array | np.ndarray | None = None


def make_batch(tokens_BT: np.ndarray, real_B: np.ndarray | None = None, segments_BT: np.ndarray | None = None,
               rejected_B: np.ndarray | None = None, masked_B: np.ndarray | None = None) -> Batch:
    """A batch in host memory: nothing is predicted across the border of an instance, into padding, or when rejected.

    Args:
      tokens_BT: integer ids.
      real_B: tokens before the padding of each instance; all by default. The ids themselves say nothing about it.
      segments_BT: document numbers, for attention inside documents.
      rejected_B: bool, instances without loss.
      masked_B: bool, bad instances: without loss too, and as if they were not there where losses are divided.
    """
    B, T = tokens_BT.shape
    tokens_BT = tokens_BT.astype(np.int32)
    targets_BT = np.zeros_like(tokens_BT)
    targets_BT[:, :-1] = tokens_BT[:, 1:]
    counts_B = np.full(B, T, np.int64) if real_B is None else real_B
    counts_B = np.maximum(counts_B, 1) - 1
    if rejected_B is not None:
        counts_B = np.where(rejected_B, 0, counts_B)
    if masked_B is not None:
        counts_B = np.where(masked_B, 0, counts_B)
    weights_BT = (np.arange(T) < counts_B[:, None]).astype(np.float32)
    return Batch(tokens_BT, targets_BT, weights_BT, None if segments_BT is None else segments_BT.astype(np.int32),
                 None if rejected_B is None else rejected_B.astype(np.float32),
                 None if real_B is None else real_B.astype(np.int32))
