"""The decoder: read this first.

A model is a tree of arrays (`Decoder`) and pure functions. `decoder_params` is the one declaration of every array.
A stack of unlike layers is a tuple of *segments*; a segment is a short pattern of blocks repeated R times, its arrays
stacked on a leading dim and run by `lax.scan`. OLMo 3 7B is one segment: 8 x [window, window, window, full].

Dims: B batch, T position, D model width, V vocabulary, R repeats of a segment's pattern.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.schema import ModelConfig, RematConfig
from maxtext.model.attention import Attention, attention, attention_params
from maxtext.model.layers import Mlp, Rope, document_positions, mlp, mlp_params, rms_norm, rope_tables
from maxtext.parallel.sharding import Param, is_param, per_device, sharding, spec


@flax.struct.dataclass
class Block:
    attention: Attention
    attention_norm: jax.Array  # D
    mlp: Mlp
    mlp_norm: jax.Array  # D


@flax.struct.dataclass
class Decoder:
    embed: jax.Array  # V D
    segments: tuple[tuple[Block, ...], ...]  # every array has a leading dim R
    norm: jax.Array  # D
    head: jax.Array | None = None  # D V; None: the embedding table, transposed

    @property
    def head_DV(self) -> jax.Array:
        return self.embed.T if self.head is None else self.head


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` times a pattern of blocks, given by their windows (None: full attention)."""

    windows: tuple[int | None, ...]
    repeats: int


def segments(cfg: ModelConfig) -> tuple[Segment, ...]:
    """Splits the layers into as few repeated patterns as the declared `layer_pattern` allows."""
    windows, pattern = cfg.layer_windows, len(cfg.layer_pattern)
    repeats = 0
    while windows[repeats * pattern : (repeats + 1) * pattern] == windows[:pattern] and len(windows) >= pattern:
        repeats += 1
    found = [Segment(windows[:pattern], repeats)] if repeats else []
    rest = windows[repeats * pattern :]
    while rest:  # what the pattern leaves over: runs of equal layers
        run = next((i for i, window in enumerate(rest) if window != rest[0]), len(rest))
        found.append(Segment((rest[0],), run))
        rest = rest[run:]
    return tuple(found)


def decoder_params(cfg: ModelConfig) -> Decoder:
    """The declaration of every array of the model: a `Decoder` whose leaves are `Param`."""
    block = Block(
        attention=attention_params(cfg),
        attention_norm=Param((cfg.d_model,), (None,), init="ones"),
        mlp=mlp_params(cfg),
        mlp_norm=Param((cfg.d_model,), (None,), init="ones"),
    )

    def stacked(segment: Segment) -> tuple[Block, ...]:
        return (jax.tree.map(lambda p: p.stack(segment.repeats), block, is_leaf=is_param),) * len(segment.windows)

    return Decoder(
        embed=Param((cfg.vocab_size, cfg.d_model), ("vocab", "embed")),
        segments=tuple(stacked(segment) for segment in segments(cfg)),
        norm=Param((cfg.d_model,), (None,), init="ones"),
        head=None if cfg.tie_embeddings else Param((cfg.d_model, cfg.vocab_size), ("embed", "vocab")),
    )


def leaf_names(tree: Any) -> Any:
    """A tree of the same shape whose leaves are their own dotted names, such as `segments.0.2.mlp.down`."""
    def name(path: tuple, _: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name, tree, is_leaf=is_param)


def init_decoder(cfg: ModelConfig, key: jax.Array) -> Decoder:
    """Initial weights, float32, on the current mesh; the values do not depend on the mesh.

    Each array has a key of its own, derived from its name. "normal" is a normal of standard deviation `init_std` cut at
    +-3 of them and not rescaled, for every matrix, embeddings and head included; norm gains are 1
    (OLMo-core nn/transformer/init.py, `InitMethod.normal`).
    """

    declared = decoder_params(cfg)
    return jax.tree.map(lambda p, name: _draw(key, np.uint32(zlib.crc32(name.encode())), p, cfg.init_std), declared,
                        leaf_names(declared), is_leaf=is_param)


