"""Which experts a token uses, with what weights, and how evenly they are used. Everything here is float32.

Dims: B sequence, T position, N = B T tokens of this device, D model width, E expert, K expert of one token, G group.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from maxtext.config.architecture import MoeConfig

TINY = 1e-20  # added to a sum of weights before it divides, as in DeepSeek-V3


@flax.struct.dataclass
class RouterStats:
    """Float32 sums over the real tokens of a micro-batch, on all devices: those of micro-batches add up."""

    counts_E: jax.Array  # assignments of each expert, before any is dropped
    load_balance: jax.Array  # E * tokens * sum of (share of assignments) * (mean score), 1 a token when even
    z_loss: jax.Array  # logsumexp(logits)^2
    entropy: jax.Array  # of the normalised scores, in nats
    dropped: jax.Array  # assignments beyond an expert's capacity
    tokens: jax.Array

    @classmethod
    def zeros(cls, layers: int, experts: int) -> RouterStats:
        """Statistics of no tokens, of a stack of layers."""
        return cls(jnp.zeros((layers, experts)), *(jnp.zeros(layers) for _ in range(5)))


class Assignments(NamedTuple):
    """The experts of each token; an id that is no expert's stands for none."""

    ids_NK: jax.Array  # int32
    weights_NK: jax.Array  # float32


class TokenAxes(NamedTuple):
    """The mesh axes that tokens are split over: sequences, and positions of one."""

    rows: tuple[str, ...]
    positions: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.rows + self.positions


def router_logits(x_ND: jax.Array, router_DE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    """A full float32 matmul whatever the dtype of x (OLMo-core nn/moe/router.py)."""
    logits_NE = jnp.einsum("nd,de->ne", x_ND.astype(jnp.float32), router_DE.astype(jnp.float32),
                           precision=jax.lax.Precision.HIGHEST)
    return logits_NE if bias_E is None else logits_NE + bias_E.astype(jnp.float32)


def router_scores(logits_NE: jax.Array, moe: MoeConfig) -> jax.Array:
    return jax.nn.softmax(logits_NE, axis=-1) if moe.scores == "softmax" else jax.nn.sigmoid(logits_NE)


def choose_experts(scores_NE: jax.Array, selection_bias_E: jax.Array | None, moe: MoeConfig) -> Assignments:
    """The top_k experts by score plus selection bias; their weights come from the scores alone.

    With groups, experts outside the best `group_top_k` groups cannot be chosen (DeepSeek-V3, 2024, section 2.1.2). Of
    equal values the lowest expert comes first. The choice carries no gradient, the weights do.
    """
    ranked_NE = jax.lax.stop_gradient(scores_NE)
    if selection_bias_E is not None:
        ranked_NE += jax.lax.stop_gradient(selection_bias_E.astype(jnp.float32))
    if moe.groups > 1:
        ranked_NE = _within_groups(ranked_NE, moe)
    ids_NK = jax.lax.top_k(ranked_NE, moe.top_k)[1]
    weights_NK = jnp.where(_is_expert(ids_NK, moe.experts), scores_NE[:, None], 0).sum(-1)
    if moe.renormalise:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdims=True) + TINY)
    return Assignments(ids_NK, weights_NK * moe.scale)


def _within_groups(ranked_NE: jax.Array, moe: MoeConfig) -> jax.Array:
    grouped_NGS = ranked_NE.reshape(ranked_NE.shape[0], moe.groups, -1)
    best = 1 if moe.group_score == "max" else 2
    group_NG = jax.lax.top_k(grouped_NGS, best)[0].sum(-1)
    chosen_NG = _is_expert(jax.lax.top_k(group_NG, moe.group_top_k)[1], moe.groups).any(1)
    return jnp.where(chosen_NG[..., None], grouped_NGS, -jnp.inf).reshape(ranked_NE.shape)


def _is_expert(ids_NK: jax.Array, experts: int) -> jax.Array:
    """(N, K, E) bool."""
    return ids_NK[..., None] == jnp.arange(experts, dtype=jnp.int32)


def count(ids_NK: jax.Array, experts: int) -> jax.Array:
    """(E,) int32 assignments of each expert; ids out of range are none's."""
    return _is_expert(ids_NK, experts).sum((0, 1), dtype=jnp.int32)


