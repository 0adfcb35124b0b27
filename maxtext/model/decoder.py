"""The decoder: read this first.

A model is a tree of arrays (`Decoder`) and pure functions. `decoder_params` is the one declaration of every array.
A stack of unlike layers is a tuple of *segments*; a segment is a short pattern of blocks repeated R times, its arrays
stacked on a leading dim and run by `lax.scan`. OLMo 3 7B is one segment: 8 x [window, window, window, full]; DeepSeek
V3 is two: 3 x [full] and 58 x [full, routed].

Dims: B batch, T position, D model width, V vocabulary, R repeats of a segment's pattern, L routed layers, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.layers import Layer, Segment, segments
from maxtext.config.schema import DEFAULT_EXECUTION, Execution, ModelConfig, RematConfig
from maxtext.model.attention import Attention, attention, attention_params
from maxtext.model.latent import LatentAttention, latent_attention, latent_params
from maxtext.model.layers import Mlp, Rope, document_positions, mlp, mlp_params, norm_param, rms_norm, rope_tables
from maxtext.model.moe import Moe, moe, moe_params
from maxtext.model.router import RouterStats
from maxtext.parallel.host_memory import HOST
from maxtext.parallel.isolated import make_alike
from maxtext.parallel.pipeline import run_pipeline, stages
from maxtext.parallel.positions import join, layout, positions_dim, share, split, unshare
from maxtext.parallel.sharding import Param, gather, is_param, per_device, sharding, spec
from maxtext.parallel.show import tree_text

FLOAT32_WEIGHTS = ("router", "router_bias", "selection_bias")  # of `Moe`: used in float32 whatever the compute dtype

Branch = Literal["attention", "mlp"]


@flax.struct.dataclass
class Block:
    attention: Attention | LatentAttention
    attention_norm: jax.Array  # D
    mlp: Mlp | Moe
    mlp_norm: jax.Array  # D
    attention_post_norm: jax.Array | None = None  # D: with norm placement `both`, where the two above are of the inputs
    mlp_post_norm: jax.Array | None = None  # D

    __repr__ = tree_text


@flax.struct.dataclass
class Decoder:
    embed: jax.Array  # V D
    segments: tuple[tuple[Block, ...], ...]  # every array has a leading dim R
    norm: jax.Array  # D
    head: jax.Array | None = None  # D V; None: the embedding table, transposed

    __repr__ = tree_text

    @property
    def head_DV(self) -> jax.Array:
        return self.embed.T if self.head is None else self.head


def decoder_params(cfg: ModelConfig) -> Decoder:
    """The declaration of every array of the model: a `Decoder` whose leaves are `Param`."""
    def stacked(segment: Segment) -> tuple[Block, ...]:
        blocks = tuple(block_params(cfg, layer) for layer in segment.layers)
        return jax.tree.map(lambda p: p.stack(segment.repeats), blocks, is_leaf=is_param)

    return Decoder(
        embed=Param((cfg.vocab_size, cfg.d_model), ("vocab", "embed")),
        segments=tuple(stacked(segment) for segment in segments(cfg)),
        norm=norm_param(cfg, (cfg.d_model,), (None,)),
        head=None if cfg.tie_embeddings else Param((cfg.d_model, cfg.vocab_size), ("embed", "vocab")),
    )


def block_params(cfg: ModelConfig, layer: Layer) -> Block:
    """The declaration of one layer."""
    norm, both = norm_param(cfg, (cfg.d_model,), (None,)), cfg.norm_placement == "both"
    return Block(
        attention=attention_params(cfg) if cfg.latent.kv_rank is None else latent_params(cfg),
        attention_norm=norm,
        mlp=moe_params(cfg) if layer.routed else mlp_params(cfg, cfg.d_ff or 0),
        mlp_norm=norm,
        attention_post_norm=norm if both else None,
        mlp_post_norm=norm if both else None,
    )


def leaf_names(tree: Any) -> Any:
    """A tree of the same shape whose leaves are their own dotted names, such as `segments.0.2.mlp.down`."""
    def name(path: tuple, _: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name, tree, is_leaf=is_param)


def init_decoder(cfg: ModelConfig, key: jax.Array, alike: bool = False) -> Decoder:
    """Initial weights, float32, on the current mesh; the values do not depend on the mesh.

    Their last bits may, as the shapes that devices draw decide which instructions do it. With `alike` they do not: each
    device draws every array whole, and keeps its part.

    Each array has a key of its own, derived from its name. "normal" is a normal of standard deviation `init_std` cut at
    +-3 of them and not rescaled, for every matrix, embeddings and head included; norm gains are 1 and biases 0
    (OLMo-core nn/transformer/init.py, `InitMethod.normal`).
    """
    declared = decoder_params(cfg)

    def draw(p: Param, name: str) -> jax.Array:
        return _draw(key, np.uint32(zlib.crc32(name.encode())), p, cfg.init_std, alike)

    return jax.tree.map(draw, declared, leaf_names(declared), is_leaf=is_param)


@functools.partial(jax.jit, static_argnames=("p", "std", "alike"))
def _draw(key: jax.Array, name: np.uint32, p: Param, std: float, alike: bool) -> jax.Array:
    """One array; a program of its own, so that arrays of one shape share a compilation."""
    if p.init != "normal":
        return jnp.full(p.shape, 1.0 if p.init == "ones" else 0.0, jnp.float32, out_sharding=spec(*p.dims))
    own = jax.random.fold_in(key, name)
    if jax.sharding.get_abstract_mesh().size > 1 and not alike:
        return std * jax.random.truncated_normal(own, -3.0, 3.0, p.shape, out_sharding=spec(*p.dims))
    # The same bits, which depend on the place in the flat array alone: the code that finds the place from five indices
    # takes a CPU five times as long to compile.
    size = math.prod(p.shape)
    if alike:
        runs = name.astype(jnp.float32) >= 0  # always
        flat = make_alike(lambda own: std * jax.random.truncated_normal(own, -3.0, 3.0, (size,)), runs, own)
    else:
        flat = std * jax.random.truncated_normal(own, -3.0, 3.0, (size,), out_sharding=spec(None))
    return jax.sharding.reshard(flat.reshape(p.shape), spec(*p.dims))


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
    real_BT: jax.Array | None
    window_rope: Rope
    full_rope: Rope


class Rows(NamedTuple):
    """What belongs to each token of a batch."""

    positions_BT: jax.Array | None  # in its own document; None: those of the whole row
    segments_BT: jax.Array | None
    real_BT: jax.Array | None


NO_ROWS = Rows(None, None, None)


def make_rows(segments_BT: jax.Array | None, real_BT: jax.Array | None, order_T: np.ndarray | None = None) -> Rows:
    """Positions count anew in each document; all is given in the order of positions, and laid out as `order_T` says."""
    positions_BT = None
    if segments_BT is not None:
        positions_BT = per_device(document_positions, (("batch", None),), ("batch", None))(segments_BT)
    return Rows(*(None if x_BT is None else split(x_BT, order_T) for x_BT in (positions_BT, segments_BT, real_BT)))


def row_positions(length: int, order_T: np.ndarray | None = None) -> jax.Array:
    """Positions of a row without documents, (T,), laid out as `order_T` says."""
    if order_T is None:
        return jnp.arange(length)
    return jax.sharding.reshard(jnp.asarray(order_T, jnp.int32), spec("sequence"))


def make_context(cfg: ModelConfig, positions_T: jax.Array, rows: Rows = NO_ROWS) -> Context:
    """What blocks share, from the positions of a row and what belongs to its tokens."""
    positions = positions_T if rows.positions_BT is None else rows.positions_BT
    return Context(rows.segments_BT, rows.real_BT, rope_tables(cfg, positions, window=True),
                   rope_tables(cfg, positions, window=False))


def embed(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding table, (B, T, D)."""
    table_VD = gather(p.embed.astype(dtype), "vocab", "embed", whole=("vocab", "embed"))
    x_BTD = table_VD.at[tokens_BT].get(out_sharding=spec("batch", positions_dim(tokens_BT), None))
    return x_BTD * jnp.asarray(cfg.d_model**0.5, dtype) if cfg.scale_embeddings else x_BTD


