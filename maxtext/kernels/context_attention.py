"""Causal attention over sequences that several devices share, each with its part of the tokens.

It runs inside `per_device`, on local arrays, whose tokens lie in the order of parallel/sequence.py. Three strategies:

- all_gather: keys and values of all devices are gathered. The least work for the links' latency, the most memory.
- ring: they go around, one device's at a time (Liu et al. 2023, "Ring Attention"); memory does not grow with devices.
- ulysses: tokens are exchanged for heads (Jacobs et al. 2023), so that an ordinary kernel sees whole sequences.

With the first two a layer whose window reaches few chunks fetches just these from their holders.

Dims: B batch, T position on this device, K key/value head, G query heads of one, H width of a key, W width of a value;
N block and S key in a block as in block_pairs.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels import block_pairs
from maxtext.kernels.block_pairs import Kernel, Keys, Plain, Queries, Saved, State
from maxtext.kernels.context_layout import (
    Layout,
    by_kind,
    fetched_pairs,
    gathered_pairs,
    has_empty,
    messages,
    own_pairs,
    ring_pairs,
)
from maxtext.kernels.splash_pair import SplashPair, kind_of, splash_block
from maxtext.kernels.ulysses import ulysses_attention
from maxtext.parallel.collectives import vary, varying_axes
from maxtext.parallel.sequence import check_length

Strategy = Literal["all_gather", "ring", "ulysses"]
PairKernel = Literal["blocked", "splash", "splash_interpreted"]
SCORE_BYTES = 32 << 20  # most of one block of float32 scores
LEAST, MOST = 128, 1024  # tokens of a block


def context_attention(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None,
                      sinks_KG: jax.Array | None, *, window: int | None, scale: float, axis: str, strategy: Strategy,
                      inner: Callable[..., jax.Array], kernel: PairKernel = "blocked",
                      block: int | None = None) -> jax.Array:
    """Softmax attention of each position over itself and earlier ones of the whole sequence.

    Args:
      q_BTKGH: queries of this device's tokens; head k * G + g attends to key/value head k.
      k_BTKH, v_BTKW: their keys and values, whose widths may differ.
      segments_BT: int32 number of the document of each position; attention stays inside it. None: one document.
      sinks_KG: a score of each head that takes its share of the softmax and gives nothing.
      window: how many positions each query sees, itself included; None for all earlier ones.
      scale: multiplies the scores.
      axis: the mesh axis whose devices share the sequence.
      strategy: how keys and values reach the queries; the result differs by rounding only.
      inner: attention on whole sequences, `inner(q, k, v, segments, sinks, window=, scale=)`, for ulysses and for an
        axis of one device.
      kernel: what computes a pair of blocks in all_gather and ring: plain JAX, or JAX's splash kernels for TPUs.
      block: tokens in a block of all_gather and ring; chosen by default.

    Returns:
      (B, T, K, G, W) in the dtype of `v`. Scores and softmax are float32.

    Raises:
      ValueError: when the tokens do not make 2 chunks a device, or the heads cannot be shared out (ulysses).
    """
    devices = jax.lax.axis_size(axis)
    arrays = (q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG)
    if devices == 1:
        return inner(*arrays, window=window, scale=scale)
    check_length(q_BTKGH.shape[1] * devices, devices)
    arrays = vary(arrays, varying_axes(*jax.tree.leaves(arrays)) | {axis})
    if strategy == "ulysses":
        return ulysses_attention(arrays, functools.partial(inner, window=window, scale=scale), axis)
    layout = Layout(devices, q_BTKGH.shape[1] // 2, 0, window)
    chosen = splash_block(layout.chunk, window) if kernel != "blocked" else _block(layout, q_BTKGH)
    return _shared(_Plan(dataclasses.replace(layout, block=block or chosen), scale, axis, strategy, kernel), *arrays)


def _block(layout: Layout, q_BTKGH: jax.Array) -> int:
    """Equal blocks of a chunk, as large as their scores may be and no larger than a window is worth."""
    heads = q_BTKGH.shape[0] * math.prod(q_BTKGH.shape[2:4])
    most = 1 << int(math.log2(SCORE_BYTES // (4 * heads)) / 2)
    if layout.window is not None:
        most = min(most, layout.window)
    most = min(MOST, max(LEAST, most))
    return -(-layout.chunk // -(-layout.chunk // most))


# all_gather and ring: own keys first, then those of other devices in one or several lots.


@dataclasses.dataclass(frozen=True)
class _Plan:
    layout: Layout
    scale: float
    axis: str
    strategy: Strategy
    kernel: PairKernel

    @property
    def splash(self) -> bool:
        return self.kernel != "blocked"

    @property
    def ring(self) -> bool:
        return self.strategy == "ring" and not self.layout.near

    @property
    def pairs(self) -> Callable:
        """The list of pairs with fetched keys, of all devices."""
        return fetched_pairs if self.layout.near else gathered_pairs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(plan: _Plan, q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None,
            sinks_KG: jax.Array | None) -> jax.Array:
    return _forward(plan, q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG)[0]


def _forward(plan: _Plan, q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None,
             sinks_KG: jax.Array | None) -> tuple[jax.Array, tuple]:
    queries, keys = _to_blocks(plan, q_BTKGH, k_BTKH, v_BTKW, segments_BT)
    state = block_pairs.start(queries, v_BTKW.shape[-1])
    if plan.ring:
        state = _ring(plan, state, queries, keys)
    else:
        fetched = _fetch(plan, keys)
        state = _accumulate(state, queries, keys, _lots(plan, own_pairs(plan.layout)))
        if fetched is not None:
            state = _accumulate(state, queries, fetched, _lots(plan, plan.pairs(plan.layout)))
    y_NBKGTW, *norms = block_pairs.finish(state, sinks_KG)
    y_BTKGW = _from_blocks(plan.layout, y_NBKGTW.transpose(0, 1, 4, 2, 3, 5)).astype(v_BTKW.dtype)
    # Named as the result of attention is, so that a step that keeps the one need not compute the other again.
    y_BTKGW, norms = checkpoint_name((y_BTKGW, norms), "attention")
    return y_BTKGW, (q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG, y_BTKGW, *norms)


def _backward(plan: _Plan, saved: tuple, dy_BTKGW: jax.Array) -> tuple:
    q_BTKGH, k_BTKH, v_BTKW, segments_BT, sinks_KG, y_BTKGW, peak_NBKGT, sum_NBKGT = saved
    queries, keys = _to_blocks(plan, q_BTKGH, k_BTKH, v_BTKW, segments_BT)
    product_BTKG = (dy_BTKGW.astype(jnp.float32) * y_BTKGW).sum(-1)
    product_NBKGT = _blocks(plan.layout, product_BTKG).transpose(0, 1, 3, 4, 2)
    rows = Saved(_blocks(plan.layout, dy_BTKGW).transpose(0, 1, 3, 4, 2, 5), peak_NBKGT, sum_NBKGT, product_NBKGT)
    zeros = vary(jnp.zeros(queries.q_NBKGTH.shape, jnp.float32), varying_axes(queries.q_NBKGTH))
    step = functools.partial(_gradients, queries, rows)
    if plan.ring:
        dq_NBKGTH, dkv = _ring_gradients(plan, step, zeros, keys)
    else:
        fetched = _fetch(plan, keys)
        dq_NBKGTH, dkv = step(zeros, keys, _lots(plan, own_pairs(plan.layout)))
        if fetched is not None:
            dq_NBKGTH, dfetched = step(dq_NBKGTH, fetched, _lots(plan, plan.pairs(plan.layout)))
            dkv = jax.tree.map(jnp.add, dkv, _give_back(plan, dfetched, keys))
    if plan.splash:
        dq_NBKGTH *= plan.scale
    dq_BTKGH = _from_blocks(plan.layout, dq_NBKGTH.transpose(0, 1, 4, 2, 3, 5)).astype(q_BTKGH.dtype)
    dk_BTKH, dv_BTKW = (_from_blocks(plan.layout, x.transpose(0, 1, 3, 2, 4)).astype(like.dtype)
                        for x, like in zip(dkv, (k_BTKH, v_BTKW), strict=True))
    dsinks_KG = None
    if sinks_KG is not None:
        probs_NBKGT = jnp.exp(sinks_KG.astype(jnp.float32)[..., None] - peak_NBKGT) / sum_NBKGT
        dsinks_KG = -(probs_NBKGT * product_NBKGT).sum((0, 1, 4)).astype(sinks_KG.dtype)
    return dq_BTKGH, dk_BTKH, dv_BTKW, None, dsinks_KG


_shared.defvjp(_forward, _backward)


class _Lot(NamedTuple):
    """Pairs of one kind, this device's (..., P, 4), and what computes them."""

    pairs: jax.Array
    kernel: Kernel
    skip: bool  # whether some device's are empty


