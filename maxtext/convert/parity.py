"""Is a checkpoint of ours the same model as a transformers folder? Both sides on the same tokens, number by number.

The other side is transformers itself where torch is installed, or a golden that it made earlier. A wrong mapping shows
as the first layer whose hidden states differ.

Dims: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh

from maxtext.config.schema import ModelConfig
from maxtext.convert import ConvertError
from maxtext.convert.families import family_for
from maxtext.convert.hf import Folder
from maxtext.convert.mapping import layer_places, places
from maxtext.convert.saved import Pieces, Saved
from maxtext.convert.trace import Trace
from maxtext.model.decoder import (
    Block,
    Context,
    Decoder,
    block_forward,
    embed,
    make_context,
    row_positions,
    without_capacity,
)
from maxtext.model.layers import rms_norm
from maxtext.parallel.mesh import AXES
from maxtext.parallel.sharding import sharding, spec

_TOKENS_AT_ONCE = 64  # float64 rows of the vocabulary that exist at one time


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest differences that still count as the same model; None: not limited.

    Attributes:
      max_logit: for logits up to LOGIT_SCALE in size, and in proportion beyond, as rounding is.
      mean_kl: KL divergence of our distribution from the reference's, in nats, mean over positions.
      top1: share of positions whose most likely token is also the reference's, or has the same logit there when the
        reference's logits are rounded to bfloat16.
      hidden: L2 norm of the difference over that of the reference, per layer.
    """

    max_logit: float | None
    mean_kl: float | None
    top1: float | None
    hidden: float


# float32: two implementations differ by rounding alone. bfloat16: published numbers of a port of OLMo 3 7B, and a
# hidden state that rounding cannot explain. The reference is computed in float32 in both cases, so that its own
# rounding to bfloat16, which is as large as ours, does not count as ours. docs/numerics.md has what is measured.
LOGIT_SCALE = 10.0
LIMITS = {
    "float32": Limits(max_logit=1e-4, mean_kl=None, top1=None, hidden=1e-4),
    "bfloat16": Limits(max_logit=None, mean_kl=1.5e-3, top1=0.9875, hidden=0.1),
}


# ---- our side


def ours(saved: Saved, tokens_BT: np.ndarray, dtype: str) -> Trace:
    """Runs a checkpoint of ours, layer by layer."""
    mesh = mesh_for(saved.cfg.model, len(tokens_BT))
    with jax.set_mesh(mesh):
        tokens = jax.device_put(np.asarray(tokens_BT, np.int32), sharding(mesh, "batch", None))
        return run_layers(saved.params(mesh), tokens, without_capacity(saved.cfg.model), jnp.dtype(dtype))


def mesh_for(model: ModelConfig, rows: int) -> Mesh:
    """As many devices as the model's width and the rows divide over."""
    ways = max(n for n in range(1, len(jax.devices()) + 1) if model.d_model % n == 0 and rows % n == 0)
    return Mesh(np.asarray(jax.devices()[:ways]).reshape([ways if axis == "fsdp" else 1 for axis in AXES]), AXES,
                axis_types=(AxisType.Explicit,) * len(AXES))