def limit_capacity(chosen: Assignments, moe: MoeConfig, axes: TokenAxes) -> tuple[Assignments, jax.Array]:
    """Takes from each expert what comes after the first ceil(factor * tokens * top_k / E), in the order of tokens.

    Tokens are those of all devices, in the order of the batch; positions of one sequence are on one device. Returns the
    rest, and how many were dropped.
    """
    here_NKE = _is_expert(chosen.ids_NK, moe.experts)
    here_ME = here_NKE.reshape(-1, moe.experts).astype(jnp.int32)
    before_E = jnp.zeros_like(here_ME[0])
    if axes.all:
        counts_PE, own = jax.lax.all_gather(here_ME.sum(0), axes.all), jax.lax.axis_index(axes.all)
        before_E = jnp.where(jnp.arange(counts_PE.shape[0])[:, None] < own, counts_PE, 0).sum(0)
    total = jax.lax.psum(here_ME.sum(), axes.all)  # real tokens * top_k
    capacity = jnp.ceil(moe.capacity_factor * total / moe.experts)
    place_ME = before_E + jnp.cumsum(here_ME, axis=0)
    taken_NK = ((here_ME > 0) & (place_ME <= capacity)).any(-1).reshape(chosen.ids_NK.shape)
    dropped = jax.lax.psum(here_ME.sum() - taken_NK.sum(), axes.all)
    ids_NK = jnp.where(taken_NK, chosen.ids_NK, moe.experts)
    return Assignments(ids_NK, chosen.weights_NK), dropped.astype(jnp.float32)


def router_stats(logits_NE: jax.Array, scores_NE: jax.Array, chosen: Assignments, dropped: jax.Array, real_N: jax.Array,
                 sequences: int, prior_E: jax.Array | None, moe: MoeConfig, axes: TokenAxes) -> RouterStats:
    """Sums over all devices; `load_balance` and `z_loss` carry gradients, to the scores and to the logits.

    Args:
      chosen: assignments before any are dropped; tokens that are not real have none.
      sequences: the tokens are of this many sequences, equal parts of each.
      prior_E: assignments of earlier micro-batches of the batch, for load_statistics: batch.
    """
    real_N1 = real_N[:, None]
    probs_NE = jnp.where(real_N1, scores_NE / (scores_NE.sum(-1, keepdims=True) + TINY), 0)
    counts_E = count(chosen.ids_NK, moe.experts).astype(jnp.float32)
    log_z_N = jax.nn.logsumexp(logits_NE, axis=-1)
    constant_NE = jax.lax.stop_gradient(probs_NE)
    entropy = -jax.scipy.special.xlogy(constant_NE, constant_NE).sum()
    sums = jax.lax.psum((counts_E, probs_NE.sum(0), real_N.sum(dtype=jnp.float32),
                         jnp.where(real_N, log_z_N**2, 0).sum(), entropy), axes.all)
    counts_E, probs_E, tokens, z_loss, entropy = sums
    if moe.load_statistics == "sequence":
        load_balance = jax.lax.psum(_load_balance_of_sequences(probs_NE, chosen.ids_NK, sequences, moe, axes),
                                    axes.rows)
    else:
        seen_E = counts_E + prior_E if moe.load_statistics == "batch" and prior_E is not None else counts_E
        load_balance = _load_balance(seen_E, probs_E, moe)
    return RouterStats(counts_E, load_balance, z_loss, entropy, dropped, tokens)


def _load_balance(counts_E: jax.Array, probs_E: jax.Array, moe: MoeConfig) -> jax.Array:
    """E * sum over experts of (share of the assignments) * (sum of the probabilities)."""
    share_E = counts_E / jnp.maximum(counts_E.sum(-1, keepdims=True), 1)
    return moe.experts * (share_E * probs_E).sum()


def _load_balance_of_sequences(probs_NE: jax.Array, ids_NK: jax.Array, sequences: int, moe: MoeConfig,
                               axes: TokenAxes) -> jax.Array:
    counts_BE = jax.vmap(lambda ids_TK: count(ids_TK, moe.experts))(ids_NK.reshape(sequences, -1, moe.top_k))
    probs_BE = probs_NE.reshape(sequences, -1, moe.experts).sum(1)
    counts_BE, probs_BE = jax.lax.psum((counts_BE, probs_BE), axes.positions)
    return _load_balance(counts_BE.astype(jnp.float32), probs_BE, moe)


def updated_bias(bias_E: jax.Array, counts_E: jax.Array, rate: float) -> jax.Array:
    """The selection bias after an update: up by `rate` where the load was below the mean, down where above.

    Works on (E,) and on stacks of layers, (L, E). Source: Wang et al. 2024, "Auxiliary-loss-free load balancing".
    """
    return bias_E + rate * jnp.sign(counts_E.mean(-1, keepdims=True) - counts_E)
