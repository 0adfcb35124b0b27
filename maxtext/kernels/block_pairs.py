"""Attention over a list of pairs of a block of queries and a block of keys, in float32 by online softmax.

A list names exactly the pairs in which some query sees some key, so nothing else is computed, and a loop over it has a
fixed number of steps. Several lists, over keys that arrive one after another, add to the same state. The gradient runs
over the same lists. Sources: Milakov and Gimelshein (2018) for the softmax, Dao et al. (2022) for the gradient.

Dims: N block, B batch, T query in a block, S key in a block, K key/value head, G query heads of one, H width of a key,
W width of a value, P pair.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from maxtext.kernels.attention import MASKED
from maxtext.parallel.collectives import vary, varying_axes


class Queries(NamedTuple):
    """Blocks of queries, with the document of each."""

    q_NBKGTH: jax.Array
    segments_NBT: jax.Array | None


class Keys(NamedTuple):
    """Blocks of keys and values, with the document of each."""

    k_NBKSH: jax.Array
    v_NBKSW: jax.Array
    segments_NBS: jax.Array | None


class State(NamedTuple):
    """What the softmax has seen so far: highest score, sum of exponentials below it, and values so weighted."""

    peak_NBKGT: jax.Array
    sum_NBKGT: jax.Array
    read_NBKGTW: jax.Array


class Saved(NamedTuple):
    """Of each query: gradient of what it read, peak and sum of its softmax, and the gradient times what it read."""

    dy_NBKGTW: jax.Array
    peak_NBKGT: jax.Array
    sum_NBKGT: jax.Array
    product_NBKGT: jax.Array


# Columns of a list of pairs, int32 (P, 4). A pair with no keys is empty, and is skipped.
QUERY, KEY, OFFSET, VALID = range(4)  # block of queries; of keys; first position of the one minus the other's; its keys


class Kernel(Protocol):
    """One pair: its arguments are single blocks, without the dim N."""

    def read(self, query: Queries, key: Keys, pair_4: jax.Array) -> State:
        """What the queries read of these keys alone."""
        ...

    def gradients(self, query: Queries, saved: Saved, key: Keys,
                  pair_4: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the pair adds to the gradients of queries, keys and values, float32."""
        ...


def start(queries: Queries, width: int) -> State:
    """The state before any key, for values of `width`."""
    zeros_NBKGT = jnp.zeros(queries.q_NBKGTH.shape[:-1], jnp.float32)
    state = State(zeros_NBKGT + MASKED, zeros_NBKGT, jnp.zeros((*zeros_NBKGT.shape, width), jnp.float32))
    return vary(state, varying_axes(queries.q_NBKGTH))


def accumulate(state: State, queries: Queries, keys: Keys, pairs_P4: jax.Array, kernel: Kernel, skip: bool) -> State:
    """Reads the keys of each pair.

    Args:
      pairs_P4: the list; see the columns above.
      skip: whether pairs may be empty, or their documents apart: these cost nothing then.
    """

    def body(state: State, pair_4: jax.Array) -> tuple[State, None]:
        block, query, key = _take(state, pair_4[QUERY]), _take(queries, pair_4[QUERY]), _take(keys, pair_4[KEY])

        def read() -> State:
            return _merge(block, kernel.read(query, key, pair_4))

        block = jax.lax.cond(_meets(query, key, pair_4), read, lambda: block) if skip else read()
        return _put(state, block, pair_4[QUERY]), None

    return jax.lax.scan(body, state, pairs_P4)[0]


def _merge(one: State, other: State) -> State:
    peak = jnp.maximum(one.peak_NBKGT, other.peak_NBKGT)
    fade, other_fade = jnp.exp(one.peak_NBKGT - peak), jnp.exp(other.peak_NBKGT - peak)
    return State(peak, one.sum_NBKGT * fade + other.sum_NBKGT * other_fade,
                 one.read_NBKGTW * fade[..., None] + other.read_NBKGTW * other_fade[..., None])