def block_forward(p: Block, x_BTD: jax.Array, context: Context, cfg: ModelConfig, window: int | None,
                  how: Execution = DEFAULT_EXECUTION, prior_E: jax.Array | None = None
                  ) -> tuple[jax.Array, RouterStats | None]:
    """One layer: attention and feed-forward, each added to the residual stream; and how its router chose, if any.

    The norm of a branch stands on its input (Llama), on its output ("reordered norm", OLMo 2, 2024) or on both
    (Gemma 3).

    Args:
      prior_E: experts' loads in the micro-batches before, for a load-balance loss over the whole batch.
    """
    p, rope = cast_block(p, x_BTD.dtype), context.full_rope if window is None else context.window_rope
    x_BTD = checkpoint_name(x_BTD, "block")

    def attend(x_BTD: jax.Array) -> jax.Array:
        attend = attention if isinstance(p.attention, Attention) else latent_attention
        return attend(p.attention, x_BTD, context.segments_BT, rope, window, cfg, how)

    x_BTD = x_BTD + norm_out(p, attend(norm_in(p, x_BTD, "attention", cfg)), "attention", cfg)
    return add_feed_forward(p, x_BTD, cfg, context.real_BT, prior_E, how)


def add_feed_forward(p: Block, x_BTD: jax.Array, cfg: ModelConfig, real_BT: jax.Array | None,
                     prior_E: jax.Array | None = None, how: Execution = DEFAULT_EXECUTION
                     ) -> tuple[jax.Array, RouterStats | None]:
    """The second half of a layer: its feed-forward, added to the residual stream."""
    in_BTD, stats = norm_in(p, x_BTD, "mlp", cfg), None
    if isinstance(p.mlp, Mlp):
        out_BTD = mlp(p.mlp, in_BTD, cfg.activation, how.quant.of("dense"))
    else:
        out_BTD, stats = moe(p.mlp, in_BTD, cfg, real_BT, prior_E, how)
    return x_BTD + norm_out(p, out_BTD, "mlp", cfg), stats


