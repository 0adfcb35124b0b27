"""What a model remembers of each row, and the two passes that use it: over prompts, and over one new token of each.

A layer is computed by the functions that training computes it with; only the attention of a single new position is
another, as it reads a cache (kernels/cached_attention.py). Caches are stacked like the weights: a leading dim R of a
segment's repeats. They are read inside the scan over layers and written after it, in place.

A window layer keeps the newest min(window, S) positions. Latent attention keeps, instead of keys and values of all
heads, the compressed vector and the shared rotary key beside each other, and reads them in the absorbed form.

Dims: B batch, T position, S slots of a cache, D model width, R repeats, K key/value head, H width of a key, W of a
value, C of compressed keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from maxtext.config.architecture import ModelConfig
from maxtext.kernels.cached_attention import cached_attention, held_positions
from maxtext.model.attention import KEYS, QUERIES, SINKS, Attention, attend, project, project_out, score_scale
from maxtext.model.decoder import (
    Decoder,
    add_feed_forward,
    cast_block,
    embed,
    make_context,
    norm_in,
    norm_out,
    row_positions,
    segments,
    without_capacity,
)
from maxtext.model.latent import (
    LatentAttention,
    absorbed_queries,
    absorbed_values,
    compress,
    expand,
    latent_out,
    latent_queries,
)
from maxtext.model.layers import Rope, rms_norm, rope_tables
from maxtext.parallel.sharding import per_device

SHARED = ("batch", None, None, None)  # one key for all heads: every device of the tensor axis has it


@flax.struct.dataclass
class Kept:
    """What one layer keeps of positions; with a leading dim R, what the layers of one place in a pattern keep."""

    keys: jax.Array  # B S K H; latent attention: B S 1 C+R, whose first C are the values
    values: jax.Array | None  # B S K W


@flax.struct.dataclass
class Cache:
    segments: tuple[tuple[Kept, ...], ...]
    lengths_B: jax.Array  # positions of each row, int32


def cast_decoder(p: Decoder, dtype: jnp.dtype) -> Decoder:
    """All weights in the dtype of activations, routers excepted, so that no pass casts them again."""
    blocks = tuple(tuple(cast_block(block, dtype) for block in pattern) for pattern in p.segments)
    head = None if p.head is None else p.head.astype(dtype)
    return p.replace(embed=p.embed.astype(dtype), segments=blocks, norm=p.norm.astype(dtype), head=head)


def prefill(p: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int, cfg: ModelConfig,
            dtype: jnp.dtype) -> tuple[Cache, jax.Array]:
    """Reads prompts.

    Args:
      p: weights of any float dtype.
      tokens_BT: prompts from position 0 on, with anything after their end; T is at most `slots`.
      lengths_B: tokens of each, from 0 (a row that is none: its hidden state means nothing) to T.
      slots: most positions that a row will ever have.

    Returns:
      (cache, final hidden states at the last token of each prompt, (B, 1, D)).
    """
    context = make_context(cfg, row_positions(tokens_BT.shape[1]))
    real_BT = jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]

    def read(p: Any, x_BTD: jax.Array, window: int | None, _: None) -> tuple[jax.Array, Kept]:
        rope = context.full_rope if window is None else context.window_rope
        attended_BTD, kept = _attend_prompt(p, x_BTD, rope, window, cfg)
        size = slots if window is None else min(window, slots)
        return attended_BTD, _over_batch(functools.partial(_newest, slots=size), kept, lengths_B)

    nothing = tuple((None,) * len(segment.layers) for segment in segments(cfg))
    x_BTD, kept = _run_layers(p, embed(p, tokens_BT, cfg, dtype), real_BT, nothing, read, cfg)
    rows, row = ("batch", None, None), ("batch",)
    x_B1D = per_device(lambda x, lengths: _take(x, lengths[:, None] - 1), (rows, row), rows)(x_BTD, lengths_B)
    return Cache(kept, lengths_B), rms_norm(x_B1D, p.norm.astype(dtype), cfg)


def decode(p: Decoder, tokens_B: jax.Array, cache: Cache, cfg: ModelConfig, dtype: jnp.dtype,
           real_B: jax.Array | None = None) -> tuple[Cache, jax.Array]:
    """Reads one more token of each row.

    Args:
      cache: with room for it; it may be donated.
      real_B: False for rows whose result means nothing: their tokens use no expert. None: all count.

    Returns:
      (cache with the token, final hidden states at it, (B, 1, D)).
    """
    at_B1 = cache.lengths_B[:, None]
    ropes = {window: rope_tables(cfg, at_B1, window=window) for window in (True, False)}

    def read(p: Any, x_B1D: jax.Array, window: int | None, kept: Kept) -> tuple[jax.Array, Kept]:
        return _attend_token(p, x_B1D, ropes[window is not None], window, kept, cache.lengths_B, cfg)

    real_B1 = None if real_B is None else real_B[:, None]
    x_B1D, new = _run_layers(p, embed(p, tokens_B[:, None], cfg, dtype), real_B1, cache.segments, read, cfg)
    written = tuple(tuple(_over_batch(_written, old, cache.lengths_B, more, stacked=True)
                          for old, more in zip(*both, strict=True))
                    for both in zip(cache.segments, new, strict=True))
    return Cache(written, cache.lengths_B + 1), rms_norm(x_B1D, p.norm.astype(dtype), cfg)


def _run_layers(p: Decoder, x_BTD: jax.Array, real_BT: jax.Array | None, old: tuple, read: Callable[..., Any],
                cfg: ModelConfig) -> tuple[jax.Array, tuple[tuple[Kept, ...], ...]]:
    """All layers; `read` is attention from a layer's input, its window and its cache to (output, what is new)."""
    cfg, kept = without_capacity(cfg), []
    for segment, blocks, caches in zip(segments(cfg), p.segments, old, strict=True):

        def run_pattern(x_BTD: jax.Array, step: tuple, segment=segment) -> tuple[jax.Array, tuple[Kept, ...]]:
            found = []
            for layer, block, cache in zip(segment.layers, *step, strict=True):
                block = cast_block(block, x_BTD.dtype)
                attended_BTD, new = read(block.attention, norm_in(block, x_BTD, "attention", cfg), layer.window, cache)
                x_BTD = x_BTD + norm_out(block, attended_BTD, "attention", cfg)
                x_BTD, _ = add_feed_forward(block, x_BTD, cfg, real_BT)
                found.append(new)
            return x_BTD, tuple(found)

        x_BTD, new = jax.lax.scan(run_pattern, x_BTD, (blocks, caches))
        kept.append(new)
    return x_BTD, tuple(kept)


