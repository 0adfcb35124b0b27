"""Log-likelihoods of given tokens, on any mesh: what perplexity and downstream tasks are made of.

Every row is computed by itself, so that results depend neither on the batch that it stands in nor on the mesh.

Dims: B rows in a batch, T position, C choices, D model width, V vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.kernels.cross_entropy import token_nll
from maxtext.model.decoder import Decoder, decoder_forward
from maxtext.model.loss import HIDDEN, TOKENS, VOCAB, WHOLE_HEAD, nll, whole_head
from maxtext.parallel.mesh import batch_devices
from maxtext.parallel.sharding import per_device, sharding, spec


class Scorer:
    """Compiled forward passes. Both methods return at once, with an array that the device is still computing."""

    def __init__(self, cfg: Config, mesh: Mesh) -> None:
        self._mesh = mesh
        self._row_nats = jax.jit(functools.partial(_row_nats, cfg=cfg))
        self._choice_nats = jax.jit(functools.partial(_choice_nats, cfg=cfg))

    def batch_rows(self, rows: int) -> int:
        """`rows`, raised to what the devices can share evenly."""
        devices = batch_devices(self._mesh)
        return -(-rows // devices) * devices

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
    nats_B = (nll(p, tokens_BT, targets_BT, cfg) * weights_BT).sum(-1)
    return jax.sharding.reshard(nats_B, spec(None))


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
    nats_BC = run(x_BTD, whole_head(p, x_BTD.dtype), positions_B1, choices_BC)
    return jax.sharding.reshard(nats_BC, spec(None, None))
