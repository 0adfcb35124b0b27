"""Mixture of experts: a router, routed experts without dropped tokens, and experts that every token uses.

Dims: B batch, T position, N = B T tokens of this device, D model width, E expert, K expert of one token, F hidden
width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.schema import DEFAULT_EXECUTION, Execution, ModelConfig
from maxtext.model.dispatch import run_distributed
from maxtext.model.experts import Experts
from maxtext.model.layers import Mlp, mlp, mlp_params
from maxtext.model.router import (
    Assignments,
    RouterStats,
    TokenAxes,
    choose_experts,
    limit_capacity,
    router_logits,
    router_scores,
    router_stats,
)
from maxtext.parallel.collectives import all_gather, vary
from maxtext.parallel.positions import positions_dim, unshare
from maxtext.parallel.sharding import Param, is_param, mesh_axes, per_device
from maxtext.parallel.show import tree_text


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

    __repr__ = tree_text


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
        prior_E: jax.Array | None = None, how: Execution = DEFAULT_EXECUTION) -> tuple[jax.Array, RouterStats]:
    """The routed layer on (B, T, D), in its own dtype.

    Args:
      real_BT: bool; the other tokens are padding, which is routed to no expert and counted nowhere. None: all are real.
      prior_E: float32 assignments of the batch's earlier micro-batches; read with load_statistics: batch.

    Returns:
      (output, sums of the micro-batch for losses and metrics).
    """
    routed, whole_BTD = p.replace(shared=None), unshare(x_BTD)
    dims = jax.tree.map(lambda param: param.dims, moe_params(cfg).replace(shared=None), is_leaf=is_param)
    split = _Split.of(x_BTD)

    def local(p: Moe, x_BTD: jax.Array, real_BT: jax.Array | None, prior_E: jax.Array | None):
        return _local(p, x_BTD, real_BT, prior_E, cfg, split, how)

    tokens, prior = ("batch", positions_dim(whole_BTD)), None if prior_E is None else (None,)
    stats = RouterStats(counts_E=(None,), load_balance=(), z_loss=(), entropy=(), dropped=(), tokens=())
    run = per_device(local, (dims, (*tokens, None), None if real_BT is None else tokens, prior),
                     (("batch", positions_dim(x_BTD), None), stats))
    out_BTD, stats = run(routed, whole_BTD, real_BT, prior_E)
    if p.shared is not None:
        out_BTD += mlp(p.shared, x_BTD, cfg.activation, how.quant.of("dense"))
    return checkpoint_name(out_BTD, "mlp_out"), stats


class _Split(NamedTuple):
    """What the mesh does to a routed layer."""

    tokens: TokenAxes
    copies: tuple[str, ...]  # axes along which all devices have the same tokens and do the same
    devices: frozenset[str]  # all axes of these, and that of hidden widths
    width: tuple[str, ...]  # of the router's width
    expert_width: tuple[str, ...]
    hidden: tuple[str, ...]  # of the experts' hidden width
    scatter: bool  # whether positions are split over `hidden` between layers

    @classmethod
    def of(cls, x_BTD: jax.Array) -> _Split:
        positions, whole = mesh_axes("sequence"), positions_dim(unshare(x_BTD)) is None
        return cls(TokenAxes(mesh_axes("batch"), () if whole else positions), positions if whole else (),
                   frozenset(mesh_axes("batch", "sequence", "mlp")), mesh_axes("embed"), mesh_axes("expert_embed"),
                   mesh_axes("mlp"), positions_dim(x_BTD) == "residual")


def _local(p: Moe, x_BTD: jax.Array, real_BT: jax.Array | None, prior_E: jax.Array | None, cfg: ModelConfig,
           split: _Split, how: Execution) -> tuple[jax.Array, RouterStats]:
    """One device's tokens, and its experts."""
    moe, x_ND = cfg.moe, x_BTD.reshape(-1, x_BTD.shape[-1])
    real_N = jnp.ones(x_ND.shape[0], bool) if real_BT is None else real_BT.reshape(-1)
    real_N = vary(real_N, frozenset(split.tokens.all))
    logits_NE = router_logits(x_ND, _whole(p.router, split.width, 0, split), p.router_bias)
    scores_NE = router_scores(logits_NE, moe)
    chosen = choose_experts(scores_NE, p.selection_bias, moe)
    chosen = chosen._replace(ids_NK=jnp.where(real_N[:, None], chosen.ids_NK, moe.experts))
    kept, dropped = chosen, jnp.float32(0)
    if moe.capacity_factor is not None:
        kept, dropped = limit_capacity(chosen, moe, split.tokens)
    stats = router_stats(logits_NE, scores_NE, chosen, dropped, real_N, x_BTD.shape[0], prior_E, moe, split.tokens)
    out_BTD = _routed(p, x_ND, kept, cfg, split, how).reshape(x_BTD.shape)
    if split.scatter:
        out_BTD = jax.lax.psum_scatter(out_BTD, split.hidden, scatter_dimension=1, tiled=True)
    else:
        out_BTD = jax.lax.psum(out_BTD, split.hidden)
    return _one_of((out_BTD, stats), split.copies)


def _one_of(tree: tuple[jax.Array, RouterStats], copies: tuple[str, ...]) -> tuple[jax.Array, RouterStats]:
    """The same values, known to be equal along these axes, along which all devices have made them."""
    if not copies:
        return tree
    if jax.lax.axis_size(copies) == 1:  # a sum of one, which has a derivative
        return jax.lax.psum(tree, copies)
    return jax.lax.pmax(tree, copies)


def _routed(p: Moe, x_ND: jax.Array, chosen: Assignments, cfg: ModelConfig, split: _Split,
            how: Execution) -> jax.Array:
    """What this device's experts, and its part of their hidden widths, give to its tokens."""
    experts = Experts(_whole(p.gate_up, split.expert_width, 1, split), _whole(p.down, split.expert_width, 2, split),
                      p.gate_up_bias, p.down_bias)
    # Typed as different over the tensor axis at once: gradients are then summed over it once a token.
    x_ND, chosen = vary((x_ND, chosen), split.devices)
    return run_distributed(experts, x_ND, chosen, cfg.activation, split.tokens, how)


def _whole(weight: jax.Array, axes: tuple[str, ...], dim: int, split: _Split) -> jax.Array:
    """All-gathers a weight over its width; the transpose is a reduce-scatter."""
    varied = vary(weight, frozenset(split.tokens.all + split.copies))
    return all_gather(varied, axes, dim)
