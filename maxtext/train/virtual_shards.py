"""The gradient of a global batch with the same bits on every mesh (`train.determinism: any_mesh`).

The batch is cut into V virtual shards, runs of B / V rows, whose number does not depend on the devices. Each device
takes a run of V / n shards, one after another, by one program that is the same for any n (`parallel/isolated.py`), with
whole weights. The gradients of shards are added as one binary tree, first on each device, then between devices
(`parallel/fixed_sum.py`).

Each device holds all weights, and the gradients of all of them log2(V / n) + 2 times, in float32; the optimizer's state
stays shared.

Dims: B sequences of the global batch, V virtual shards, n devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext.config.determinism_rules import SHARED_AXES
from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.kernels.cross_entropy import Losses
from maxtext.model.decoder import Decoder
from maxtext.model.loss import mean_loss
from maxtext.model.router import RouterStats
from maxtext.parallel.fixed_sum import sum_of_parts, sum_of_vector, sum_over
from maxtext.parallel.isolated import AXIS, blocks_of, isolated, shared_dim
from maxtext.parallel.sharding import spec

Sums = tuple[Decoder, Losses, RouterStats | None]


def gradient_of_shards(cfg: Config, params: Decoder, batch: Batch, counted: jax.Array) -> Sums:
    """Gradient, losses and router statistics of the global batch; `counted` divides the losses.

    Args:
      params: laid out on the current mesh as declared. The gradient comes back in the same layout, float32.
    """
    count = cfg.virtual_shards // jax.sharding.get_abstract_mesh().size
    layouts = jax.tree.map(lambda w: jax.typeof(w).sharding.spec, params)
    whole = jax.tree.map(lambda w: jax.sharding.reshard(w, PartitionSpec()), params)

    # Unchecked: that the sums are alike on all devices of an axis is not in their types.
    @functools.partial(jax.shard_map, in_specs=(PartitionSpec(), spec("batch"), PartitionSpec()),
                       out_specs=(layouts, PartitionSpec(), PartitionSpec()), check_vma=False)
    def local(whole: Decoder, batch: Batch, counted: jax.Array) -> Sums:
        shards = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

        def shard(index: jax.Array) -> Sums:
            own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), shards)
            return isolated(functools.partial(_gradient, cfg), counted != 0, whole, own, counted)

        grads, losses, stats = sum_of_parts(shard, count)
        grads = jax.tree.map(lambda g, layout: sum_over(g, SHARED_AXES, _scattered(layout)), grads, layouts)
        return grads, *jax.tree.map(lambda x: sum_over(x, SHARED_AXES), (losses, stats))

    return local(whole, batch.replace(rejected_B=None), counted)


def _gradient(cfg: Config, whole: Decoder, shard: Batch, counted: jax.Array) -> Sums:
    """Of one shard, on one device that has all weights."""
    loss = jax.value_and_grad(mean_loss, has_aux=True)
    (_, (losses, stats)), grads = loss(whole, shard.tokens_BT, shard.targets_BT, shard.weights_BT, counted, cfg,
                                       shard.segments_BT, shard.real_B)
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), losses, stats


def fixed_norm(cfg: Config, grads: Decoder, runs: jax.Array) -> jax.Array:
    """L2 norm over all entries of all leaves, as a float32 scalar with the same bits on every mesh.

    A leaf that devices share is cut along the dim that they share into as many blocks as V and that dim allow, of any
    mesh the same. Squares are added block by block, then blocks as one binary tree, then leaves in order.

    Args:
      runs: see `isolated`.
    """
    leaves = jax.tree.leaves(grads)
    layouts = [jax.typeof(g).sharding.spec for g in leaves]

    @functools.partial(jax.shard_map, in_specs=(layouts, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    def local(leaves: list[jax.Array], runs: jax.Array) -> jax.Array:
        sums = [_sum_of_squares(g, shared_dim(layout), cfg.virtual_shards, runs)
                for g, layout in zip(leaves, layouts, strict=True)]
        return jnp.sqrt(functools.reduce(jnp.add, sums))

    return local(leaves, runs)


def _sum_of_squares(g: jax.Array, dim: int | None, most: int, runs: jax.Array) -> jax.Array:
    def squared(block: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(block.astype(jnp.float32)))

    if dim is None:
        return isolated(squared, runs, g)
    size = g.shape[dim]
    blocks = blocks_of(size, most)

    def block(_: None, index: jax.Array) -> tuple[None, jax.Array]:
        part = jax.lax.dynamic_slice_in_dim(g, index * (size // blocks), size // blocks, dim)
        return None, isolated(squared, runs, part)

    sums = jax.lax.scan(block, None, jnp.arange(blocks))[1]
    return sum_of_vector(jax.lax.all_gather(sums, AXIS, tiled=True))


def _scattered(layout: PartitionSpec) -> tuple[str, int] | None:
    """The axis that shares a leaf, and the dim that it cuts."""
    dim = shared_dim(layout)
    return None if dim is None else (AXIS, dim)
