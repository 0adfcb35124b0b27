"""Start a run from another's weights: the next stage of a recipe, or a converted checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from maxtext.config.schema import CheckpointConfig, InitFromConfig
from maxtext.train.state import TrainState


def warm_start(state: TrainState, source: InitFromConfig, note: Callable[[str], None]) -> TrainState:
    """Replaces the weights of a fresh state, and the moments and Adam count if asked for, by those of a checkpoint.

    Everything else is as at a fresh start: step 0, empty windows of the skip rule, the learning rate of the schedule's
    first update (the reference does the same with `load_trainer_state=False`).

    Raises:
      CheckpointError: there is no such good checkpoint, or its arrays are not those of this model.
    """
    assert source.path is not None
    inside = os.path.join(source.path, "checkpoints")
    folder = inside if os.path.isdir(inside) else source.path
    taken: dict[str, Any] = {"params": state.params}
    if source.optimizer:
        taken["optimizer"] = {name: getattr(state.optimizer, name) for name in ("count", "mu", "nu")}
    checkpoints = Checkpoints(folder, CheckpointConfig(), writer=False)
    try:
        restored = checkpoints.restore(jax.tree.map(_abstract, taken), source.step, partial=True)
    finally:
        checkpoints.close()
    if restored is None:
        if os.path.isfile(os.path.join(source.path, "config.json")):
            raise CheckpointError(f"train.init_from.path {source.path} is a transformers folder; convert it first: "
                                  f"maxtext convert import {source.path} OUT")
        raise CheckpointError(f"train.init_from.path {source.path} holds no checkpoint; give the folder of a run or of "
                              f"a converted model")
    what = "weights, moments and Adam count" if source.optimizer else "weights"
    note(f"starting from the {what} of {folder}, update {restored.step}")
    optimizer = state.optimizer._replace(**restored.state.get("optimizer", {}))
    return state.replace(params=restored.state["params"], optimizer=optimizer)


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