def _lots(plan: _Plan, pairs: np.ndarray) -> list[_Lot]:
    """What this device does of the lists (..., C, P, 4) of all."""
    window, block = plan.layout.window, plan.layout.block
    lists: dict[Kernel, np.ndarray] = {Plain(window, plan.scale): pairs}
    if plan.splash:  # a kernel of its own for each mask
        kinds = by_kind(pairs, lambda offset: kind_of(offset, block, window))
        lists = {SplashPair(block, window, offset, plan.kernel == "splash_interpreted"): part
                 for offset, part in kinds.items()}
    device = jax.lax.axis_index(plan.axis)
    return [_Lot(jax.lax.dynamic_index_in_dim(jnp.asarray(part), device, part.ndim - 3, False), kernel, has_empty(part))
            for kernel, part in lists.items()]


def _accumulate(state: State, queries: Queries, keys: Keys, lots: Sequence[_Lot]) -> State:
    for lot in lots:
        skip = lot.skip or queries.segments_NBT is not None
        state = block_pairs.accumulate(state, queries, keys, lot.pairs, lot.kernel, skip)
    return state


def _gradients(queries: Queries, rows: Saved, dq_NBKGTH: jax.Array, keys: Keys,
               lots: Sequence[_Lot]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    parts = []
    for lot in lots:
        skip = lot.skip or queries.segments_NBT is not None
        dq_NBKGTH, *dkv = block_pairs.gradients(dq_NBKGTH, queries, rows, keys, lot.pairs, lot.kernel, skip)
        parts.append(tuple(dkv))
    return dq_NBKGTH, functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)