def finish(state: State, sinks_KG: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each query reads, (N, B, K, G, T, W), and the peak and sum of its softmax, (N, B, K, G, T), float32."""
    if sinks_KG is not None:
        peak_NBKGT = jnp.broadcast_to(sinks_KG.astype(jnp.float32)[..., None], state.sum_NBKGT.shape)
        state = _merge(state, State(peak_NBKGT, jnp.ones_like(peak_NBKGT), jnp.zeros_like(state.read_NBKGTW)))
    return state.read_NBKGTW / state.sum_NBKGT[..., None], state.peak_NBKGT, state.sum_NBKGT


def gradients(dq_NBKGTH: jax.Array, queries: Queries, saved: Saved, keys: Keys, pairs_P4: jax.Array, kernel: Kernel,
              skip: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds to the gradient of the queries; gives those of these keys and values, all float32."""

    def body(total: tuple, pair_4: jax.Array) -> tuple[tuple, None]:
        dq_NBKGTH, dkv = total
        query, row, key = _take(queries, pair_4[QUERY]), _take(saved, pair_4[QUERY]), _take(keys, pair_4[KEY])
        part = (_take(dq_NBKGTH, pair_4[QUERY]), *_take(dkv, pair_4[KEY]))

        def add() -> tuple:
            return tuple(x + dx for x, dx in zip(part, kernel.gradients(query, row, key, pair_4), strict=True))

        dq_BKGTH, *dkv_block = jax.lax.cond(_meets(query, key, pair_4), add, lambda: part) if skip else add()
        return (_put(dq_NBKGTH, dq_BKGTH, pair_4[QUERY]), _put(dkv, tuple(dkv_block), pair_4[KEY])), None

    zeros = vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2]), varying_axes(keys.k_NBKSH))
    (dq_NBKGTH, (dk_NBKSH, dv_NBKSW)), _ = jax.lax.scan(body, (dq_NBKGTH, zeros), pairs_P4)
    return dq_NBKGTH, dk_NBKSH, dv_NBKSW


@dataclasses.dataclass(frozen=True)
class Plain:
    """A pair in plain JAX; `scale` multiplies the scores."""

    window: int | None
    scale: float

    def read(self, query: Queries, key: Keys, pair_4: jax.Array) -> State:
        scores_BKGTS = self._scores(query, key, pair_4)
        peak_BKGT = scores_BKGTS.max(-1)
        exp_BKGTS = jnp.exp(scores_BKGTS - peak_BKGT[..., None])
        read_BKGTW = jnp.einsum("bkgts,bksw->bkgtw", exp_BKGTS.astype(key.v_NBKSW.dtype), key.v_NBKSW,
                                preferred_element_type=jnp.float32)
        return State(peak_BKGT, exp_BKGTS.sum(-1), read_BKGTW)

    def gradients(self, query: Queries, saved: Saved, key: Keys,
                  pair_4: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Not exp(scores - log of the sum): the log's rounding would scale all of a row.
        exp_BKGTS = jnp.exp(self._scores(query, key, pair_4) - saved.peak_NBKGT[..., None])
        probs_BKGTS = exp_BKGTS * (1 / saved.sum_NBKGT[..., None])
        dprobs_BKGTS = jnp.einsum("bkgtw,bksw->bkgts", saved.dy_NBKGTW, key.v_NBKSW,
                                  preferred_element_type=jnp.float32)
        dscores_BKGTS = probs_BKGTS * (dprobs_BKGTS - saved.product_NBKGT[..., None]) * self.scale
        dscores_BKGTS = dscores_BKGTS.astype(key.k_NBKSH.dtype)
        dq_BKGTH = jnp.einsum("bkgts,bksh->bkgth", dscores_BKGTS, key.k_NBKSH, preferred_element_type=jnp.float32)
        dk_BKSH = jnp.einsum("bkgts,bkgth->bksh", dscores_BKGTS, query.q_NBKGTH, preferred_element_type=jnp.float32)
        dv_BKSW = jnp.einsum("bkgts,bkgtw->bksw", probs_BKGTS.astype(saved.dy_NBKGTW.dtype), saved.dy_NBKGTW,
                             preferred_element_type=jnp.float32)
        return dq_BKGTH, dk_BKSH, dv_BKSW

    def _scores(self, query: Queries, key: Keys, pair_4: jax.Array) -> jax.Array:
        """Scores of one pair, (B, K, G, T, S) float32, with those that are not seen far below all others."""
        scores_BKGTS = jnp.einsum("bkgth,bksh->bkgts", query.q_NBKGTH, key.k_NBKSH,
                                  preferred_element_type=jnp.float32) * self.scale
        t, s = jnp.arange(scores_BKGTS.shape[3])[:, None], jnp.arange(scores_BKGTS.shape[4])[None]
        back_TS = pair_4[OFFSET] + t - s  # how far back the key lies
        seen = (back_TS >= 0) & (s < pair_4[VALID])
        if self.window is not None:
            seen &= back_TS < self.window
        if query.segments_NBT is not None and key.segments_NBS is not None:
            seen = seen & (query.segments_NBT[:, :, None] == key.segments_NBS[:, None, :])[:, None, None]
        return jnp.where(seen, scores_BKGTS, MASKED)


def _meets(query: Queries, key: Keys, pair_4: jax.Array) -> jax.Array:
    """Whether the pair has keys, and in some row a document that may be in both blocks."""
    meets = pair_4[VALID] > 0
    if query.segments_NBT is not None and key.segments_NBS is not None:
        apart_B = (query.segments_NBT.max(-1) < key.segments_NBS.min(-1)) | (
            key.segments_NBS.max(-1) < query.segments_NBT.min(-1))
        meets &= ~apart_B.all()
    return meets


def _take(tree, index: jax.Array):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree, block, index: jax.Array):
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, axis=0), tree, block)
