"""The experts of a routed layer on their tokens: assignments sorted by expert, then grouped matmuls.

All functions work on one device's own part. Hidden width may be split over the tensor axis: results are then partial
sums over it.

Dims: N token, D model width, E expert of this device, K assignment of one token, M = N K assignments sorted by expert,
F hidden width of an expert.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.architecture import Activation
from maxtext.kernels.grouped_matmul import grouped_matmul
from maxtext.model.layers import activate
from maxtext.model.router import Assignments, count


@flax.struct.dataclass
class Experts:
    gate_up: jax.Array  # E D 2 F
    down: jax.Array  # E F D
    gate_up_bias: jax.Array | None = None  # E 2 F
    down_bias: jax.Array | None = None  # E D


def run_experts(p: Experts, x_ND: jax.Array, chosen: Assignments, activation: Activation) -> jax.Array:
    """Sum over each token's assignments of weight * expert(x).

    Args:
      chosen: ids of this device's experts; ids from E on are no expert's and give nothing.

    Returns:
      (N, D) in the dtype of x.
    """
    experts, tokens = p.gate_up.shape[0], x_ND.shape[0]
    order_M = jnp.argsort(chosen.ids_NK.reshape(-1), stable=True)
    rank_NK = jnp.argsort(order_M).reshape(tokens, -1)
    sizes_E = count(chosen.ids_NK, experts)
    weights_M1 = spread(chosen.weights_NK.reshape(-1, 1), order_M, rank_NK.reshape(-1, 1))
    x_MD = spread(x_ND, order_M, rank_NK)
    both_MH = grouped_matmul(x_MD, p.gate_up.reshape(experts, x_ND.shape[1], -1), sizes_E)
    both_MH = checkpoint_name(both_MH, "gate_up")
    group_ME = None
    if p.gate_up_bias is not None:
        group_ME = jnp.arange(experts) == chosen.ids_NK.reshape(-1)[order_M][:, None]
        both_MH += group_ME.astype(both_MH.dtype) @ p.gate_up_bias.reshape(experts, -1)
    # The weight multiplies the hidden state, not the output: its gradient then needs no output to be kept.
    hidden_MF = (activate(*jnp.split(both_MH, 2, axis=-1), activation) * weights_M1).astype(x_ND.dtype)
    out_MD = grouped_matmul(hidden_MF, p.down, sizes_E)
    if p.down_bias is not None:
        bias_ED = jnp.where(jax.lax.axis_index("tensor") == 0, p.down_bias, 0)  # once in the sum over the axis
        out_MD += (group_ME * weights_M1).astype(out_MD.dtype) @ bias_ED
    return collect(out_MD, order_M, rank_NK)


# Two linear maps, each the other's transpose. Both are gathers: a scatter, the usual transpose of one, is slower.


@jax.custom_vjp
def spread(x_ND: jax.Array, order_M: jax.Array, rank_NK: jax.Array) -> jax.Array:
    """Row m is the token of assignment order[m]; assignment n K + k of the tokens stands at row rank[n, k]."""
    return x_ND[order_M // rank_NK.shape[1]]


@jax.custom_vjp
def collect(y_MD: jax.Array, order_M: jax.Array, rank_NK: jax.Array) -> jax.Array:
    """Sums the rows of each token's assignments, in float32."""
    return y_MD[rank_NK].astype(jnp.float32).sum(1).astype(y_MD.dtype)


spread.defvjp(lambda x, order, rank: (spread(x, order, rank), (order, rank)),
              lambda places, dx: (collect(dx, *places), None, None))
collect.defvjp(lambda y, order, rank: (collect(y, order, rank), (order, rank)),
               lambda places, dy: (spread(dy, *places), None, None))