# Fetching


def _fetch(plan: _Plan, keys: Keys) -> Keys | None:
    """The blocks that `plan.pairs` counts on; None when a device's own are all it needs."""
    if plan.layout.near and not messages(plan.layout):
        return None
    return jax.tree.map(functools.partial(_fetch_array, plan), keys)


def _give_back(plan: _Plan, dfetched: tuple, keys: Keys) -> tuple:
    """From the gradients of what was fetched to those of what was sent, float32."""
    like = vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in keys[:2]), varying_axes(keys.k_NBKSH))
    return tuple(jax.vjp(functools.partial(_fetch_array, plan), x)[1](dx)[0]
                 for x, dx in zip(like, dfetched, strict=True))


def _fetch_array(plan: _Plan, x_N: jax.Array) -> jax.Array:
    layout, axis = plan.layout, plan.axis
    if not layout.near:
        return jax.lax.all_gather(x_N, axis, tiled=True)
    parts = []
    for message in messages(layout):
        came = [jax.lax.ppermute(x_N[half * layout.blocks + message.first : (half + 1) * layout.blocks], axis, pairs)
                for half, pairs in message.halves]
        parts.append(functools.reduce(jnp.add, came))  # a device that got nothing from one got zeros
    return jnp.concatenate(parts)


# The ring: a loop over hops, whose body sends on what it computes with. A loop, because a compiler may start all hops
# of straight code at once, which takes the memory of gathering. The last hop stands apart: it sends nothing on.


def _ring(plan: _Plan, state: State, queries: Queries, keys: Keys) -> State:
    lots = _lots(plan, ring_pairs(plan.layout))
    arriving = _shift(plan, keys)
    state = _accumulate(state, queries, keys, _lots(plan, own_pairs(plan.layout)))

    def hop(carry: tuple[State, Keys], pairs: list[jax.Array]) -> tuple[tuple[State, Keys], None]:
        state, keys = carry
        return (_accumulate(state, queries, keys, _with(lots, pairs)), _shift(plan, keys)), None

    if plan.layout.devices > 2:
        (state, arriving), _ = jax.lax.scan(hop, (state, arriving), [lot.pairs[:-1] for lot in lots])
    return _accumulate(state, queries, arriving, _with(lots, [lot.pairs[-1] for lot in lots]))


