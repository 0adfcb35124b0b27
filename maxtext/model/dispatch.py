"""Expert parallelism: each token travels to the devices that hold its experts, and the sum of their outputs back.

Shapes are static and nothing is dropped: what does not fit into one round of messages goes in the next. There are as
many rounds as the worst case needs (all tokens to one device); those that no device needs are skipped.

Dims: N token of this device, D model width, P device of the expert axis, R token of one message, E expert of this
device, K assignment of one token.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from maxtext.config.architecture import Activation
from maxtext.config.schema import DEFAULT_EXECUTION, Execution
from maxtext.model.experts import Experts, run_experts, run_experts_in_chunks
from maxtext.model.router import Assignments, TokenAxes
from maxtext.parallel.collectives import exchange, vary, varying_axes
from maxtext.parallel.sharding import RULES

AXIS = RULES["expert"][0]
SLACK = 1.5  # size of a message over an even share of the sender's tokens


def run_distributed(p: Experts, x_ND: jax.Array, chosen: Assignments, activation: Activation,
                    axes: TokenAxes, how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """Sum over each token's assignments of weight * expert(x), with experts on any device of the expert axis.

    A device's own experts, `p`, are those from E * (its index) on. Ids beyond all experts' are none's. A token is sent
    once to a device, however many of its experts are there. The backward pass computes each round again, so that the
    messages of one round exist at a time. Sums over devices are float32, in both passes.

    Returns:
      (N, D) in the dtype of x.
    """
    devices, experts = jax.lax.axis_size(AXIS), p.gate_up.shape[0]
    if devices == 1:
        return run_experts(p, x_ND, chosen, activation, how)
    (tokens, _), dtype = x_ND.shape, x_ND.dtype
    x_ND = x_ND.astype(jnp.float32)
    message = min(tokens, math.ceil(tokens / devices * SLACK))
    rounds = math.ceil(tokens / message)
    bound_PN = (chosen.ids_NK // experts == jnp.arange(devices)[:, None, None]).any(-1)
    counts_P = bound_PN.sum(-1, dtype=jnp.int32)
    needed = jax.lax.pmax(counts_P.max(), axes.all)
    # For each device its tokens first, in order; then cut into messages.
    queue_PN = jnp.argsort(~bound_PN, axis=-1, stable=True).astype(jnp.int32)
    queue_PN = jnp.pad(queue_PN, ((0, 0), (0, rounds * message - tokens)))
    queue_IPR = queue_PN.reshape(devices, rounds, message).swapaxes(0, 1)

    @jax.checkpoint
    def contribution(p: Experts, x_ND: jax.Array, chosen: Assignments, index: jax.Array, queue_PR: jax.Array):
        sizes_P = jnp.clip(counts_P - index * message, 0, message)
        run = functools.partial(_round, activation=activation, dtype=dtype, how=how)
        return jax.lax.cond(index * message < needed, run, _nothing, p, x_ND, chosen, queue_PR, sizes_P)

    def body(out_ND: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return out_ND + contribution(p, x_ND, chosen, *xs), None

    start_ND = _nothing(p, x_ND, chosen)
    return jax.lax.scan(body, start_ND, (jnp.arange(rounds), queue_IPR))[0].astype(dtype)


def _nothing(p: Experts, x_ND: jax.Array, *_: object) -> jax.Array:
    return vary(jnp.zeros_like(x_ND), varying_axes(x_ND, p.gate_up))


def _round(p: Experts, x_ND: jax.Array, chosen: Assignments, queue_PR: jax.Array, sizes_P: jax.Array,
           activation: Activation, dtype: jnp.dtype, how: Execution) -> jax.Array:
    """What the tokens `queue_PR` get from their experts; of each row only the first `sizes_P` are meant."""
    devices, message = queue_PR.shape
    experts, choices = p.gate_up.shape[0], chosen.ids_NK.shape[1]
    own_PRK = chosen.ids_NK[queue_PR] - experts * jnp.arange(devices, dtype=jnp.int32)[:, None, None]
    own_PRK = jnp.where((own_PRK >= 0) & (own_PRK < experts), own_PRK, experts)
    weights_PRK = chosen.weights_NK[queue_PR]
    if experts < choices:  # a token has at most E assignments on one device
        first_PRE = jnp.argsort(own_PRK, axis=-1)[..., :experts]
        own_PRK = jnp.take_along_axis(own_PRK, first_PRE, -1)
        weights_PRK = jnp.take_along_axis(weights_PRK, first_PRE, -1)
    came_P = exchange(sizes_P[:, None], None, None, AXIS)[:, 0]
    send = functools.partial(exchange, sent_P=sizes_P, came_P=came_P, axis=AXIS)
    came_ND = send(x_ND[queue_PR].astype(dtype)).reshape(devices * message, -1)
    # Ids travel with the weights, as float32: one message less.
    ids_PRK, weights_PRK = jnp.split(send(jnp.concatenate([own_PRK.astype(jnp.float32), weights_PRK], -1)), 2, -1)
    there_PR1 = (jnp.arange(message)[None] < came_P[:, None])[..., None]
    ids_PRK = jnp.where(there_PR1, ids_PRK, experts).astype(jnp.int32)
    arrived = Assignments(*(array.reshape(devices * message, -1) for array in (ids_PRK, weights_PRK)))
    # A token that comes here has so many experts here, if experts are drawn evenly; room for more is seldom used.
    share = choices / devices / (1 - (1 - 1 / devices) ** choices)
    y_ND = run_experts_in_chunks(p, came_ND, arrived, activation, math.ceil(devices * message * share), how)
    y_PRD = exchange(y_ND.reshape(devices, message, -1), came_P, sizes_P, AXIS)
    return _nothing(p, x_ND).at[queue_PR].add(y_PRD.astype(jnp.float32))  # zeros where nothing was meant
