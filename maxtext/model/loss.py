"""Next-token loss on top of the decoder.

Dims: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from maxtext.config.schema import Config
from maxtext.kernels.cross_entropy import Axes, Losses, cross_entropy, token_nll
from maxtext.model.decoder import Decoder, decoder_forward, run_decoder
from maxtext.model.router import RouterStats
from maxtext.parallel.collectives import vary
from maxtext.parallel.pipeline import stages
from maxtext.parallel.positions import layout, split
from maxtext.parallel.sharding import RULES, mesh_axes, per_device, spec

VOCAB = RULES["vocab"][0]
TOKENS, HIDDEN, HEAD, WHOLE_HEAD = ("batch", None), ("batch", None, None), ("embed", "vocab"), (None, "vocab")


def mean_loss(p: Decoder, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, total_weight: jax.Array,
              cfg: Config, segments_BT: jax.Array | None = None, real_B: jax.Array | None = None,
              prior_LE: jax.Array | None = None, z_loss: float | jax.Array | None = None
              ) -> tuple[jax.Array, tuple[Losses, RouterStats | None]]:
    """Cross-entropy, z-loss and the losses of routers, each a weighted sum over these tokens divided by `total_weight`.

    `total_weight` is the sum over the whole global batch, so that the losses (and gradients) of its micro-batches add
    up to the batch's own, however it is split.

    Args:
      real_B: tokens before the padding of each row; None: there is none.
      tokens_BT, ...: where the mesh has a pipeline, all micro-batches, their rows in `pipeline.row_order`.
      prior_LE: load of each expert in the micro-batches before.
      z_loss: multiplier of the squared log-partition; None: `cfg.train.z_loss`.

    Returns:
      (loss to differentiate, its parts without multipliers and the routers' statistics); losses are float32 scalars.
    """

    axes = Axes(mesh_axes("batch", "sequence"), mesh_axes("embed"), next(iter(mesh_axes("vocab")), None))

    def local(x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array,
              z_loss: jax.Array):
        # Typed as different over all axes of tokens, of which one that splits nothing is not named by a sharding.
        x_BTD, targets_BT, weights_BT = vary((x_BTD, targets_BT, weights_BT), frozenset(axes.tokens))
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        return cross_entropy(x_ND, w_DV, targets_BT.reshape(-1), weights_BT.reshape(-1), z_loss,
                             cfg.train.loss_chunk_tokens, axes)

    real_BT = None if real_B is None else jnp.arange(tokens_BT.shape[1])[None] < real_B[:, None]
    how = cfg.execution
    if stages() > 1:
        how = dataclasses.replace(how, micro_batches=cfg.train.gradient_accumulation_steps)
    x_BTD, stats = run_decoder(p, tokens_BT, cfg.model, how, segments_BT, real_BT, prior_LE)
    order_T, tokens = layout(tokens_BT.shape[1]), ("batch", "sequence")
    fused = per_device(local, ((*tokens, None), HEAD, tokens, tokens, ()), ((), Losses((), ())))
    loss, losses = fused(x_BTD, p.head_DV, split(targets_BT, order_T), split(weights_BT / total_weight, order_T),
                         jnp.float32(cfg.train.z_loss if z_loss is None else z_loss))
    return loss if stats is None else loss + router_loss(stats, cfg) / total_weight, (losses, stats)


def router_loss(stats: RouterStats, cfg: Config) -> jax.Array:
    """Load-balance and z-loss of all routers, a sum over tokens; each layer counts as one of all the model's layers."""
    moe = cfg.model.moe
    total = moe.load_balance_loss * stats.load_balance.sum() + moe.z_loss * stats.z_loss.sum()
    return total / cfg.model.n_layers


def nll(p: Decoder, tokens_BT: jax.Array, targets_BT: jax.Array, cfg: Config) -> jax.Array:
    """Negative log-likelihood in nats of each target, (B, T) float32."""

    def local(x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        losses = token_nll(x_ND, w_DV, targets_BT.reshape(-1), cfg.train.loss_chunk_tokens, VOCAB)
        return losses.reshape(targets_BT.shape)

    x_BTD = decoder_forward(p, tokens_BT, cfg.model, cfg.execution)
    return per_device(local, (HIDDEN, WHOLE_HEAD, TOKENS), TOKENS)(x_BTD, whole_head(p, x_BTD.dtype), targets_BT)


def whole_head(p: Decoder, dtype: jnp.dtype) -> jax.Array:
    """The LM head with all rows on each device, (D, V)."""
    return jax.sharding.reshard(p.head_DV.astype(dtype), spec(*WHOLE_HEAD))


def logits(p: Decoder, tokens_BT: jax.Array, cfg: Config) -> jax.Array:
    """All logits, (B, T, V) float32: for small models, comparisons and tests."""
    return head_logits(p, decoder_forward(p, tokens_BT, cfg.model, cfg.execution))


def head_logits(p: Decoder, x_BTD: jax.Array) -> jax.Array:
    """Logits of final hidden states, (B, T, V), float32 and never rounded to less."""
    return jnp.einsum("btd,dv->btv", x_BTD, whole_head(p, x_BTD.dtype), preferred_element_type=jnp.float32,
                      out_sharding=spec("batch", None, "vocab"))
