"""One update, as a pure function of state and batch. The whole step, its memory and its communication start here.

Dims: B sequences of the global batch, T position, A micro-batches, L routed layers, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.data.pipeline import fingerprint
from maxtext.kernels.cross_entropy import Losses
from maxtext.model.decoder import Decoder, by_segment
from maxtext.model.loss import mean_loss
from maxtext.model.moe import Moe
from maxtext.model.router import RouterStats, updated_bias
from maxtext.parallel.collectives import device_kind, platform
from maxtext.parallel.compiler import compiler_options
from maxtext.parallel.host_memory import add, working_copy
from maxtext.parallel.pipeline import row_order, stages
from maxtext.parallel.sharding import spec
from maxtext.train.optim import global_norm
from maxtext.train.state import Numbers, TrainState, numbers_of, optimizer_of
from maxtext.train.virtual_shards import fixed_norm, gradient_of_shards

StepMetrics = dict[str, Any]


@flax.struct.dataclass
class Gradient:
    """All that an update takes from its batch."""

    grads: Decoder  # float32, or rounded to bfloat16 when gradients are logged (`checkpoint.gradient_log`)
    cross_entropy: jax.Array  # float32: of the batch
    norm: jax.Array  # float32: of `grads`, before clipping
    counts_LE: jax.Array | None  # float32: assignments of each expert; None where no selection bias follows them


class Seen(NamedTuple):
    """What the gradient's computation knows of the batch, for the metrics."""

    losses: Losses
    norm: jax.Array
    targets: jax.Array
    rejected: jax.Array
    counted: jax.Array  # what the losses were divided by
    stats: RouterStats | None


def make_train_step(cfg: Config, numbers: Numbers | None = None
                    ) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The function `(state, batch) -> (state, metrics)` of one update, not yet jitted.

    Metrics are device scalars: cross-entropy, squared log-partition (both means over real targets), gradient norm
    before clipping, learning rate, whether the update was skipped, number of real targets, the batch's fingerprint;
    and of a model with experts `router`, arrays with a leading dim L (see `router_metrics`).

    Args:
      numbers: in place of those of `cfg`, whose determinism must not be any_mesh.
    """
    numbers = numbers_of(cfg) if numbers is None else numbers
    gradient_of, update = make_gradient(cfg, numbers), make_update(cfg, numbers)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        gradient, seen = gradient_of(state, batch)
        state, told = update(state, gradient)
        return state, measured(cfg, batch, seen) | told

    return step


def make_gradient(cfg: Config, numbers: Numbers) -> Callable[[TrainState, Batch], tuple[Gradient, Seen]]:
    """The first part of an update: the reduced gradient of the global batch; the state stays as it is."""

    def gradient(state: TrainState, batch: Batch) -> tuple[Gradient, Seen]:
        targets = batch.weights_BT.sum()
        rejected = jnp.float32(0) if batch.rejected_B is None else batch.rejected_B.sum()
        counted = targets
        if cfg.data.instance_filter.count_rejected:  # the reference divides by all T tokens of a rejected instance
            counted += rejected * cfg.data.sequence_length
        counted = jnp.maximum(counted, 1)
        params = working_copy(state.params, jnp.dtype(cfg.train.compute_dtype))
        fixed = cfg.train.determinism == "any_mesh"
        if fixed:
            grads, losses, stats = gradient_of_shards(cfg, params, batch, counted)
        else:
            grads, losses, stats = batch_gradient(cfg, params, batch, counted, numbers.z_loss)
        if cfg.checkpoint.gradient_log:  # the norm too is of what is logged
            grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
        norm = fixed_norm(cfg, grads, counted != 0) if fixed else global_norm(grads)
        counts_LE = stats.counts_E if stats is not None and cfg.model.moe.bias_update_rate else None
        return (Gradient(grads, losses.cross_entropy, norm, counts_LE),
                Seen(losses, norm, targets, rejected, counted, stats))

    return gradient


def make_update(cfg: Config, numbers: Numbers) -> Callable[[TrainState, Gradient], tuple[TrainState, StepMetrics]]:
    """The second part: what the optimizer makes of a gradient, with its learning rate and whether it skipped it."""
    optimizer = optimizer_of(cfg, numbers)

    def update(state: TrainState, gradient: Gradient) -> tuple[TrainState, StepMetrics]:
        updates, optimizer_state = optimizer.update(
            gradient.grads, state.optimizer, state.params, loss=gradient.cross_entropy, grad_norm=gradient.norm
        )
        params = add(state.params, updates)
        if gradient.counts_LE is not None:
            params = _balance(params, gradient.counts_LE, optimizer_state.skipped, cfg)
        told = {"learning_rate": optimizer_state.learning_rate, "skipped": optimizer_state.skipped}
        return state.replace(step=state.step + 1, params=params, optimizer=optimizer_state), told

    return update


def measured(cfg: Config, batch: Batch, seen: Seen) -> StepMetrics:
    """The metrics of an update, but those of the optimizer."""
    metrics = {
        "cross_entropy": seen.losses.cross_entropy,
        "squared_log_z": seen.losses.squared_log_z,
        "grad_norm": seen.norm,
        "targets": seen.targets,
        "rejected": seen.rejected,
        "fingerprint": fingerprint(batch),
    }
    if seen.stats is not None:
        metrics["router"] = router_metrics(seen.stats, seen.counted, cfg.model.moe.top_k)
    return metrics


def compile_train_step(cfg: Config) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted step, for the platform of the current mesh; the state given to it is consumed.

    It may be given an int32 array of the votes of processes; the largest is then returned as metric `vote`. A run that
    logs gradients computes the same as two programs (`train/gradient_log.py`).
    """
    update = make_train_step(cfg)

    def step(state: TrainState, batch: Batch, votes: jax.Array | None = None) -> tuple[TrainState, StepMetrics]:
        state, metrics = update(state, batch)
        return state, metrics if votes is None else metrics | {"vote": votes.max()}

    return jax.jit(step, donate_argnums=0, compiler_options=step_options(cfg))


