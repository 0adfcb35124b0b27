"""Each part of our model fed with what transformers' own part was fed, so that the first wrong one is found by itself.

Parts are named as in transformers: the embedding, in each layer its norms, attention, feed-forward and the whole layer,
the final norm and the head. A part that disagrees is handed to `diagnosis`, which tries what may be wrong with it.

Dims: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.schema import ModelConfig
from maxtext.convert import ConvertError, diagnosis
from maxtext.convert.families import family_for
from maxtext.convert.mapping import Piece, Place, assemble, layer_places, pieces, places
from maxtext.convert.parity import Limits, blocks, mesh_for, run_block
from maxtext.convert.saved import Saved
from maxtext.convert.trace import EMBED, HEAD, LAYERS, NORM, Trace
from maxtext.model.attention import Attention, attention
from maxtext.model.decoder import (
    Block,
    Context,
    Decoder,
    cast_block,
    embed,
    leaf_names,
    make_context,
    row_positions,
    without_capacity,
)
from maxtext.model.latent import latent_attention
from maxtext.model.layers import Mlp, mlp
from maxtext.model.moe import moe
from maxtext.parallel.sharding import sharding

ATTENTION, FEED_FORWARD = "self_attn", ("mlp", "block_sparse_moe")  # the latter in transformers 4
NOT_REPLAYED: dict[str, Any] = {"blocks": [], "first_wrong_block": None, "likely_cause": None}
Tensors = Mapping[str, np.ndarray]  # of a layer, by their names in transformers


@dataclasses.dataclass(frozen=True)
class Side:
    """Our model on its mesh, and what the other side recorded."""

    params: Decoder
    model: ModelConfig
    trace: Trace
    context: Context
    dtype: jnp.dtype
    wanted: Mapping[str, Place]

    def recorded(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """What a part took in and gave out. Raises ConvertError when the trace does not have it."""
        if part not in self.trace.modules:
            raise ConvertError(f"the trace has no {part}; record it with transformers 5")
        return self.trace.modules[part]

    def given(self, part: str) -> jax.Array:
        """What a part took in, on our mesh."""
        x_BTD = self.recorded(part)[0]
        return jax.device_put(x_BTD.astype(self.dtype), sharding(jax.sharding.get_mesh(), "batch", None, None))


def replay(saved: Saved, trace: Trace, limits: Limits, dtype: str) -> dict[str, Any]:
    """Report fields: `blocks`, `first_wrong_block`, `likely_cause` (None when all agree).

    Raises ConvertError when the trace is of a model with other layers, or has no modules.
    """
    model = without_capacity(saved.cfg.model)
    if not trace.modules:
        raise ConvertError("this file has no modules' inputs and outputs; write one with: maxtext convert trace")
    _refuse_other_shape(model, trace)
    mesh = mesh_for(model, len(trace.tokens_BT))
    with jax.set_mesh(mesh):
        tokens_BT = jax.device_put(trace.tokens_BT, sharding(mesh, "batch", None))
        family = family_for(model, trace.config.get("model_type"))
        side = Side(saved.params(mesh), model, trace, _context(tokens_BT, model), jnp.dtype(dtype),
                    places(family.rules, model))
        rows: list[dict[str, Any]] = []
        wrong, cause = None, None
        for name, out, explain in _parts(side, tokens_BT, limits.hidden):
            gap = diagnosis.gap(out, trace.modules[name][1])
            rows.append({"name": name, "relative": gap})
            if wrong is None and not gap <= limits.hidden:
                wrong, cause = name, explain()
    return {"blocks": rows, "first_wrong_block": wrong, "likely_cause": cause}


def _refuse_other_shape(model: ModelConfig, trace: Trace) -> None:
    layers = 1 + max(int(name.split(".")[2]) for name in trace.modules if name.startswith(f"{LAYERS}."))
    width = trace.modules[NORM][1].shape[-1]
    if (layers, width) != (model.n_layers, model.d_model):
        raise ConvertError(f"the trace is of {layers} layers of width {width}, the checkpoint has {model.n_layers} of "
                           f"{model.d_model}")
    if trace.tokens_BT.max() >= model.vocab_size:
        raise ConvertError(f"the tokens reach {trace.tokens_BT.max()}, the vocabulary has {model.vocab_size} rows")


def _parts(side: Side, tokens_BT: jax.Array, limit: float) -> Iterator[tuple[str, np.ndarray, Any]]:
    """(name, our output, function that says what may be wrong) in the order of computing."""
    rows = side.trace.logits_BTV.shape[-1]
    p, modules = side.params, side.trace.modules
    out = _host(_embed(p, tokens_BT, side.model, side.dtype))
    yield EMBED, out, functools.partial(diagnosis.of_linear, out, modules[EMBED][1], limit)
    for layer, block in enumerate(blocks(p, side.model)):
        yield from _layer(side, layer, block, limit)
    yield from _norm(side, NORM, {NORM + ".weight": np.asarray(p.norm)}, limit)
    out = _host(jnp.einsum("btd,dv->btv", side.given(HEAD), p.head_DV.astype(side.dtype),
                           preferred_element_type=jnp.float32))[..., :rows]
    yield HEAD, out, functools.partial(diagnosis.of_linear, out, modules[HEAD][1], limit)


def _layer(side: Side, layer: int, block: Block, limit: float) -> Iterator[tuple[str, np.ndarray, Any]]:
    prefix, repeat = layer_places(side.model)[layer]
    own = {name: place for name, place in side.wanted.items()
           if place.piece.leaf.startswith(f"{prefix}.") and place.piece.repeat == repeat}
    arrays = dict(zip(jax.tree.leaves(leaf_names(block)), jax.tree.leaves(block), strict=True))
    window, name = side.model.layer_windows[layer], f"{LAYERS}.{layer}"
    norms = {place.piece.leaf.removeprefix(f"{prefix}."): place.name.removesuffix(".weight") for place in own.values()
             if "norm" in place.name}

    def tensors(only: Callable[[str], bool]) -> dict[str, np.ndarray]:
        return {key: place.to_theirs(np.asarray(arrays[place.piece.leaf.removeprefix(f"{prefix}.")]))
                for key, place in own.items() if only(key)}

    # Norms of theirs that this model does not have at all.
    absent = [module for module in side.trace.modules if module.startswith(f"{name}.")
              and "norm" in module.rpartition(".")[2] and module not in norms.values()]
    gains = tensors(lambda key: key.removesuffix(".weight") in norms.values())
    inner = [module for leaf, module in norms.items() if leaf.startswith("attention.")]

    def outer(branch: str, after: bool) -> list[str]:
        leaf = {("pre", False): "{}_norm", ("both", False): "{}_norm", ("both", True): "{}_post_norm",
                ("post", True): "{}_norm"}.get((side.model.norm_placement, after))
        return [] if leaf is None else [norms[leaf.format(branch)]]

    def branch(module: str, leaves: str) -> Iterator[tuple[str, np.ndarray, Any]]:
        part = f"{name}.{module}"
        forward = _run_attention if module == ATTENTION else _run_feed_forward

        def explain() -> str:
            if missing := [other for other in absent if other.startswith(f"{part}.")]:
                return f"theirs has {' and '.join(missing)}, which this model does not: a norm is missing"
            whole = tensors(lambda key: own[key].piece.leaf.startswith(f"{prefix}.{leaves}."))
            run = functools.partial(_run_edited, side, part, forward, block, prefix, own, whole, window)
            mine = {key: tensor for key, tensor in whole.items() if key not in gains}
            return diagnosis.of_branch(mine, own, run, side.model, side.trace.modules[part][1], limit)

        yield part, _host(forward(block, side.given(part), side.context, side.model, window)), explain

    for module in [*outer("attention", False), *inner]:
        yield from _norm(side, module, gains, limit)
    yield from branch(ATTENTION, "attention")
    for module in [*outer("attention", True), *outer("mlp", False)]:
        yield from _norm(side, module, gains, limit)
    yield from branch(next((m for m in FEED_FORWARD if f"{name}.{m}" in side.trace.modules), FEED_FORWARD[0]), "mlp")
    for module in outer("mlp", True):
        yield from _norm(side, module, gains, limit)
    out = _host(run_block(block, side.given(name), side.context, side.model, window))
    yield name, out, lambda: (
        f"theirs has {' and '.join(absent)}, which this model does not: a norm is missing" if absent else
        "each part of the layer agrees, but not the whole: look at where its norms stand (model.norm_placement) and at "
        "its residual connections")


def _norm(side: Side, module: str, gains: Tensors, limit: float) -> Iterator[tuple[str, np.ndarray, Any]]:
    given, theirs = side.recorded(module)
    weight = gains[module + ".weight"].astype(np.float64)
    offset = 1.0 if side.model.norm_gain == "one_plus_weight" else 0.0
    x = given.astype(np.float64)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + side.model.norm_eps)
    others = {name: gain for name, gain in gains.items() if name != module + ".weight"}
    yield module, (normed * (weight + offset)).astype(np.float32), functools.partial(
        diagnosis.of_norm, normed, weight, offset, theirs, given, others, limit)


# ---- our parts


def _run_edited(side: Side, part: str, forward: Callable[..., jax.Array], block: Block, prefix: str,
                own: Mapping[str, Place], tensors: Tensors, window: int | None, edited: Tensors,
                model: ModelConfig) -> np.ndarray:
    """Output of our attention or feed-forward with some tensors changed, perhaps under other settings."""
    if edited:
        changed = {**tensors, **edited}
        renewed = {_inside(piece, prefix): assemble(piece, parts, changed.__getitem__)
                   for piece, parts in pieces(own.values()).items() if any(place.name in edited for place in parts)}
        block = jax.tree.map(lambda name, old: jax.device_put(renewed[name], old.sharding) if name in renewed else old,
                             leaf_names(block), block)
    window = None if window is None else model.window
    tokens_BT = jax.device_put(side.trace.tokens_BT, sharding(jax.sharding.get_mesh(), "batch", None))
    context = side.context if model == side.model else _context(tokens_BT, model)
    return _host(forward(block, side.given(part), context, model, window))


def _inside(piece: Piece, prefix: str) -> str:
    return piece.leaf.removeprefix(f"{prefix}.")


@functools.partial(jax.jit, static_argnames="cfg")
def _context(tokens_BT: jax.Array, cfg: ModelConfig) -> Context:
    return make_context(cfg, row_positions(tokens_BT.shape[1]))


@functools.partial(jax.jit, static_argnames=("cfg", "dtype"))
def _embed(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, dtype: jnp.dtype) -> jax.Array:
    return embed(p, tokens_BT, cfg, dtype)


@functools.partial(jax.jit, static_argnames=("cfg", "window"))
def _run_attention(p: Block, x_BTD: jax.Array, context: Context, cfg: ModelConfig, window: int | None) -> jax.Array:
    p, rope = cast_block(p, x_BTD.dtype), context.full_rope if window is None else context.window_rope
    attend = attention if isinstance(p.attention, Attention) else latent_attention
    return attend(p.attention, x_BTD, None, rope, window, cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "window"))
def _run_feed_forward(p: Block, x_BTD: jax.Array, context: Context, cfg: ModelConfig,
                      window: int | None) -> jax.Array:
    p = cast_block(p, x_BTD.dtype)
    return mlp(p.mlp, x_BTD, cfg.activation) if isinstance(p.mlp, Mlp) else moe(p.mlp, x_BTD, cfg)[0]


def _host(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float32)
