"""Log-likelihoods of given tokens, on any mesh: what perplexity and downstream tasks are made of.

Every row is computed by itself, so that results depend neither on the batch that it stands in nor on the mesh, but for
the rounding of sums that a compiler orders otherwise on another mesh. With `train.determinism: any_mesh` not by a bit:
a batch is cut into as many parts as virtual shards, and each device computes its run of them one after another with
whole weights, by a program that is the same on every mesh (`parallel/isolated.py`).

Dims: B rows in a batch, T position, C choices, D model width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from maxtext.config.schema import Config
from maxtext.kernels.cross_entropy import token_nll
from maxtext.model.decoder import Decoder, decoder_forward
from maxtext.model.loss import HIDDEN, TOKENS, VOCAB, WHOLE_HEAD, nll, whole_head
from maxtext.parallel.isolated import isolated
from maxtext.parallel.mesh import batch_devices
from maxtext.parallel.sharding import per_device, sharding, spec


class Scorer:
    """Compiled forward passes. Both methods return at once, with an array that the device is still computing."""

    def __init__(self, cfg: Config, mesh: Mesh) -> None:
        self._mesh = mesh
        self._shares = batch_devices(mesh)
        row_nats, choice_nats = (functools.partial(one, cfg=cfg) for one in (_row_nats, _choice_nats))
        if cfg.train.determinism == "any_mesh":
            self._shares = cfg.virtual_shards
            row_nats, choice_nats = (functools.partial(_of_shards, jax.jit(functools.partial(
                _alike, one, cfg.virtual_shards // mesh.size))) for one in (row_nats, choice_nats))
        else:
            row_nats, choice_nats = (jax.jit(functools.partial(_replicated, one)) for one in (row_nats, choice_nats))
        self._row_nats, self._choice_nats = row_nats, choice_nats

    def batch_rows(self, rows: int) -> int:
        """`rows`, raised to what the devices, or the virtual shards, can share evenly."""
        return -(-rows // self._shares) * self._shares

    def row_nats(self, params: Decoder, tokens_BT: np.ndarray, targets_BT: np.ndarray, weights_BT: np.ndarray,
                 batch: int) -> jax.Array:
        """Weighted sum of the negative log-likelihoods of each row's targets, (batch,) float32 nats, on every device.

        `batch` is the number of rows to compute, at least B and one that `batch_rows` gives: blank rows follow.
        """
        arrays = (tokens_BT, targets_BT, weights_BT)
        return self._row_nats(params, *(self._place(array, batch) for array in arrays))

    def choice_nats(self, params: Decoder, tokens_BT: np.ndarray, positions_B: np.ndarray, choices_BC: np.ndarray,
                    batch: int) -> jax.Array:
        """Negative log-likelihood of each choice as the token after position p of its row, (batch, C) float32."""
        arrays = (tokens_BT, positions_B[:, None], choices_BC)
        return self._choice_nats(params, *(self._place(array, batch) for array in arrays))

    def _place(self, array: np.ndarray, batch: int) -> jax.Array:
        whole = np.zeros((batch, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        placement = sharding(self._mesh, "batch", None)
        return jax.make_array_from_callback(whole.shape, placement, lambda index: whole[index])


def _row_nats(p: Decoder, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, *,
              cfg: Config) -> jax.Array:
    return (nll(p, tokens_BT, targets_BT, cfg) * weights_BT).sum(-1)


def _choice_nats(p: Decoder, tokens_BT: jax.Array, positions_B1: jax.Array, choices_BC: jax.Array, *,
                 cfg: Config) -> jax.Array:

    def local(x_BTD: jax.Array, w_DV: jax.Array, positions_B1: jax.Array, choices_BC: jax.Array) -> jax.Array:
        x_B1D = jnp.take_along_axis(x_BTD, positions_B1[:, :, None], axis=1)
        x_BCD = jnp.broadcast_to(x_B1D, (*choices_BC.shape, x_BTD.shape[-1]))
        nats_N = token_nll(x_BCD.reshape(-1, x_BTD.shape[-1]), w_DV, choices_BC.reshape(-1),
                           cfg.train.loss_chunk_tokens, VOCAB)
        return nats_N.reshape(choices_BC.shape)

    x_BTD = decoder_forward(p, tokens_BT, cfg.model, cfg.execution)
    run = per_device(local, (HIDDEN, WHOLE_HEAD, TOKENS, TOKENS), TOKENS)
    return run(x_BTD, whole_head(p, x_BTD.dtype), positions_B1, choices_BC)


def _replicated(nats: Callable[..., jax.Array], p: Decoder, *arrays: jax.Array) -> jax.Array:
    found = nats(p, *arrays)
    return jax.sharding.reshard(found, spec(*(None,) * found.ndim))


def _of_shards(compiled: Callable[..., jax.Array], p: Decoder, *arrays: jax.Array) -> jax.Array:
    return compiled(np.True_, p, *arrays)  # an argument, whose value the compiler cannot know


def _alike(nats: Callable[..., jax.Array], count: int, runs: jax.Array, p: Decoder, *arrays: jax.Array) -> jax.Array:
    """`nats` of each device's rows, in `count` parts, with the same bits on every mesh; `runs`: see `isolated`."""
    whole = jax.tree.map(lambda w: jax.sharding.reshard(w, PartitionSpec()), p)

    @functools.partial(jax.shard_map, in_specs=(PartitionSpec(), PartitionSpec(), *(spec("batch") for _ in arrays)),
                       out_specs=spec("batch"), check_vma=False)
    def local(runs: jax.Array, whole: Decoder, *arrays: jax.Array) -> jax.Array:
        parts = [x.reshape(count, -1, *x.shape[1:]) for x in arrays]
        nats_of = jax.lax.map(lambda own: isolated(nats, runs, whole, *own), parts)
        return nats_of.reshape(-1, *nats_of.shape[2:])

    found = local(runs, whole, *arrays)
    return jax.sharding.reshard(found, spec(*(None,) * found.ndim))
