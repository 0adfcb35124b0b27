"""config.json and our model section: what each key says in our words, read and written from one table.

A family lists `Setting`s. Whatever a config.json says beyond them that would change the arithmetic is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from maxtext.config.architecture import LatentConfig, LayerKind, ModelConfig, MoeConfig
from maxtext.convert import ConvertError, rope
from maxtext.convert.mapping import Rule

Known = Mapping[str, Any]  # config.json with the family's defaults
Said = dict[str, Any]  # fields of ModelConfig by dotted name
# Keys for which null is a value of its own; elsewhere it stands for the default.
_NULLABLE = ("q_lora_rank", "sliding_window", "num_key_value_heads", "head_dim")
# Settings that change the arithmetic in ways that no table holds: only this value is accepted.
_ONLY: Known = {"quantization_config": None, "clip_qkv": None, "partial_rotary_factor": 1.0, "mlp_bias": False,
                "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False}
_HINTS = {"quantization_config": "; dequantise the weights first and take it out"}
# Fields that say how a model is trained and nothing about what it computes.
_TRAINING = ("init_std", "moe.load_balance_loss", "moe.load_statistics", "moe.z_loss", "moe.bias_update_rate",
             "moe.capacity_factor")


class Unsupported(ValueError):
    """A setting that we cannot honour; the message names the key, its value, and what is supported."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Something that config.json says about the architecture.

    Attributes:
      read: from config.json, and the fields that earlier settings gave, to fields of ours; may raise Unsupported.
      write: from a model to keys of config.json. What there is no word for is left out: reading then shows it.
    """

    read: Callable[[Known, Said], Said]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
      name: its `model_type`.
      architecture: its class for causal language modelling.
      rules: its tensors.
      settings: the keys of its config.json.
      choices: fields of ModelConfig, by dotted name, that the family fixes.
      defaults: what transformers (5.24) takes for keys that a config.json leaves out.
      only: keys that are accepted with this value alone.
      writes: further keys of config.json, with fixed values.
      ignored: regular expressions of tensors that an import leaves out; {n_layers} is the number of layers.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    settings: tuple[Setting, ...]
    choices: Mapping[str, Any]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def ignored_of(self, model: ModelConfig) -> list[str]:
        return [pattern.replace("{n_layers}", str(model.n_layers)) for pattern in self.ignored]

    def cannot_hold(self, model: ModelConfig) -> list[str]:
        """Why this family cannot stand for a model; empty when it can.

        It can when the config.json that would be written is read as the same model.
        """
        mine = structure(model)
        why = [f"model.{field} is {mine.get(field)}, {self.name} has {value}" for field, value in self.choices.items()
               if field in mine and mine[field] != value]
        if why:
            return why
        try:
            theirs = structure(read_model(self, write_config(self, model, "float32", 1, {}), ""))
        except ConvertError as error:
            return [line.strip() for line in str(error).split("\n")[1:]]
        if mine["windows"] != theirs["windows"]:
            return [f"{self.name} has no sliding windows" if not any(theirs["windows"]) else
                    f"{self.name} cannot have windows on these layers alone"]
        return [f"model.{field} is {mine.get(field)}, {self.name} would have {theirs.get(field)}"
                for field in sorted(mine.keys() | theirs.keys()) if mine.get(field) != theirs.get(field)]


def structure(model: ModelConfig) -> dict[str, Any]:
    """What decides about the arithmetic, by dotted name: defaults filled in, what is not used left out."""
    found = _flat(model)
    for field in _TRAINING:
        del found[field]
    for field, value in {"windows": model.layer_windows, "head_dim": model.head_width, "n_kv_heads": model.kv_heads,
                         "window_rope_theta": model.window_rope_theta or model.rope_theta,
                         "attention_scale": round(model.attention_scale or model.head_width**-0.5, 12)}.items():
        found[field] = value
    unused = ["layer_pattern", "last_layer_full", "window"]
    unused += [] if model.moe.experts else [name for name in found if name.startswith("moe.")]
    unused += ["moe.group_top_k", "moe.group_score"] if model.moe.groups == 1 else []
    unused += [] if model.latent.kv_rank else [name for name in found if name.startswith("latent.")]
    if model.rope_scaling.kind == "none":
        unused += [name for name in found if name.startswith("rope_scaling.") and name != "rope_scaling.kind"]
    unused += [] if any(model.layer_windows) else ["window_rope_theta", "rope_scaling.window_layers"]
    return {field: value for field, value in found.items() if field not in unused}


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        found |= _flat(value, f"{field.name}.") if dataclasses.is_dataclass(value) else {prefix + field.name: value}
    return found


def read_model(family: Family, config: Mapping[str, Any], where: str) -> ModelConfig:
    """The architecture that a config.json describes; ConvertError names every setting that we cannot honour."""
    known = {**family.defaults, **{key: value for key, value in config.items()
                                   if value is not None or key in _NULLABLE}}
    faults = [f"{key} is {known[key]!r}; only {value!r} is supported{_HINTS.get(key, '')}"
              for key, value in {**_ONLY, **family.only}.items() if known.get(key, value) != value]
    said: Said = dict(family.choices)
    broken: list[str] = []
    for setting in family.settings:
        try:
            said |= setting.read(known, said)
        except Unsupported as fault:
            faults += fault.args
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            broken.append(f"a value is not of the type that it should be ({error})")
    for field, value in said.items() if not faults else ():
        try:
            fitting(f"model.{field}", value, field)
        except Unsupported as fault:
            faults += fault.args
    faults = faults or broken  # which may only follow from a fault that has a name
    if faults:
        raise ConvertError("\n  ".join([f"{where}: this model cannot be converted; nothing was written:",
                                        *dict.fromkeys(faults)]))
    sections = {"moe": MoeConfig, "latent": LatentConfig}
    inner = {name: kind(**{field.removeprefix(f"{name}."): value for field, value in said.items()
                           if field.startswith(f"{name}.")}) for name, kind in sections.items()}
    return ModelConfig(**{field: value for field, value in said.items() if "." not in field}, **inner)


def write_config(family: Family, model: ModelConfig, dtype: str, positions: int,
                 kept: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a model.

    Args:
      dtype: of the tensors, in torch's words.
      positions: the longest sequence that the model is meant for.
      kept: keys that say nothing about the architecture, such as token ids; the others are all written anew.
    """
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name, "use_cache": True,
                              "dtype": dtype, "max_position_embeddings": positions, **family.writes}
    for setting in family.settings:
        config |= setting.write(model)
    return config | {key: value for key, value in kept.items() if key not in config}


