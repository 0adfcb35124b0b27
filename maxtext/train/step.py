"""One update, as a pure function of state and batch. The whole step, its memory and its communication start here.

Dims: B sequences of the global batch, T position, A micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.data.pipeline import fingerprint
from maxtext.kernels.cross_entropy import Losses
from maxtext.model.decoder import Decoder
from maxtext.model.loss import mean_loss
from maxtext.parallel.sharding import spec
from maxtext.train.optim import global_norm
from maxtext.train.state import TrainState, optimizer_of

StepMetrics = dict[str, jax.Array]


def make_train_step(cfg: Config) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The function `(state, batch) -> (state, metrics)` of one update, not yet jitted.

    Metrics are device scalars: cross-entropy, squared log-partition (both means over real targets), gradient norm
    before clipping, learning rate, whether the update was skipped, number of real targets, the batch's fingerprint.
    """
    optimizer = optimizer_of(cfg)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        targets = batch.weights_BT.sum()
        rejected = jnp.float32(0) if batch.rejected_B is None else batch.rejected_B.sum()
        counted = targets
        if cfg.data.instance_filter.count_rejected:  # the reference divides by all T tokens of a rejected instance
            counted += rejected * cfg.data.sequence_length
        grads, losses = _gradient(cfg, state.params, batch, jnp.maximum(counted, 1))
        norm = global_norm(grads)
        updates, optimizer_state = optimizer.update(
            grads, state.optimizer, state.params, loss=losses.cross_entropy, grad_norm=norm
        )
        params = jax.tree.map(lambda p, u: p + u, state.params, updates)
        metrics = {
            "cross_entropy": losses.cross_entropy,
            "squared_log_z": losses.squared_log_z,
            "grad_norm": norm,
            "learning_rate": optimizer_state.learning_rate,
            "skipped": optimizer_state.skipped,
            "targets": targets,
            "rejected": rejected,
            "fingerprint": fingerprint(batch),
        }
        return state.replace(step=state.step + 1, params=params, optimizer=optimizer_state), metrics

    return step


def compile_train_step(cfg: Config) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted step; the state given to it is consumed."""
    return jax.jit(make_train_step(cfg), donate_argnums=0)


def _gradient(cfg: Config, params: Decoder, batch: Batch, counted: jax.Array) -> tuple[Decoder, Losses]:
    """Gradient and losses of the global batch, summed over its micro-batches in float32; `counted` divides them."""

    def of(micro: Batch) -> tuple[Decoder, Losses]:
        loss = jax.value_and_grad(mean_loss, has_aux=True)
        (_, losses), grads = loss(params, micro.tokens_BT, micro.targets_BT, micro.weights_BT, counted, cfg,
                                  micro.segments_BT)
        return grads, losses

    count = cfg.train.gradient_accumulation_steps
    if count == 1:
        return of(batch)

    def add(total: tuple[Decoder, Losses], micro: Batch) -> tuple[tuple[Decoder, Losses], None]:
        return jax.tree.map(jnp.add, total, of(micro)), None

    zero = (jax.tree.map(jnp.zeros_like, params), Losses(jnp.float32(0), jnp.float32(0)))
    micro_batches = jax.tree.map(lambda x: _split(x, count), batch.replace(rejected_B=None))
    return jax.lax.scan(add, zero, micro_batches)[0]


def _split(x_BT: jax.Array, count: int) -> jax.Array:
    """(B, T) to (A, B / A, T): micro-batch i takes rows i, A + i, 2A + i ..., so that no row leaves its device."""
    rows, length = x_BT.shape
    split = jax.lax.reshape(x_BT, (rows // count, count, length), out_sharding=spec("batch", None, None))
    return split.swapaxes(0, 1)
