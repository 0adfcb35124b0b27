"""Attention over a list of pairs of a block of queries and a block of keys, in float32 by online softmax.

A list names exactly the pairs in which some query sees some key, so nothing else is computed, and a loop over it has a
fixed number of steps. Several lists, over keys that arrive one after another, add to the same state. The gradient runs
over the same lists. Sources: Milakov and Gimelshein (2018) for the softmax, Dao et al. (2022) for the gradient.

Dims: N block, B batch, T query in a block, S key in a block, K key/value head, G query heads of one, H width of a key,
W width of a value, P pair.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.parallel.collectives import vary, varying_axes

MASKED = -1e30  # finite: exp of a difference to a real score is exactly 0


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


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees, besides the order and the documents; `scale` multiplies the scores."""

    window: int | None
    scale: float


# Columns of a list of pairs, int32 (P, 4). A pair with no keys is empty, and is skipped.
QUERY, KEY, OFFSET, VALID = range(4)  # block of queries; of keys; first position of the one minus the other's; its keys


def start(queries: Queries, width: int) -> State:
    """The state before any key, for values of `width`."""
    zeros_NBKGT = jnp.zeros(queries.q_NBKGTH.shape[:-1], jnp.float32)
    state = State(zeros_NBKGT + MASKED, zeros_NBKGT, jnp.zeros((*zeros_NBKGT.shape, width), jnp.float32))
    return vary(state, varying_axes(queries.q_NBKGTH))


def accumulate(state: State, queries: Queries, keys: Keys, pairs_P4: jax.Array, mask: Mask, skip: bool) -> State:
    """Reads the keys of each pair.

    Args:
      pairs_P4: the list; see the columns above.
      skip: whether pairs may be empty, or their documents apart: these cost nothing then.
    """

    def body(state: State, pair_4: jax.Array) -> tuple[State, None]:
        block, query, key = _take(state, pair_4[QUERY]), _take(queries, pair_4[QUERY]), _take(keys, pair_4[KEY])

        def read() -> State:
            peak_BKGT, sum_BKGT, read_BKGTW = block
            scores_BKGTS = _scores(query, key, pair_4, mask)
            higher_BKGT = jnp.maximum(peak_BKGT, scores_BKGTS.max(-1))
            exp_BKGTS = jnp.exp(scores_BKGTS - higher_BKGT[..., None])
            fade_BKGT = jnp.exp(peak_BKGT - higher_BKGT)
            new_BKGTW = jnp.einsum("bkgts,bksw->bkgtw", exp_BKGTS.astype(key.v_NBKSW.dtype), key.v_NBKSW,
                                   preferred_element_type=jnp.float32)
            return State(higher_BKGT, sum_BKGT * fade_BKGT + exp_BKGTS.sum(-1),
                         read_BKGTW * fade_BKGT[..., None] + new_BKGTW)

        block = jax.lax.cond(_meets(query, key, pair_4), read, lambda: block) if skip else read()
        return _put(state, block, pair_4[QUERY]), None

    return jax.lax.scan(body, state, pairs_P4)[0]