# ---- kinds of settings


def field_of(model: ModelConfig, field: str) -> Any:
    """The value of a field by its dotted name."""
    for name in field.split("."):
        model = getattr(model, name)
    return model


def needed(known: Known, key: str) -> Any:
    if known.get(key) is None:
        raise Unsupported(f"{key} is missing")
    return known[key]


def fitting(key: str, value: Any, field: str) -> Any:
    """A value that our field can hold; Unsupported names the key of one that it cannot."""
    section: Any = ModelConfig
    *outer, name = field.split(".")
    for one in outer:
        section = typing.get_type_hints(section)[one]
    kind = typing.get_type_hints(section)[name]
    kinds = typing.get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return None
    limits = next(f.metadata for f in dataclasses.fields(section) if f.name == name)
    for number, expected in ((bool, "true or false"), (int, "a whole number"), (float, "a number")):
        if number not in kinds:
            continue
        allowed = (int, float) if number is float else number
        if not isinstance(value, allowed) or (isinstance(value, bool) and number is not bool) or not (
                abs(value) < math.inf):
            raise Unsupported(f"{key} is {value!r}; {expected} is needed")
        if not value >= (limits["minimum"] if limits["minimum"] is not None else -math.inf):
            raise Unsupported(f"{key} is {value!r}; at least {limits['minimum']} is needed")
        if not value > (limits["above"] if limits["above"] is not None else -math.inf):
            raise Unsupported(f"{key} is {value!r}; it must be above {limits['above']}")
    return value


def same(key: str, field: str, also: tuple[str, ...] = (), least: int | None = None) -> Setting:
    """A key with the same value as a field; `also` are other names of it, `least` the smallest value accepted."""
    def read(known: Known, said: Said) -> Said:
        value = next((known[name] for name in also if known.get(name) is not None), known.get(key))
        if value is None:
            raise Unsupported(f"{key} is missing")
        value = fitting(key, value, field)
        if least is not None and value < least:
            raise Unsupported(f"{key} is {value}; at least {least} is needed")
        return {field: value}

    return Setting(read, lambda model: {key: field_of(model, field)})


def words(key: str, field: str, meanings: Mapping[Any, Any]) -> Setting:
    """A key whose values have other names here."""
    ours = {meaning: word for word, meaning in meanings.items()}

    def read(known: Known, said: Said) -> Said:
        if known.get(key) not in meanings:
            raise Unsupported(f"{key} is {known.get(key)!r}; only {' or '.join(map(repr, meanings))} is supported")
        return {field: meanings[known[key]]}

    def write(model: ModelConfig) -> dict[str, Any]:
        value = field_of(model, field)
        return {key: ours[value]} if value in ours else {}

    return Setting(read, write)


def optional(key: str, field: str, written: Callable[[ModelConfig], Any]) -> Setting:
    """A key that may be null, as our field may; `written` gives the number that is written, None to leave it out."""
    def write(model: ModelConfig) -> dict[str, Any]:
        value = written(model)
        return {} if value is None else {key: value}

    return Setting(lambda known, said: {field: fitting(key, known.get(key), field)}, write)