def cast_block(p: Block, dtype: jnp.dtype) -> Block:
    """Weights in the dtype of activations; the router stays in float32."""
    cast = jax.tree.map(lambda w: w.astype(dtype), p)
    if isinstance(p.mlp, Mlp):
        return cast
    return cast.replace(mlp=cast.mlp.replace(**{name: getattr(p.mlp, name) for name in FLOAT32_WEIGHTS}))


def norm_in(p: Block, x_BTD: jax.Array, branch: Branch, cfg: ModelConfig) -> jax.Array:
    """What a branch reads of the residual stream."""
    return x_BTD if cfg.norm_placement == "post" else rms_norm(x_BTD, getattr(p, f"{branch}_norm"), cfg)


def norm_out(p: Block, x_BTD: jax.Array, branch: Branch, cfg: ModelConfig) -> jax.Array:
    """What a branch adds to the residual stream."""
    if cfg.norm_placement == "pre":
        return x_BTD
    return rms_norm(x_BTD, getattr(p, f"{branch}_norm" if cfg.norm_placement == "post" else f"{branch}_post_norm"), cfg)


def decoder_forward(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, how: Execution,
                    segments_BT: jax.Array | None = None) -> jax.Array:
    """Final hidden states of `run_decoder` when nothing is trained, with positions in their own order."""
    x_BTD = run_decoder(p, tokens_BT, without_capacity(cfg), how, segments_BT)[0]
    return join(x_BTD, layout(tokens_BT.shape[1]))


def without_capacity(cfg: ModelConfig) -> ModelConfig:
    """The model when nothing is trained: no token is dropped for an expert's capacity."""
    return dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, capacity_factor=None))


