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
    """

    tokens_BT: jax.Array | np.ndarray
    targets_BT: jax.Array | np.ndarray
    weights_BT: jax.Array | np.ndarray


def make_batch(tokens_BT: np.ndarray) -> Batch:
    """A batch in host memory from unpadded instances: nothing is predicted across the border of an instance."""
    tokens_BT = tokens_BT.astype(np.int32)
    targets_BT = np.zeros_like(tokens_BT)
    targets_BT[:, :-1] = tokens_BT[:, 1:]
    weights_BT = np.ones(tokens_BT.shape, np.float32)
    weights_BT[:, -1] = 0
    return Batch(tokens_BT=tokens_BT, targets_BT=targets_BT, weights_BT=weights_BT)
