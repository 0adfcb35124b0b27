"""The experts of a routed layer on their tokens: assignments sorted by expert, then grouped matmuls.

All functions work on one device's own part. Hidden width may be split over the tensor axis: results are then partial
sums over it.

Dims: N token, D model width, E expert of this device, K assignment of one token, M = N K assignments sorted by expert,
S of them in a chunk, F hidden width of an expert, H = 2 F.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.architecture import Activation
from maxtext.config.schema import DEFAULT_EXECUTION, Execution
from maxtext.kernels.choice import choose_grouped_matmul
from maxtext.kernels.grouped_matmul import grouped_matmul
from maxtext.kernels.quantized_groups import quantized_grouped_matmul
from maxtext.model.layers import activate
from maxtext.model.router import Assignments, count
from maxtext.parallel.collectives import platform, vary, varying_axes
from maxtext.parallel.show import tree_text


@flax.struct.dataclass
class Experts:
    gate_up: jax.Array  # E D 2 F
    down: jax.Array  # E F D
    gate_up_bias: jax.Array | None = None  # E 2 F
    down_bias: jax.Array | None = None  # E D

    __repr__ = tree_text


def run_experts(p: Experts, x_ND: jax.Array, chosen: Assignments, activation: Activation,
                how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """Sum over each token's assignments of weight * expert(x).

    Args:
      chosen: ids of this device's experts; ids from E on are no expert's and give nothing.

    Returns:
      (N, D) in the dtype of x.
    """
    order_M = jnp.argsort(chosen.ids_NK.reshape(-1), stable=True)
    rank_NK = jnp.argsort(order_M).reshape(chosen.ids_NK.shape)
    weights_M1 = spread(chosen.weights_NK.reshape(-1, 1), order_M, rank_NK.reshape(-1, 1))
    sizes_E = count(chosen.ids_NK, p.gate_up.shape[0])
    y_MD = _rows(p, spread(x_ND, order_M, rank_NK), weights_M1, sizes_E, activation, how)
    return collect(y_MD, order_M, rank_NK)


def _rows(p: Experts, x_MD: jax.Array, weights_M1: jax.Array, sizes_E: jax.Array, activation: Activation,
          how: Execution) -> jax.Array:
    """weight * expert(x) of rows sorted by expert; rows beyond the sum of `sizes_E` give zeros."""
    experts, width = p.gate_up.shape[:2]
    stop_E, row_M1 = jnp.cumsum(sizes_E), jnp.arange(x_MD.shape[0])[:, None]
    is_of_ME = ((row_M1 < stop_E) & (row_M1 >= stop_E - sizes_E)).astype(x_MD.dtype)  # for biases, and unused without
    backend = choose_grouped_matmul(how.kernels.grouped_matmul, platform()).kind
    quant, run = how.quant.of("experts"), functools.partial(grouped_matmul, backend=backend)
    if quant is not None:
        run = functools.partial(quantized_grouped_matmul, quant=quant, backend=backend)
    both_MH = checkpoint_name(run(x_MD, p.gate_up.reshape(experts, width, -1), sizes_E), "gate_up")
    if p.gate_up_bias is not None:
        both_MH += is_of_ME @ p.gate_up_bias.reshape(experts, -1)
    # The weight multiplies the hidden state, not the output: its gradient then needs no output to be kept.
    hidden_MF = (activate(*jnp.split(both_MH, 2, axis=-1), activation) * weights_M1).astype(x_MD.dtype)
    out_MD = run(hidden_MF, p.down, sizes_E)
    if p.down_bias is not None:
        bias_ED = jnp.where(jax.lax.axis_index("tensor") == 0, p.down_bias, 0)  # once in the sum over the axis
        out_MD += (is_of_ME * weights_M1).astype(x_MD.dtype) @ bias_ED
    return out_MD


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


# The same in chunks, for when most assignments may be none's: the loop ends with the last that is an expert's, forward
# and backward. The backward pass computes a chunk again, so that one chunk's activations exist at a time.


def run_experts_in_chunks(p: Experts, x_ND: jax.Array, chosen: Assignments, activation: Activation,
                          chunk: int, how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """As `run_experts`, `chunk` sorted assignments at a time."""
    axes = varying_axes(x_ND, *jax.tree.leaves(p))
    return _chunked(activation, chunk, how, *vary((p, x_ND, chosen.weights_NK, chosen.ids_NK), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(activation: Activation, chunk: int, how: Execution, p: Experts, x_ND: jax.Array, weights_NK: jax.Array,
             ids_NK: jax.Array) -> jax.Array:
    queue = _queue(ids_NK, p.gate_up.shape[0], chunk)

    def body(index: jax.Array, out_ND: jax.Array) -> jax.Array:
        part = _part(queue, index, ids_NK.shape[1])
        y_SD = _rows(p, x_ND[part.token_S], weights_NK[part.token_S, part.k_S, None], part.sizes_E, activation,
                     how)
        return out_ND.at[part.token_S].add(y_SD.astype(jnp.float32))

    return jax.lax.fori_loop(0, queue.used, body, _zeros(x_ND)).astype(x_ND.dtype)


def _chunked_forward(activation: Activation, chunk: int, how: Execution, *args: jax.Array) -> tuple[jax.Array, tuple]:
    return _chunked(activation, chunk, how, *args), args


def _chunked_backward(activation: Activation, chunk: int, how: Execution, args: tuple, dout_ND: jax.Array) -> tuple:
    p, x_ND, weights_NK, ids_NK = args
    queue = _queue(ids_NK, p.gate_up.shape[0], chunk)

    def body(index: jax.Array, sums: tuple) -> tuple:
        part = _part(queue, index, ids_NK.shape[1])
        run = functools.partial(_rows, sizes_E=part.sizes_E, activation=activation, how=how)
        _, pull = jax.vjp(run, p, x_ND[part.token_S], weights_NK[part.token_S, part.k_S, None])
        dp, dx_SD, dweights_S1 = pull(dout_ND[part.token_S])
        sum_p, dx_ND, dweights_NK = sums
        return (jax.tree.map(lambda total, one: total + one.astype(jnp.float32), sum_p, dp),
                dx_ND.at[part.token_S].add(dx_SD.astype(jnp.float32)),
                dweights_NK.at[part.token_S, part.k_S].add(dweights_S1[:, 0]))

    start = jax.tree.map(_zeros, (p, x_ND, weights_NK))
    sums = jax.lax.fori_loop(0, queue.used, body, start)
    return *jax.tree.map(lambda total, like: total.astype(like.dtype), sums, args[:3]), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


class _Queue(NamedTuple):
    order_CS: jax.Array  # assignments sorted by expert, in chunks; the last is filled up with assignment 0
    stop_E: jax.Array  # where each expert's end
    used: jax.Array  # chunks that hold any of an expert's


class _Part(NamedTuple):
    """One chunk: the token and place of each assignment, and how many each expert has."""

    token_S: jax.Array
    k_S: jax.Array
    sizes_E: jax.Array


def _queue(ids_NK: jax.Array, experts: int, chunk: int) -> _Queue:
    order_M = jnp.argsort(ids_NK.reshape(-1), stable=True)
    order_M = jnp.pad(order_M, (0, -order_M.size % chunk))
    stop_E = jnp.cumsum(count(ids_NK, experts))
    return _Queue(order_M.reshape(-1, chunk), stop_E, -(-stop_E[-1] // chunk))


def _part(queue: _Queue, index: jax.Array, choices: int) -> _Part:
    order_S = queue.order_CS[index]
    here_E = jnp.clip(queue.stop_E - index * order_S.size, 0, order_S.size)
    return _Part(order_S // choices, order_S % choices, jnp.diff(here_E, prepend=0))


def _zeros(like: jax.Array) -> jax.Array:
    return vary(jnp.zeros(like.shape, jnp.float32), varying_axes(like))
