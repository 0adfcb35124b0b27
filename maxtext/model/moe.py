"""Mixture of experts: a router, routed experts without dropped tokens, and experts that every token uses.

Dims: B batch, T position, N = B T tokens of this device, D model width, E expert, K expert of one token, F hidden
width of an expert.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.architecture import ModelConfig
from maxtext.model.dispatch import run_distributed
from maxtext.model.experts import Experts
from maxtext.model.layers import Mlp, mlp, mlp_params
from maxtext.model.router import (
    TOKEN_AXES,
    Assignments,
    RouterStats,
    choose_experts,
    limit_capacity,
    router_logits,
    router_scores,
    router_stats,
)
from maxtext.parallel.collectives import vary
from maxtext.parallel.sharding import RULES, Param, is_param, per_device

HIDDEN, TOKENS = ("batch", None, None), ("batch", None)


@flax.struct.dataclass
class Moe:
    router: jax.Array  # D E
    gate_up: jax.Array  # E D 2 F
    down: jax.Array  # E F D
    router_bias: jax.Array | None = None  # E
    selection_bias: jax.Array | None = None  # E, moved by `router.updated_bias`, not by gradients
    gate_up_bias: jax.Array | None = None  # E 2 F
    down_bias: jax.Array | None = None  # E D
    shared: Mlp | None = None


def moe_params(cfg: ModelConfig) -> Moe:
    moe, width, experts = cfg.moe, cfg.d_model, cfg.moe.experts
    return Moe(
        router=Param((width, experts), ("embed", None)),
        gate_up=Param((experts, width, 2, moe.d_expert), ("expert", "expert_embed", None, "mlp")),
        down=Param((experts, moe.d_expert, width), ("expert", "mlp", "expert_embed")),
        router_bias=Param((experts,), (None,), init="zeros") if moe.router_bias else None,
        selection_bias=Param((experts,), (None,), init="zeros", trained=False) if moe.selection_bias else None,
        gate_up_bias=_bias((experts, 2, moe.d_expert), ("expert", None, "mlp")) if moe.expert_bias else None,
        down_bias=_bias((experts, width), ("expert", None)) if moe.expert_bias else None,
        shared=mlp_params(cfg, moe.shared_experts * moe.d_expert) if moe.shared_experts else None,
    )


def _bias(shape: tuple[int, ...], dims: tuple[str | None, ...]) -> Param:
    return Param(shape, dims, init="zeros")


def moe(p: Moe, x_BTD: jax.Array, cfg: ModelConfig, real_BT: jax.Array | None = None,
        prior_E: jax.Array | None = None) -> tuple[jax.Array, RouterStats]:
    """The routed layer on (B, T, D), in its own dtype.

    Args:
      real_BT: bool; the other tokens are padding, which is routed to no expert and counted nowhere. None: all are real.
      prior_E: float32 assignments of the batch's earlier micro-batches; read with load_statistics: batch.

    Returns:
      (output, sums of the micro-batch for losses and metrics).
    """
    routed = p.replace(shared=None)
    dims = jax.tree.map(lambda param: param.dims, moe_params(cfg).replace(shared=None), is_leaf=is_param)

    def local(p: Moe, x_BTD: jax.Array, real_BT: jax.Array | None, prior_E: jax.Array | None):
        return _local(p, x_BTD, real_BT, prior_E, cfg)

    real, prior = None if real_BT is None else TOKENS, None if prior_E is None else (None,)
    stats = RouterStats(counts_E=(None,), load_balance=(), z_loss=(), entropy=(), dropped=(), tokens=())
    run = per_device(local, (dims, HIDDEN, real, prior), (HIDDEN, stats))
    out_BTD, stats = run(routed, x_BTD, real_BT, prior_E)
    if p.shared is not None:
        out_BTD += mlp(p.shared, x_BTD, cfg.activation)
    return checkpoint_name(out_BTD, "mlp_out"), stats


def _local(p: Moe, x_BTD: jax.Array, real_BT: jax.Array | None, prior_E: jax.Array | None,
           cfg: ModelConfig) -> tuple[jax.Array, RouterStats]:
    """One device's tokens, and its experts."""
    moe, x_ND = cfg.moe, x_BTD.reshape(-1, x_BTD.shape[-1])
    real_N = jnp.ones(x_ND.shape[0], bool) if real_BT is None else real_BT.reshape(-1)
    real_N = vary(real_N, frozenset(TOKEN_AXES))
    logits_NE = router_logits(x_ND, _whole(p.router, "embed", 0), p.router_bias)
    scores_NE = router_scores(logits_NE, moe)
    chosen = choose_experts(scores_NE, p.selection_bias, moe)
    chosen = chosen._replace(ids_NK=jnp.where(real_N[:, None], chosen.ids_NK, moe.experts))
    kept, dropped = chosen, jnp.float32(0)
    if moe.capacity_factor is not None:
        kept, dropped = limit_capacity(chosen, moe)
    stats = router_stats(logits_NE, scores_NE, chosen, dropped, real_N, x_BTD.shape[0], prior_E, moe)
    out_ND = _routed(p, x_ND, kept, cfg)
    return out_ND.reshape(x_BTD.shape), stats


def _routed(p: Moe, x_ND: jax.Array, chosen: Assignments, cfg: ModelConfig) -> jax.Array:
    tensor = RULES["mlp"]
    experts = Experts(_whole(p.gate_up, "expert_embed", 1), _whole(p.down, "expert_embed", 2), p.gate_up_bias,
                      p.down_bias)
    # Typed as different over the tensor axis at once: gradients are then summed over it once a token.
    x_ND, chosen = vary((x_ND, chosen), frozenset((*TOKEN_AXES, tensor)))
    return jax.lax.psum(run_distributed(experts, x_ND, chosen, cfg.activation), tensor)


def _whole(weight: jax.Array, dim: str, axis: int) -> jax.Array:
    """All-gathers a weight over its width; the transpose is a reduce-scatter."""
    axes = RULES[dim]
    return jax.lax.all_gather(vary(weight, frozenset(TOKEN_AXES)), axes, axis=axis, tiled=True)