def finish(state: State, sinks_KG: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What each query reads, (N, B, K, G, T, W), and the logarithm of its softmax's sum, (N, B, K, G, T), float32."""
    peak_NBKGT, sum_NBKGT = state.peak_NBKGT, state.sum_NBKGT
    read_NBKGTW = state.read_NBKGTW
    if sinks_KG is not None:
        sinks_KG1 = sinks_KG.astype(jnp.float32)[..., None]
        higher_NBKGT = jnp.maximum(peak_NBKGT, sinks_KG1)
        fade_NBKGT = jnp.exp(peak_NBKGT - higher_NBKGT)
        sum_NBKGT = sum_NBKGT * fade_NBKGT + jnp.exp(sinks_KG1 - higher_NBKGT)
        peak_NBKGT, read_NBKGTW = higher_NBKGT, read_NBKGTW * fade_NBKGT[..., None]
    return read_NBKGTW / sum_NBKGT[..., None], peak_NBKGT + jnp.log(sum_NBKGT)


class Saved(NamedTuple):
    """Of each query: gradient of what it read, logarithm of its softmax's sum, and the product of the gradient with
    what it read."""

    dy_NBKGTW: jax.Array
    log_sum_NBKGT: jax.Array
    product_NBKGT: jax.Array


def gradients(dq_NBKGTH: jax.Array, queries: Queries, saved: Saved, keys: Keys, pairs_P4: jax.Array, mask: Mask,
              skip: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds to the gradient of the queries; gives those of these keys and values, all float32."""
    dtype = keys.k_NBKSH.dtype

    def body(total: tuple, pair_4: jax.Array) -> tuple[tuple, None]:
        dq_NBKGTH, dkv = total
        query, row, key = _take(queries, pair_4[QUERY]), _take(saved, pair_4[QUERY]), _take(keys, pair_4[KEY])
        dq_BKGTH, dkv_block = _take(dq_NBKGTH, pair_4[QUERY]), _take(dkv, pair_4[KEY])

        def add() -> tuple:
            probs_BKGTS = jnp.exp(_scores(query, key, pair_4, mask) - row.log_sum_NBKGT[..., None])
            dprobs_BKGTS = jnp.einsum("bkgtw,bksw->bkgts", row.dy_NBKGTW, key.v_NBKSW,
                                      preferred_element_type=jnp.float32)
            dscores_BKGTS = probs_BKGTS * (dprobs_BKGTS - row.product_NBKGT[..., None]) * mask.scale
            dscores_BKGTS, probs_BKGTS = dscores_BKGTS.astype(dtype), probs_BKGTS.astype(row.dy_NBKGTW.dtype)
            dv_BKSW = jnp.einsum("bkgts,bkgtw->bksw", probs_BKGTS, row.dy_NBKGTW, preferred_element_type=jnp.float32)
            dk_BKSH = jnp.einsum("bkgts,bkgth->bksh", dscores_BKGTS, query.q_NBKGTH,
                                 preferred_element_type=jnp.float32)
            new_BKGTH = jnp.einsum("bkgts,bksh->bkgth", dscores_BKGTS, key.k_NBKSH,
                                   preferred_element_type=jnp.float32)
            return dq_BKGTH + new_BKGTH, (dkv_block[0] + dk_BKSH, dkv_block[1] + dv_BKSW)

        part = (dq_BKGTH, dkv_block)
        dq_BKGTH, dkv_block = jax.lax.cond(_meets(query, key, pair_4), add, lambda: part) if skip else add()
        return (_put(dq_NBKGTH, dq_BKGTH, pair_4[QUERY]), _put(dkv, dkv_block, pair_4[KEY])), None

    zeros = vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2]), varying_axes(keys.k_NBKSH))
    (dq_NBKGTH, (dk_NBKSH, dv_NBKSW)), _ = jax.lax.scan(body, (dq_NBKGTH, zeros), pairs_P4)
    return dq_NBKGTH, dk_NBKSH, dv_NBKSW


def _scores(query: Queries, key: Keys, pair_4: jax.Array, mask: Mask) -> jax.Array:
    """Scores of one pair, (B, K, G, T, S) float32, with those that are not seen far below all others."""
    scores_BKGTS = jnp.einsum("bkgth,bksh->bkgts", query.q_NBKGTH, key.k_NBKSH,
                              preferred_element_type=jnp.float32) * mask.scale
    t, s = jnp.arange(scores_BKGTS.shape[3])[:, None], jnp.arange(scores_BKGTS.shape[4])[None]
    back_TS = pair_4[OFFSET] + t - s  # how far back the key lies
    seen = (back_TS >= 0) & (s < pair_4[VALID])
    if mask.window is not None:
        seen &= back_TS < mask.window
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