def _attend_prompt(p: Attention | LatentAttention, x_BTD: jax.Array, rope: Rope, window: int | None,
                   cfg: ModelConfig) -> tuple[jax.Array, Kept]:
    """Attention within prompts, as in training, and what to keep of all their positions."""
    if isinstance(p, Attention):
        q_BTKGH, k_BTKH, v_BTKH = project(p, x_BTD, rope, cfg)
        attended_BTKGH = attend(q_BTKGH, k_BTKH, v_BTKH, None, p.sinks, window, cfg)
        return project_out(p, attended_BTKGH), Kept(k_BTKH, v_BTKH)
    compressed = compress(p, x_BTD, rope, cfg)
    k_BTKH, v_BTKW = expand(p, *compressed, cfg)
    q_BTK1H = latent_queries(p, x_BTD, rope, cfg)[:, :, :, None]
    attended_BTK1W = attend(q_BTK1H, k_BTKH, v_BTKW, None, None, window, cfg)
    return latent_out(p, attended_BTK1W[:, :, :, 0]), _kept_of(*compressed)


def _attend_token(p: Attention | LatentAttention, x_B1D: jax.Array, rope: Rope, window: int | None, kept: Kept,
                  lengths_B: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Kept]:
    """Attention of a new position over the cache and itself, and what to keep of it."""
    kernel = functools.partial(cached_attention, window=window, scale=score_scale(cfg, window))
    if isinstance(p, Attention):
        q_B1KGH, k_B1KH, v_B1KH = project(p, x_B1D, rope, cfg)
        dims = (QUERIES, KEYS, KEYS, KEYS, KEYS, ("batch",), None if p.sinks is None else SINKS)
        run = per_device(kernel, dims, QUERIES)
        attended_B1KGH = run(q_B1KGH, kept.keys, kept.values, k_B1KH, v_B1KH, lengths_B, p.sinks)
        return project_out(p, attended_B1KGH), Kept(k_B1KH, v_B1KH)
    # Absorbed, all heads are the group of one key/value head: the compressed vectors.
    new, rank = _kept_of(*compress(p, x_B1D, rope, cfg)), p.kv_norm.shape[-1]
    q_B11KH = absorbed_queries(p, latent_queries(p, x_B1D, rope, cfg), cfg)[:, :, None]
    heads = ("batch", None, None, "heads", None)
    run = per_device(kernel, (heads, SHARED, SHARED, SHARED, SHARED, ("batch",)), heads)
    read_B11KC = run(q_B11KH, kept.keys, kept.keys[..., :rank], new.keys, new.keys[..., :rank], lengths_B)
    return latent_out(p, absorbed_values(p, read_B11KC[:, :, 0], cfg)), new


def _kept_of(c_BTC: jax.Array, r_BTR: jax.Array) -> Kept:
    return Kept(jnp.concatenate([c_BTC, r_BTR], axis=-1)[:, :, None], None)


def _over_batch(function: Callable[..., Kept], kept: Kept, lengths_B: jax.Array, *more: Kept,
                stacked: bool = False) -> Kept:
    """Runs `function(kept, lengths_B, *more)` on each device's own rows."""
    layer = KEYS if kept.values is not None else SHARED
    dims = ("layers", *layer) if stacked else layer
    tree = Kept(dims, None if kept.values is None else dims)
    return per_device(function, (tree, ("batch",), *(tree,) * len(more)), tree)(kept, lengths_B, *more)


def _newest(kept: Kept, lengths_B: jax.Array, slots: int) -> Kept:
    """A cache of `slots` out of all positions of prompts."""
    held_BS = held_positions(lengths_B, slots)
    return jax.tree.map(lambda x_BTKH: _take(x_BTKH, held_BS), kept)


def _take(x: jax.Array, positions_BS: jax.Array) -> jax.Array:
    """What stands at positions of each row; anything where a position is below 0."""
    index = jnp.maximum(positions_BS, 0).reshape(*positions_BS.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def _written(kept: Kept, lengths_B: jax.Array, new: Kept) -> Kept:
    """The caches (R, B, S, ...) with one new position of each row, (R, B, 1, ...)."""
    rows_B = jnp.arange(lengths_B.shape[0])
    return jax.tree.map(lambda x, one: x.at[:, rows_B, lengths_B % x.shape[2]].set(one[:, :, 0]), kept, new)