def run_layers(p: Decoder, tokens_BT: jax.Array, cfg: ModelConfig, dtype: jnp.dtype) -> Trace:
    """The model's forward pass with every layer's output kept, on the current mesh."""
    @jax.jit
    def start(p: Decoder, tokens_BT: jax.Array) -> tuple[jax.Array, Context]:
        return embed(p, tokens_BT, cfg, dtype), make_context(cfg, row_positions(tokens_BT.shape[1]))

    @jax.jit
    def finish(p: Decoder, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BTD = rms_norm(x_BTD, p.norm.astype(dtype), cfg)
        head_DV = jax.sharding.reshard(p.head_DV.astype(dtype), spec(None, "vocab"))
        # The sums stay float32: bfloat16 has steps of 1/8 between 16 and 32, so that the largest logit is often there
        # twice and the order of ids would decide. Training does round them (kernels/cross_entropy.py).
        return x_BTD, jnp.einsum("btd,dv->btv", x_BTD, head_DV, preferred_element_type=jnp.float32,
                                 out_sharding=spec("batch", None, "vocab"))

    x_BTD, context = start(p, tokens_BT)
    hidden = [_host(x_BTD)]
    for block, window in zip(blocks(p, cfg), cfg.layer_windows, strict=True):
        x_BTD = run_block(block, x_BTD, context, cfg, window)
        hidden.append(_host(x_BTD))
    x_BTD, logits_BTV = finish(p, x_BTD)
    hidden[-1] = _host(x_BTD)
    return Trace(np.asarray(tokens_BT), _host(logits_BTV), hidden)


@functools.partial(jax.jit, static_argnames=("cfg", "window"))
def run_block(p: Block, x_BTD: jax.Array, context: Context, cfg: ModelConfig, window: int | None) -> jax.Array:
    """One layer."""
    return block_forward(p, x_BTD, context, cfg, window)[0]


def blocks(p: Decoder, cfg: ModelConfig) -> Iterator[Block]:
    """The blocks in the order of the layers."""
    for name, repeat in layer_places(cfg):
        _, segment, position = name.split(".")
        yield _slice(p.segments[int(segment)][int(position)], repeat)


@jax.jit
def _slice(stacked: Block, repeat: int) -> Block:
    """One layer's arrays; `repeat` is traced, so that all layers share a compilation."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False), stacked)


def _host(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


# ---- comparison


def compare(a: Trace, b: Trace, limits: Limits) -> dict[str, Any]:
    """Numbers of our trace `a` against the reference `b`, and the list of limits that were passed."""
    if b.logits_BTV.shape[-1] > a.logits_BTV.shape[-1]:
        raise ConvertError(f"the reference has {b.logits_BTV.shape[-1]} logits, our model {a.logits_BTV.shape[-1]}")
    logits_BTV = a.logits_BTV[..., : b.logits_BTV.shape[-1]]  # an export may leave padded rows of the vocabulary out
    report: dict[str, Any] = {"rows": len(b.tokens_BT), "length": b.tokens_BT.shape[1]}
    report |= _logit_numbers(logits_BTV, b.logits_BTV, b.tokens_BT)
    report["layers"] = [] if a.hidden is None or b.hidden is None else _layer_numbers(a.hidden, b.hidden)
    diverging = [layer["name"] for layer in report["layers"] if not layer["relative"] <= limits.hidden]
    report["first_diverging_layer"] = diverging[0] if diverging else None
    report["failures"] = list(_failures(report, limits))
    return report


def _logit_numbers(ours_BTV: np.ndarray, theirs_BTV: np.ndarray, tokens_BT: np.ndarray) -> dict[str, float]:
    worst, total, kl, agree, near, nll, scored = 0.0, 0.0, [], 0, 0, [0.0, 0.0], 0
    vocabulary = theirs_BTV.shape[-1]
    for row in range(len(tokens_BT)):
        targets_T = np.append(tokens_BT[row, 1:], -1)
        for start in range(0, len(targets_T), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            x, y = ours_BTV[row, part].astype(np.float64), theirs_BTV[row, part].astype(np.float64)
            gap = np.abs(x - y)
            worst, total = float(np.maximum(worst, gap.max())), total + gap.sum()  # np.maximum keeps NaN
            agree += int((x.argmax(-1) == y.argmax(-1)).sum())
            near += int(_same_top(x, y).sum())
            log_x, log_y = _log_softmax(x), _log_softmax(y)
            kl.append((np.exp(log_y) * (log_y - log_x)).sum(-1))
            at = np.flatnonzero(targets_T[part] >= 0)
            for side, logs in enumerate((log_x, log_y)):
                nll[side] -= logs[at, targets_T[part][at]].sum()
            scored += len(at)
    kl_all = np.concatenate(kl)
    return {
        "max_logit_difference": worst,
        "mean_logit_difference": total / (tokens_BT.size * vocabulary),
        "mean_kl": float(kl_all.mean()),
        "max_kl": float(kl_all.max()),
        "top1_agreement": agree / tokens_BT.size,
        "top1_agreement_as_bfloat16": near / tokens_BT.size,
        "largest_logit": float(np.abs(theirs_BTV).max()),
        "nll_ours": nll[0] / scored,
        "nll_reference": nll[1] / scored,
    }


def _same_top(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether the most likely token of `x` is one of the most likely ones of `y`, whose logits bfloat16 tells apart."""
    top_x = np.take_along_axis(y, x.argmax(-1)[:, None], -1)[:, 0]
    return top_x.astype(ml_dtypes.bfloat16) == y.max(-1).astype(ml_dtypes.bfloat16)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _layer_numbers(a: list[np.ndarray], b: list[np.ndarray]) -> list[dict[str, Any]]:
    if len(a) != len(b) or a[0].shape != b[0].shape:
        raise ConvertError(f"our hidden states are {len(a)} of {a[0].shape}, the reference's {len(b)} of {b[0].shape}")
    rows = []
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        name = "embedding" if number == 0 else f"layer {number - 1}"
        gap = np.linalg.norm((x - y).astype(np.float64)) / max(np.linalg.norm(y.astype(np.float64)), 1e-30)
        rows.append({"name": name + (" and final norm" if number == len(b) - 1 else ""),
                     "max": float(np.abs(x - y).max()), "relative": float(gap)})
    return rows


def _failures(report: dict[str, Any], limits: Limits) -> Iterator[str]:
    """One line for each limit that is passed; a NaN passes every limit."""
    if limits.max_logit is not None:
        limit = limits.max_logit * max(1.0, report["largest_logit"] / LOGIT_SCALE)
        if not report["max_logit_difference"] < limit:
            yield (f"max |logit difference| {report['max_logit_difference']:.3g} is not below {limit:.3g} (logits "
                   f"reach {report['largest_logit']:.3g})")
    if limits.mean_kl is not None and not report["mean_kl"] <= limits.mean_kl:
        yield f"mean KL {report['mean_kl']:.3g} is above {limits.mean_kl:g}"
    if limits.top1 is not None and not report["top1_agreement_as_bfloat16"] >= limits.top1:
        yield (f"top-1 agreement {report['top1_agreement_as_bfloat16']:.4%} is below {limits.top1:.2%}, even where "
               "the reference's best logits are told apart by bfloat16 alone")
    if report["first_diverging_layer"] is not None:
        yield (f"hidden states first differ at {report['first_diverging_layer']}, by more than {limits.hidden:g} of "
               "their norm: look at the tensors of that layer")


def compare_weights(saved: Saved, folder: Folder) -> list[dict[str, Any]]:
    """Tensors that are not in the folder as an export would write them: name, largest difference, likely cause."""
    model = saved.cfg.model
    family = family_for(model, folder.config.get("model_type"))
    rows = int(folder.config.get("vocab_size", model.vocab_size))
    different: list[dict[str, Any]] = []
    stored = Pieces(saved)
    for place in places(family.rules, model).values():
        mine = place.to_theirs(stored.read(place.piece.leaf, place.piece.repeat))
        mine = mine[:rows] if place.piece.leaf in ("embed", "head") else mine
        if place.name not in folder.tensors:
            different.append({"name": place.name, "difference": math.inf, "note": "not in the folder"})
            continue
        theirs = folder.tensors[place.name].read()
        mine = mine.astype(theirs.dtype)
        if mine.shape != theirs.shape:
            different.append({"name": place.name, "difference": math.inf, "note": f"shape {list(theirs.shape)}"})
        elif not np.array_equal(mine, theirs):
            gap = float(np.abs(mine.astype(np.float32) - theirs.astype(np.float32)).max())
            turned = theirs.ndim == 2 and theirs.shape[0] == theirs.shape[1] and np.array_equal(mine, theirs.T)
            different.append({"name": place.name, "difference": gap, "note": "transposed" if turned else ""})
    return different


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    verdict = "passed" if not report["failures"] else "FAILED"
    lines = [f"# Parity report: {verdict}", "", f"{report['checkpoint']} against {report['reference']}, "
             f"{report['rows']} rows of {report['length']} tokens ({report['tokens']}), our side computed in "
             f"{report['dtype']}, the reference in float32.", ""]
    lines += [f"- {failure}" for failure in report["failures"]] + ([""] if report["failures"] else [])
    lines += ["| quantity | value |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {report[name]:.6g} |" for name in (
        "max_logit_difference", "mean_logit_difference", "mean_kl", "max_kl", "top1_agreement",
        "top1_agreement_as_bfloat16", "nll_ours", "nll_reference")]
    lines += ["", f"Weights that differ: {len(report['different_weights'])}" if report["weights_compared"] else
              "Weights were not compared: no transformers folder was given"]
    lines += [f"- {w['name']}: {w['difference']:.3g} {w['note']}".rstrip() for w in report["different_weights"][:50]]
    if report["blocks"]:
        lines += ["", f"First part that differs when fed with the reference's input: "
                  f"{report['first_wrong_block'] or 'none'}"]
        if report["first_wrong_block"]:
            lines.append(f"Likely cause: {report['likely_cause']}")
        elif report["failures"] and not report["different_weights"]:
            lines.append("Each part computes the same, so that what differs over the whole is rounding that adds up.")
        lines += ["", "| part | relative |", "|---|---|"]
        lines += [f"| {row['name']} | {row['relative']:.3g} |" for row in report["blocks"]]
    if report["layers"]:
        lines += ["", f"First layer that diverges: {report['first_diverging_layer'] or 'none'}", "",
                  "| hidden states after | max difference | relative |", "|---|---|---|"]
        lines += [f"| {row['name']} | {row['max']:.3g} | {row['relative']:.3g} |" for row in report["layers"]]
    return "\n".join(lines) + "\n"