def _ring_gradients(plan: _Plan, step: Callable, dq_NBKGTH: jax.Array, keys: Keys) -> tuple[jax.Array, tuple]:
    """The gradients of keys and values travel with them, one hop behind, and end with one more hop at home."""
    lots = _lots(plan, ring_pairs(plan.layout))
    arriving = _shift(plan, keys)
    dq_NBKGTH, dkv = step(dq_NBKGTH, keys, _lots(plan, own_pairs(plan.layout)))

    def add(dq_NBKGTH: jax.Array, dkv: tuple, keys: Keys, pairs: list[jax.Array]) -> tuple[jax.Array, tuple]:
        moved = _shift(plan, dkv)
        dq_NBKGTH, new = step(dq_NBKGTH, keys, _with(lots, pairs))
        return dq_NBKGTH, jax.tree.map(jnp.add, moved, new)

    def hop(carry: tuple, pairs: list[jax.Array]) -> tuple[tuple, None]:
        dq_NBKGTH, dkv, keys = carry
        return (*add(dq_NBKGTH, dkv, keys, pairs), _shift(plan, keys)), None

    if plan.layout.devices > 2:
        carry = (dq_NBKGTH, dkv, arriving)
        (dq_NBKGTH, dkv, arriving), _ = jax.lax.scan(hop, carry, [lot.pairs[:-1] for lot in lots])
    dq_NBKGTH, dkv = add(dq_NBKGTH, dkv, arriving, [lot.pairs[-1] for lot in lots])
    return dq_NBKGTH, _shift(plan, dkv)


def _with(lots: Sequence[_Lot], pairs: Sequence[jax.Array]) -> list[_Lot]:
    """The lots with other pairs: those of one hop."""
    return [lot._replace(pairs=part) for lot, part in zip(lots, pairs, strict=True)]


def _shift(plan: _Plan, tree):
    """From every device to the next on the ring."""
    devices = plan.layout.devices
    ring = tuple((i, (i + 1) % devices) for i in range(devices))
    return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axis, ring), tree)


# Blocks


def _to_blocks(plan: _Plan, q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array,
               segments_BT: jax.Array | None) -> tuple[Queries, Keys]:
    layout = plan.layout
    if plan.splash:
        q_BTKGH = (q_BTKGH * plan.scale).astype(q_BTKGH.dtype)
    short = plan.splash and layout.chunk % layout.block
    if short and segments_BT is None:  # these kernels know what fills a block up by its document alone
        segments_BT = vary(jnp.zeros(k_BTKH.shape[:2], jnp.int32), varying_axes(k_BTKH))
    segments_NBT = None if segments_BT is None else _blocks(layout, segments_BT, -1 if short else 0)
    k_NBKSH, v_NBKSW = (_blocks(layout, x).transpose(0, 1, 3, 2, 4) for x in (k_BTKH, v_BTKW))
    return (Queries(_blocks(layout, q_BTKGH).transpose(0, 1, 3, 4, 2, 5), segments_NBT),
            Keys(k_NBKSH, v_NBKSW, segments_NBT))


def _blocks(layout: Layout, x_BT: jax.Array, fill: int = 0) -> jax.Array:
    """(B, T, ...) to (N, B, block, ...): each chunk is filled up to whole blocks."""
    batch, _, *rest = x_BT.shape
    x = x_BT.reshape(batch, 2, layout.chunk, *rest)
    short = layout.blocks * layout.block - layout.chunk
    if short:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, short), *[(0, 0)] * len(rest)], constant_values=fill)
    x = x.reshape(batch, 2 * layout.blocks, layout.block, *rest)
    return jnp.moveaxis(x, 1, 0)


def _from_blocks(layout: Layout, x_NBT: jax.Array) -> jax.Array:
    """The inverse of `_blocks`."""
    _, batch, _, *rest = x_NBT.shape
    x = jnp.moveaxis(x_NBT, 0, 1).reshape(batch, 2, layout.blocks * layout.block, *rest)
    return x[:, :, : layout.chunk].reshape(batch, 2 * layout.chunk, *rest)