@functools.partial(jax.jit, static_argnames=("p", "std"))
def _draw(key: jax.Array, name: np.uint32, p: Param, std: float) -> jax.Array:
    """One array; a program of its own, so that arrays of one shape share a compilation."""
    if p.init == "ones":
        return jnp.ones(p.shape, jnp.float32, out_sharding=spec(*p.dims))
    own = jax.random.fold_in(key, name)
    return std * jax.random.truncated_normal(own, -3.0, 3.0, p.shape, out_sharding=spec(*p.dims))


def abstract_decoder(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> Decoder:
    """Shapes, dtypes and shardings of the weights; nothing is allocated."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=sharding(mesh, *p.dims)),
        decoder_params(cfg),
        is_leaf=is_param,
    )


class Context(NamedTuple):
    """What all blocks share for one batch."""

    segments_BT: jax.Array | None
    window_rope: Rope
    full_rope: Rope


def make_context(cfg: ModelConfig, tokens_BT: jax.Array, segments_BT: jax.Array | None) -> Context:
    """Positions count from the start of the row, or of each document when there are segments."""
    positions = jnp.arange(tokens_BT.shape[1])
    if segments_BT is not None:
        positions = per_device(document_positions, (("batch", None),), ("batch", None))(segments_BT)
    return Context(segments_BT, rope_tables(cfg, positions, scaled=False), rope_tables(cfg, positions, scaled=True))


def embed(p: Decoder, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding table, (B, T, D)."""
    table_VD = jax.sharding.reshard(p.embed.astype(dtype), spec(None, None))
    return table_VD.at[tokens_BT].get(out_sharding=spec("batch", None, None))


def block_forward(p: Block, x_BTD: jax.Array, context: Context, cfg: ModelConfig, window: int | None) -> jax.Array:
    """One layer: attention and feed-forward, each added to the residual stream.

    The norm of a branch stands on its input (Llama) or on its output ("reordered norm", OLMo 2, 2024).
    """
    p = jax.tree.map(lambda w: w.astype(x_BTD.dtype), p)
    rope = context.full_rope if window is None else context.window_rope

    def branch(function: Callable[[jax.Array], jax.Array], gain: jax.Array) -> jax.Array:
        if cfg.norm_placement == "pre":
            return function(rms_norm(x_BTD, gain, cfg.norm_eps))
        return rms_norm(function(x_BTD), gain, cfg.norm_eps)

    attend = functools.partial(attention, p.attention, segments_BT=context.segments_BT, rope=rope, window=window,
                               norm_eps=cfg.norm_eps)
    x_BTD = x_BTD + branch(attend, p.attention_norm)
    return x_BTD + branch(functools.partial(mlp, p.mlp), p.mlp_norm)


def decoder_forward(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, dtype: jnp.dtype, remat: RematConfig,
                    segments_BT: jax.Array | None = None) -> jax.Array:
    """Final hidden states, after the last norm: what the LM head multiplies.

    Args:
      p: float32 weights; they are cast to `dtype` where they are used, norm gains and embeddings included.
      tokens_BT: int32 ids.
      dtype: of activations and of the residual stream.
      remat: which activations of a block the backward pass keeps.
      segments_BT: int32 document of each token; attention and positions then stay within a document.

    Returns:
      (B, T, D) in `dtype`.
    """
    x_BTD, context = embed(p, tokens_BT, dtype), make_context(cfg, tokens_BT, segments_BT)
    run_block = _rematerialised(block_forward, remat)

    def run_pattern(segment: Segment, x_BTD: jax.Array, blocks: tuple[Block, ...]) -> tuple[jax.Array, None]:
        for window, block in zip(segment.windows, blocks, strict=True):
            x_BTD = run_block(block, x_BTD, context, cfg, window)
        return x_BTD, None

    for segment, blocks in zip(segments(cfg), p.segments, strict=True):
        if segment.repeats == 1:
            x_BTD, _ = run_pattern(segment, x_BTD, jax.tree.map(lambda w: w[0], blocks))
        else:
            x_BTD, _ = jax.lax.scan(functools.partial(run_pattern, segment), x_BTD, blocks)
    return rms_norm(x_BTD, p.norm.astype(dtype), cfg.norm_eps)


def _rematerialised(function: Callable[..., jax.Array], remat: RematConfig) -> Callable[..., jax.Array]:
    if remat.mode == "none":
        return function
    policy = jax.checkpoint_policies.save_only_these_names(*remat.save) if remat.mode == "names" else None
    return jax.checkpoint(function, policy=policy, static_argnums=(3, 4))
