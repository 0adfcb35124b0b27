"""A pipeline: the layers of a stack are shared by stages, and micro-batches pass through them one behind another.

Between its stacks a model knows no pipeline: there the axis splits the batch and the width of weights, as fsdp does. On
entering a stack each stage is sent its layers, and all micro-batches; the result is spread over the batch again.

With one round a stage holds one run of layers (GPipe, Huang et al. 2019). With more, it holds one run a round and a
micro-batch passes the ring of stages so many times: the idle share of a pass, (S - 1) / (V M + S - 1), falls (the
circular or interleaved schedule, Narayanan et al. 2021, section 2.2).

Dims: B rows of the batch, M micro-batches, b rows of one, S stages, V rounds, k layers of one run, R = V S k layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxtext.parallel.positions import positions_dim
from maxtext.parallel.sharding import RULES, per_device, spec

AXIS = RULES["stage"][0]
ROWS = "micro_batch"

Run = Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]]


def stages() -> int:
    """Stages of the current mesh, 1 inside a pipeline and without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if AXIS in mesh.manual_axes else dict(mesh.shape).get(AXIS, 1)


def row_order(rows: int, micro_batches: int) -> np.ndarray:
    """The rows of a batch in the order in which a pipeline on the current mesh takes them without moving any.

    Micro-batch m holds the m-th run of rows, as it does without a pipeline.
    """
    sizes, axes = jax.sharding.get_abstract_mesh().shape, RULES["batch"]
    before, after = (math.prod(sizes[axis] for axis in side)
                     for side in (axes[: axes.index(AXIS)], axes[axes.index(AXIS) + 1:]))
    by_place = np.arange(rows).reshape(sizes[AXIS], micro_batches // sizes[AXIS], before, after, -1)
    return by_place.transpose(2, 0, 3, 1, 4).ravel()


def run_pipeline(run: Run, weights: Any, dims: Any, x_BTD: jax.Array, rows: Any, shared: Any, micro_batches: int,
                 rounds: int) -> tuple[jax.Array, Any]:
    """Runs a stack of R layers on a batch whose rows are in `row_order`.

    Args:
      run: (weights of k layers, x of one micro-batch, its rows, shared) -> (x, sums of that micro-batch, with a leading
        dim k).
      weights: arrays with a leading dim R; `dims` are their logical dims without it.
      rows: tree of arrays with a leading dim B, (B, T) or (B,), that belong to the rows of x.
      shared: tree of arrays that all micro-batches use.
      micro_batches: M, a multiple of the stages.
      rounds: V; R is a multiple of V times the stages.

    Returns:
      (x, the sums over micro-batches, with a leading dim R).
    """
    ring = stages()

    def by_stage(weight: jax.Array, own: tuple[str | None, ...]) -> jax.Array:
        split = jax.lax.reshape(weight, (rounds, ring, weight.shape[0] // (rounds * ring), *weight.shape[1:]),
                                out_sharding=PartitionSpec(None, None, *jax.typeof(weight).sharding.spec))
        return jax.sharding.reshard(split, PartitionSpec(None, AXIS, None, *_without_stage(spec(*own))))

    weights = jax.tree.map(by_stage, weights, dims)
    x_MbTD, rows_Mb = jax.tree.map(functools.partial(_by_micro_batch, micro_batches=micro_batches), (x_BTD, rows))
    staged, everywhere = PartitionSpec(None, AXIS), PartitionSpec()

    # Not checked for what differs between stages: JAX would type what a `per_device` inside keeps for the backward pass
    # as if that differed over this axis once more, and could not lower it (0.10.2 and 0.12).
    @functools.partial(jax.shard_map, in_specs=(staged, everywhere, everywhere, everywhere),
                       out_specs=(PartitionSpec(AXIS), staged), axis_names={AXIS}, check_vma=False)
    def pipeline(weights: Any, x_MbTD: jax.Array, rows_Mb: Any, shared: Any) -> tuple[jax.Array, Any]:
        weights = jax.tree.map(lambda w: w[:, 0], weights)
        done_MbTD, sums = _ticks(run, weights, x_MbTD, rows_Mb, shared, ring, rounds)
        came_MbTD = jax.lax.all_to_all(done_MbTD, AXIS, split_axis=0, concat_axis=0, tiled=True)
        from_first = came_MbTD[: micro_batches // ring]
        return from_first, jax.tree.map(lambda s: s[:, None], sums)

    y_MbTD, sums = pipeline(weights, x_MbTD, rows_Mb, shared)
    sums = jax.tree.map(lambda s: jax.sharding.reshard(s, PartitionSpec()).reshape(-1, *s.shape[3:]), sums)
    return _by_row(y_MbTD, x_BTD), sums


def _ticks(run: Run, weights: Any, x_MbTD: jax.Array, rows_Mb: Any, shared: Any, ring: int,
           rounds: int) -> tuple[jax.Array, Any]:
    """One device's work. Its result is whole on the first stage, which every micro-batch reaches after each round."""
    count, stage = x_MbTD.shape[0], jax.lax.axis_index(AXIS)
    passes = rounds * count

    def step(weights: Any, x_bTD: jax.Array, rows: Any) -> tuple[jax.Array, Any]:
        return run(weights, x_bTD, rows, shared)

    def pick(tree: Any, index: jax.Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)

    def tick(carry: tuple, time: jax.Array) -> tuple[tuple, None]:
        came_bTD, held_MbTD, sums = carry
        at = jnp.clip(time - stage, 0, passes - 1)
        turn, micro = at // count, at % count
        x_bTD = jnp.where(stage == 0, pick(held_MbTD, micro), came_bTD)
        y_bTD, found = step(pick(weights, turn), x_bTD, pick(rows_Mb, micro))
        real = time - stage == at
        sums = jax.tree.map(lambda s, f: s.at[turn].add(jnp.where(real, f, 0)), sums, found)
        came_bTD = jax.lax.ppermute(y_bTD, AXIS, [(i, (i + 1) % ring) for i in range(ring)])
        finished = time - (ring - 1)  # what the last stage has just sent to the first
        slot = jnp.clip(finished, 0, passes - 1) % count
        new_bTD = jnp.where((finished >= 0) & (stage == 0), came_bTD, pick(held_MbTD, slot))
        return (came_bTD, jax.lax.dynamic_update_index_in_dim(held_MbTD, new_bTD, slot, 0), sums), None

    shapes = jax.eval_shape(step, pick(weights, 0), x_MbTD[0], pick(rows_Mb, 0))[1]
    zero = jax.tree.map(lambda s: jnp.zeros((rounds, *s.shape), s.dtype), shapes)
    start = (x_MbTD[0], x_MbTD, zero)
    return jax.lax.scan(tick, start, jnp.arange(passes + ring - 1))[0][1:]


def _without_stage(of: PartitionSpec) -> PartitionSpec:
    kept = [tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis != AXIS) for axes in of]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def _by_micro_batch(x: jax.Array, micro_batches: int) -> jax.Array:
    """(B, ...) as (M, b, ...), all micro-batches on each stage."""
    rest = (positions_dim(x) if x.ndim > 1 else None, *(None,) * (x.ndim - 2))[: x.ndim - 1]
    held = micro_batches // stages()
    cut = per_device(lambda x: x.reshape(held, -1, *x.shape[1:]), (("batch", *rest),), ("stage", ROWS, *rest))
    return jax.sharding.reshard(cut(x), spec(None, ROWS, *rest))


def _by_row(x_MbTD: jax.Array, like_BTD: jax.Array) -> jax.Array:
    """The inverse of `_by_micro_batch`."""
    rest = (positions_dim(like_BTD), None)
    join = per_device(lambda x: x.reshape(-1, *x.shape[2:]), (("stage", ROWS, *rest),), ("batch", *rest))
    return join(x_MbTD)