def rotary(by_layer_type: bool = False, on_scores: bool = False) -> Setting:
    """Rotary base and scaling; to stand after the windows.

    Args:
      by_layer_type: the family has a table for each kind of layer; otherwise one for both.
      on_scores: its attention multiplies the scores by YaRN's mscale_all_dim (DeepSeek).
    """
    def read(known: Known, said: Said) -> Said:
        faults: list[str] = []
        found = rope.read(known, by_layer_type, on_scores, "window" in said.get("layer_pattern", ()), faults)
        if faults:
            raise Unsupported(*faults)
        return found

    return Setting(read, lambda model: {"rope_parameters": rope.write(model, by_layer_type)})


# ---- windows

_KINDS: dict[str, LayerKind] = {"sliding_attention": "window", "full_attention": "full"}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _windows(usual: tuple[LayerKind, ...], kinds_of: Callable[[Known, int], list[LayerKind]],
             write: Callable[[ModelConfig], dict[str, Any]]) -> Setting:
    def read(known: Known, said: Said) -> Said:
        kinds = kinds_of(known, int(needed(known, "num_hidden_layers")))
        if "window" not in kinds:
            return {"layer_pattern": ("full",), "last_layer_full": True, "window": None}
        if known.get("sliding_window") is None:
            raise Unsupported("sliding_window is null, but layer_types has sliding_attention")
        pattern, last_full = _pattern(kinds, usual)
        return {"layer_pattern": pattern, "last_layer_full": last_full,
                "window": fitting("sliding_window", known["sliding_window"], "window")}

    return Setting(read, write)


def _listed(known: Known, layers: int) -> list[LayerKind] | None:
    """The kinds in `layer_types`."""
    names = known.get("layer_types")
    if names is None:
        return None
    unknown = sorted(set(names) - set(_KINDS))
    if unknown:
        raise Unsupported(f"layer_types has {', '.join(unknown)}; supported are {', '.join(_KINDS)}")
    if len(names) != layers:
        raise Unsupported(f"layer_types has {len(names)} entries for {layers} layers")
    return [_KINDS[name] for name in names]


def _list(model: ModelConfig) -> dict[str, Any]:
    return {"layer_types": [_NAMES["full" if window is None else "window"] for window in model.layer_windows],
            "sliding_window": model.window}


def _pattern(kinds: list[LayerKind], usual: tuple[LayerKind, ...]) -> tuple[tuple[LayerKind, ...], bool]:
    """(layer_pattern, last_layer_full) that give these kinds: the usual pattern if it does, else the shortest."""
    last_full = kinds[-1] == "full"
    free = kinds[:-1] if last_full else kinds
    candidates = [usual, *(tuple(kinds[:n]) for n in range(1, len(kinds) + 1))]
    return next(pattern for pattern in candidates
                if all(kind == pattern[i % len(pattern)] for i, kind in enumerate(free))), last_full


NO_WINDOWS = _windows(("full",), lambda known, layers: ["full"] * layers, lambda model: {})


def listed_windows(every: int) -> Setting:
    """`layer_types`; where it is left out, every so many layers one is full, the last of them first."""
    def kinds(known: Known, layers: int) -> list[LayerKind]:
        step = int(known.get("sliding_window_pattern", every))
        return _listed(known, layers) or ["window" if (i + 1) % step else "full" for i in range(layers)]

    return _windows(("window",) * (every - 1) + ("full",), kinds, _list)


def windows_everywhere(switch: str | None = None) -> Setting:
    """All layers have windows, or none: where sliding_window is null, or the switch is off."""
    def kinds(known: Known, layers: int) -> list[LayerKind]:
        on = known.get("sliding_window") is not None and (switch is None or bool(known.get(switch)))
        return ["window" if on else "full"] * layers

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.window} | ({} if switch is None else {switch: model.window is not None})

    return _windows(("window",), kinds, write)


def _kinds_from_a_layer_on(known: Known, layers: int) -> list[LayerKind]:
    listed, on = _listed(known, layers), known.get("use_sliding_window") and known.get("sliding_window") is not None
    if listed is not None and "window" in listed and not on:
        raise Unsupported("layer_types has sliding_attention, but use_sliding_window is false or sliding_window null")
    return listed or ["window" if on and i >= known["max_window_layers"] else "full" for i in range(layers)]


# Qwen: windows are switched on, and then stand on the layers from max_window_layers on unless layer_types says more.
WINDOWS_FROM_A_LAYER_ON = _windows(("full",), _kinds_from_a_layer_on, lambda model: _list(model) | {
    "use_sliding_window": model.window is not None,
    "max_window_layers": next((i for i, window in enumerate(model.layer_windows) if window), model.n_layers)})
