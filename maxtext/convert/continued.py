"""What a run of another framework lacks to be continued as a run of ours: the small leaves, and the data position.

The leaves are those of train/state.py and train/optim.py beside weights, moments and Adam count; a test restores the
result as a whole training state, so that the two cannot drift apart.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from maxtext.config.schema import Config
from maxtext.convert import ConvertError
from maxtext.data import DataError
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve

# The reference does not save the windows of the skip rule. Values so far apart that nothing counts as an outlier keep
# the rule quiet until the window holds real values alone; empty windows would judge by the first two of them.
_WIDE = np.float32(1e9)


def small_leaves(cfg: Config, step: int) -> dict[str, np.ndarray]:
    """Leaves of the training state after `step` updates, by dotted name."""
    leaves = {
        "optimizer.learning_rate": np.float32(0),
        "optimizer.n_recorded": np.int32(step),
        "optimizer.skipped": np.int32(0),
        "rng": np.asarray(jax.random.key_data(jax.random.key(cfg.seed))),
    }
    if cfg.optim.skips:
        wide = np.where(np.arange(cfg.optim.skip.window) % 2, _WIDE, -_WIDE).astype(np.float32)
        leaves |= {"optimizer.loss_window": wide, "optimizer.grad_norm_window": wide}
    return {name: np.asarray(value) for name, value in leaves.items()}


def run_extra(cfg: Config, step: int) -> dict[str, Any]:
    """What train/loop.py saves beside the state, with the position in the run's own data."""
    if cfg.data.stream.kind != "none":
        raise ConvertError(f"data.stream.kind {cfg.data.stream.kind}: a stream has no position for a number of "
                           "updates; continue with token files of `maxtext data prepare`")
    try:
        batches = make_batches(cfg, resolve(cfg), None)
    except DataError as error:
        raise ConvertError(f"the data of the run to be continued cannot be read: {error}") from None
    try:
        state = batches.get_state()
        del state["source_tokens"]  # to be counted up to the step
        batches.set_state({**state, "step": step})
        return {"data": batches.get_state(), "record": {}, "seed": cfg.seed}
    finally:
        batches.close()