def run_decoder(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, how: Execution,
                segments_BT: jax.Array | None = None, real_BT: jax.Array | None = None,
                prior_LE: jax.Array | None = None) -> tuple[jax.Array, RouterStats | None]:
    """Final hidden states, after the last norm: what the LM head multiplies; and how the routers chose.

    Args:
      p: float32 weights; they are cast where they are used, norm gains and embeddings included.
      tokens_BT: int32 ids.
      how: its `compute_dtype` is that of activations and of the residual stream.
      segments_BT: int32 document of each token; attention and positions then stay within a document.
      real_BT: False for padding, which routers do not count; None: there is none.
      prior_LE: load of each expert in the micro-batches before, float32.

    Returns:
      (B, T, D) in the compute dtype, positions in the order of `layout(T)`; and statistics with a leading dim of the L
      routed layers, None when there are none.
    """
    dtype, length = jnp.dtype(how.compute_dtype), tokens_BT.shape[1]
    order_T = layout(length)
    x_BTD = share(embed(p, split(tokens_BT, order_T), cfg, dtype))
    rows, positions_T = make_rows(segments_BT, real_BT, order_T), row_positions(length, order_T)
    collected, declared = [], decoder_params(cfg).segments
    priors = [None] * len(p.segments) if prior_LE is None else by_segment(prior_LE, cfg)
    for segment, blocks, params, prior in zip(segments(cfg), p.segments, declared, priors, strict=True):
        run = functools.partial(_run_segment, segment, cfg=cfg, how=how)
        if how.micro_batches > 1 and segment.repeats % (stages() * how.pipeline_rounds) == 0:
            dims = jax.tree.map(lambda param: param.dims[1:], params, is_leaf=is_param)
            x_BTD, stats = run_pipeline(run, blocks, dims, x_BTD, rows, positions_T, how.micro_batches,
                                        how.pipeline_rounds)
        else:
            x_BTD, stats = run(blocks, x_BTD, rows, positions_T, prior)
        collected += [_in_layer_order(stats)] if stats else []
    stats_L = jax.tree.map(lambda *parts: jnp.concatenate(parts), *collected) if collected else None
    return unshare(rms_norm(x_BTD, p.norm.astype(dtype), cfg)), stats_L


def _run_segment(segment: Segment, blocks: tuple[Block, ...], x_BTD: jax.Array, rows: Rows, positions_T: jax.Array,
                 prior_RPE: jax.Array | None = None, *, cfg: ModelConfig, how: Execution
                 ) -> tuple[jax.Array, list[RouterStats]]:
    """As many repeats of a segment's pattern as `blocks` hold; statistics of each routed place have a leading dim R."""
    context, run_block = make_context(cfg, positions_T, rows), rematerialised(block_forward, how.remat)

    def run_pattern(x_BTD: jax.Array, step: tuple) -> tuple[jax.Array, list[RouterStats]]:
        (blocks, prior_PE), stats = step, []
        for layer, block in zip(segment.layers, blocks, strict=True):
            prior_E = prior_PE[len(stats)] if layer.routed and prior_PE is not None else None
            x_BTD, found = run_block(block, x_BTD, context, cfg, layer.window, how, prior_E)
            stats += [] if found is None else [found]
        return x_BTD, stats

    steps = blocks, prior_RPE
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(run_pattern, x_BTD, steps)
    x_BTD, stats = run_pattern(x_BTD, jax.tree.map(lambda w: w[0], steps))
    return x_BTD, jax.tree.map(lambda s: s[None], stats)


def by_segment(x_LE: jax.Array, cfg: ModelConfig) -> list[jax.Array]:
    """Rows of the routed layers, as (R, routed layers of the pattern, E) of each segment."""
    found, layer = [], 0
    for segment in segments(cfg):
        shape = segment.repeats, sum(one.routed for one in segment.layers)
        found.append(x_LE[layer : layer + math.prod(shape)].reshape(*shape, x_LE.shape[-1]))
        layer += math.prod(shape)
    return found


def _in_layer_order(stats: list[RouterStats]) -> RouterStats:
    """Statistics of each place in a pattern, over its repeats, as those of the layers one after another."""
    return jax.tree.map(lambda *places: jnp.stack(places, 1).reshape(-1, *places[0].shape[1:]), *stats)


def rematerialised(function: Callable[..., Any], remat: RematConfig) -> Callable[..., Any]:
    if remat.mode == "none":
        return function
    policies, policy = jax.checkpoint_policies, None
    if remat.offloaded:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(remat.kept), names_which_can_be_offloaded=list(remat.offloaded),
            offload_src="device", offload_dst=HOST)
    elif remat.kept:
        policy = policies.save_only_these_names(*remat.kept)
    return jax.checkpoint(function, policy=policy, static_argnums=(3, 4, 5))