def step_options(cfg: Config) -> dict[str, str]:
    """The compiler's options for the step of a run on the current mesh."""
    return compiler_options(platform(), device_kind(), deterministic=cfg.train.determinism != "none")


def batch_gradient(cfg: Config, params: Decoder, batch: Batch, counted: jax.Array,
                   z_loss: float | jax.Array | None = None) -> tuple[Decoder, Losses, RouterStats | None]:
    """Gradient, losses and router statistics of the global batch; `counted` divides the losses.

    They are sums over its micro-batches, in float32. `z_loss` is as in `mean_loss`.
    """

    def of(micro: Batch, prior_LE: jax.Array | None) -> tuple[Decoder, Losses, RouterStats | None]:
        loss = jax.value_and_grad(mean_loss, has_aux=True)
        (_, (losses, stats)), grads = loss(params, micro.tokens_BT, micro.targets_BT, micro.weights_BT, counted, cfg,
                                           micro.segments_BT, micro.real_B, prior_LE, z_loss)
        return grads, losses, stats

    count, moe = cfg.train.gradient_accumulation_steps, cfg.model.moe
    if count == 1:
        return of(batch, None)
    if stages() > 1:  # the micro-batches pass the pipeline together
        order_B = row_order(cfg.train.global_batch, count)
        return of(jax.tree.map(lambda x: _reordered(x, order_B), batch.replace(rejected_B=None)), None)
    Total = tuple[Decoder, Losses, RouterStats | None]

    def accumulate(total: Total, micro: Batch) -> tuple[Total, None]:
        stats = total[2]
        prior_LE = stats.counts_E if stats is not None and moe.load_statistics == "batch" else None
        return jax.tree.map(jnp.add, total, of(micro, prior_LE)), None

    no_stats = RouterStats.zeros(sum(cfg.model.routed_layers), moe.experts) if moe.experts else None
    no_grads = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
    zero = (no_grads, Losses(jnp.float32(0), jnp.float32(0)), no_stats)
    split = functools.partial(_split_in_order if moe.experts else _split, count=count)
    micro_batches = jax.tree.map(split, batch.replace(rejected_B=None))
    return jax.lax.scan(accumulate, zero, micro_batches)[0]


def _split(x: jax.Array, count: int) -> jax.Array:
    """(B, ...) to (A, B / A, ...): micro-batch i takes rows i, A + i, 2A + i ..., so that no row leaves its device."""
    rows, *rest = x.shape
    split = jax.lax.reshape(x, (rows // count, count, *rest), out_sharding=spec("batch", None, *(None for _ in rest)))
    return split.swapaxes(0, 1)


def _reordered(x: jax.Array, order_B: np.ndarray) -> jax.Array:
    """(B, ...) with its rows in another order. They are ids, a few bytes a token."""
    rest = (None,) * (x.ndim - 1)
    whole = jax.sharding.reshard(x, spec(None, *rest))
    return jax.sharding.reshard(whole[order_B], spec("batch", *rest))


def _split_in_order(x: jax.Array, count: int) -> jax.Array:
    """(B, ...) to (A, B / A, ...): micro-batch i takes the i-th run of B / A rows, as the reference's do.

    Routers count over a micro-batch, so it must hold the same rows on every mesh. Rows change devices for it: they are
    ids, a few bytes a token.
    """
    rest = (None,) * (x.ndim - 1)
    whole = jax.sharding.reshard(x, spec(None, *rest)).reshape(count, -1, *x.shape[1:])
    return jax.sharding.reshard(whole, spec(None, "batch", *rest))


def router_metrics(stats: RouterStats, counted: jax.Array, top_k: int) -> dict[str, jax.Array]:
    """What the routers of the L routed layers did with the batch.

    `load` (L, E) is each expert's share of the assignments, `imbalance` the largest load over the mean one, `entropy`
    that of a token's scores in nats, `dropped` the share of assignments that capacity refused; the two losses are
    without multipliers, divided like the cross-entropy.
    """
    tokens_L, total_L = jnp.maximum(stats.tokens, 1), jnp.maximum(stats.counts_E.sum(-1), 1)
    return {
        "load": stats.counts_E / total_L[:, None],
        "imbalance": stats.counts_E.max(-1) / total_L * stats.counts_E.shape[-1],
        "load_balance": stats.load_balance / counted,
        "z_loss": stats.z_loss / counted,
        "entropy": stats.entropy / tokens_L,
        "dropped": stats.dropped / (tokens_L * top_k),
    }


def _balance(params: Decoder, counts_LE: jax.Array, skipped: jax.Array, cfg: Config) -> Decoder:
    """Moves the selection biases towards an even load, unless the update was skipped (DeepSeek-V3, 2024)."""
    rate = jnp.where(skipped == 1, 0.0, cfg.model.moe.bias_update_rate)
    moved = []
    for blocks, counts_RPE in zip(params.segments, by_segment(counts_LE, cfg.model), strict=True):
        counts = iter(counts_RPE.swapaxes(0, 1))
        moved.append(tuple(block.replace(mlp=block.mlp.replace(
            selection_bias=updated_bias(block.mlp.selection_bias, next(counts), rate)))
            if isinstance(block.mlp, Moe) else block for block in blocks))
    return params.replace(segments=tuple(moved))
