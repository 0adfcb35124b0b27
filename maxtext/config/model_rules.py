"""Rules between fields of the model section; `validate.py` collects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxtext.config.schema import Config
from maxtext.config.wording import Problem, default_of, division, either, multiples


def _heads(cfg: Config) -> Iterator[Problem]:
    model = cfg.model
    if model.latent.kv_rank is not None:  # then the heads have widths of their own
        return
    if model.head_dim is None and model.d_model % model.n_heads:
        yield "model.d_model", (f"model.d_model {model.d_model} is not divisible by model.n_heads {model.n_heads} "
                                f"{division(model.d_model, model.n_heads)}; set model.d_model to "
                                f"{multiples(model.d_model, model.n_heads)}, or give model.head_dim")
    elif model.head_width % 2:
        origin = ("" if model.head_dim is not None else
                  f" (model.d_model {model.d_model} / model.n_heads {model.n_heads})")
        yield "model.head_dim", (f"model.head_dim {model.head_width}{origin} is odd; rotary position embedding turns "
                                 "pairs of dimensions, so it must be even")


def _kv_heads(cfg: Config) -> Iterator[Problem]:
    model = cfg.model
    if model.n_kv_heads is not None and model.n_heads % model.n_kv_heads:
        yield "model.n_kv_heads", (
            f"model.n_heads {model.n_heads} is not divisible by model.n_kv_heads {model.n_kv_heads} "
            f"{division(model.n_heads, model.n_kv_heads)}; each key/value head serves the same number of query heads")


def _window(cfg: Config) -> Iterator[Problem]:
    model = cfg.model
    if not model.layer_pattern:
        yield "model.layer_pattern", "an empty list; write at least one of window, full"
        return
    kinds = [model.layer_pattern[i % len(model.layer_pattern)] for i in range(model.n_layers)]
    if model.last_layer_full:
        kinds[-1] = "full"
    if "window" in kinds and model.window is None:
        yield "model.window", ("model.layer_pattern has window layers, but model.window is null; set model.window to "
                               "the number of tokens they see")
    if "window" not in kinds and model.window is not None:
        cause = (" (model.last_layer_full makes the only one full)" if "window" in model.layer_pattern[:model.n_layers]
                 else "")
        yield "model.window", (f"model.window {model.window} is set, but none of the {model.n_layers} layers of "
                               f"model.layer_pattern is a window layer{cause}; add one or remove model.window")


def _feed_forward(cfg: Config) -> Iterator[Problem]:
    model, dense = cfg.model, cfg.model.routed_layers.count(False)
    if dense and model.d_ff is None:
        which = "every layer is" if dense == model.n_layers else f"the first {dense} layers are"
        yield "model.d_ff", f"model.d_ff is null, but {which} dense; give the hidden width of their feed-forward"
    if not dense and model.d_ff is not None:
        yield "model.d_ff", (f"model.d_ff {model.d_ff} is set, but all {model.n_layers} layers are mixtures of experts "
                             "(model.moe.d_expert is their width); remove it, or set model.moe.dense_layers")


def _moe(cfg: Config) -> Iterator[Problem]:
    moe, key = cfg.model.moe, "model.moe"
    if not moe.experts:
        yield from _unused(key, moe, "model.moe.experts is 0, so that every layer is dense")
        return
    if moe.d_expert is None:
        yield f"{key}.d_expert", f"{key}.experts is {moe.experts}, but {key}.d_expert is null; give the width of one"
    if moe.dense_layers >= cfg.model.n_layers:
        yield f"{key}.dense_layers", (f"{key}.dense_layers {moe.dense_layers} leaves no routed layer of "
                                      f"model.n_layers {cfg.model.n_layers}; lower it, or remove {key}.experts")
    if moe.top_k > moe.experts:
        yield f"{key}.top_k", (f"{key}.top_k {moe.top_k} is more than {key}.experts {moe.experts}; lower it, or add "
                               "experts")
    elif moe.experts % moe.groups:
        yield f"{key}.groups", (f"{key}.experts {moe.experts} is not divisible by {key}.groups {moe.groups} "
                                f"{division(moe.experts, moe.groups)}; set {key}.experts to "
                                f"{multiples(moe.experts, moe.groups)}, or change {key}.groups")
    elif moe.group_top_k > moe.groups:
        yield f"{key}.group_top_k", (f"{key}.group_top_k {moe.group_top_k} is more than {key}.groups {moe.groups}; "
                                     f"write at most {moe.groups}")
    elif moe.top_k > moe.experts // moe.groups * moe.group_top_k:
        yield f"{key}.top_k", (f"{key}.top_k {moe.top_k} is more than {key}.group_top_k {moe.group_top_k} groups of "
                               f"{moe.experts // moe.groups} experts hold; lower it, or raise {key}.group_top_k")
    elif moe.groups > 1 and moe.group_score == "top2_sum" and moe.experts == moe.groups:
        yield f"{key}.group_score", (f"{key}.group_score top2_sum needs two experts a group, but {key}.groups "
                                     f"{moe.groups} are as many as {key}.experts; write {key}.group_score: max")
    if moe.bias_update_rate and not moe.selection_bias:
        yield f"{key}.bias_update_rate", (f"{key}.bias_update_rate {moe.bias_update_rate} moves a bias that is not "
                                          f"there; set {key}.selection_bias: true")


def _latent(cfg: Config) -> Iterator[Problem]:
    model, latent = cfg.model, cfg.model.latent
    if latent.kv_rank is None:
        yield from _unused("model.latent", latent, "model.latent.kv_rank is null, so that attention is ordinary")
        return
    allowed: dict[str, Any] = {"head_dim": None, "qk_norm": "none", "attention_bias": "none", "attention_sinks": False}
    for name, value in allowed.items():
        if getattr(model, name) != value:
            yield f"model.{name}", (f"model.{name} is {getattr(model, name)}, which latent attention does not have; "
                                    f"write model.{name}: {'null' if value is None else str(value).lower()}")
    if model.kv_heads != model.n_heads:
        yield "model.n_kv_heads", (f"model.n_kv_heads {model.kv_heads} differs from model.n_heads {model.n_heads}, but "
                                   "in latent attention each head has its own key; remove it")
    if latent.rope_dim % 2:
        yield "model.latent.rope_dim", (f"model.latent.rope_dim {latent.rope_dim} is odd; rotary position embedding "
                                        "turns pairs of dimensions, so it must be even")


_SCALING_READERS = {"mscale": ("yarn",), "mscale_all_dim": ("yarn",), "truncate": ("yarn",),
                    "beta_fast": ("yarn", "llama3"), "beta_slow": ("yarn", "llama3"),
                    "original_length": ("yarn", "llama3")}


def _rope(cfg: Config) -> Iterator[Problem]:
    model, scaling, key = cfg.model, cfg.model.rope_scaling, "model.rope_scaling"
    if scaling.kind == "none":
        yield from _unused(key, scaling, "model.rope_scaling.kind is none")
    else:
        for name, readers in _SCALING_READERS.items():
            if scaling.kind not in readers and getattr(scaling, name) != default_of(scaling, name):
                yield f"{key}.{name}", (f"{key}.{name} is read by kind {either(list(readers))} only, but the kind is "
                                        f"{scaling.kind}; remove it")
    if scaling.kind in ("yarn", "llama3") and scaling.beta_fast <= scaling.beta_slow:
        yield f"{key}.beta_fast", (f"{key}.beta_fast {scaling.beta_fast} must be above {key}.beta_slow "
                                   f"{scaling.beta_slow}; raise it, or lower {key}.beta_slow")
    if model.window is None and model.window_rope_theta is not None:
        yield "model.window_rope_theta", "model.window_rope_theta is set, but no layer has a window; remove it"
    if model.window is None and scaling.kind != "none" and scaling.window_layers:
        yield f"{key}.window_layers", f"{key}.window_layers is set, but no layer has a window; remove it"


def _unused(key: str, section: Any, why: str) -> Iterator[Problem]:
    """Settings of a section that is switched off."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value != field.default:
            yield f"{key}.{field.name}", (f"{key}.{field.name} {value} is set, but {why}; remove it, or write {key}: "
                                          "null for the defaults of the whole section")


MODEL_RULES: tuple[Callable[[Config], Iterable[Problem]], ...] = (
    _heads, _kv_heads, _window, _feed_forward, _moe, _latent, _rope)
