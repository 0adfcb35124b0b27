"""One conversion table a family: its tensors, and what its config.json says about the architecture.

To add a family, add its tables here. A family differs from another by tables alone: tensor names (`Rule`s), the choices
of our vocabulary that it stands for, and the defaults that transformers gives to keys which its config.json leaves out.

Dims: D model width, V vocabulary, F feed-forward width, K key/value heads, G query heads of one, H head width.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from maxtext.config.architecture import LayerKind, ModelConfig
from maxtext.convert import ConvertError, rope
from maxtext.convert.mapping import Rule

_BLOCK = "model.layers.{layer}."

_ENDS = (
    Rule("model.embed_tokens.weight", "V D", "embed", "V D"),
    Rule("model.norm.weight", "D", "norm", "D"),
    Rule("lm_head.weight", "V D", "head", "D V"),
)
_PROJECTIONS = (
    Rule(_BLOCK + "self_attn.q_proj.weight", "(K G H) D", "attention.qkv", "D K :G H"),
    Rule(_BLOCK + "self_attn.k_proj.weight", "(K H) D", "attention.qkv", "D K -2 H"),
    Rule(_BLOCK + "self_attn.v_proj.weight", "(K H) D", "attention.qkv", "D K -1 H"),
    Rule(_BLOCK + "self_attn.o_proj.weight", "D (K G H)", "attention.out", "K G H D"),
    Rule(_BLOCK + "mlp.gate_proj.weight", "F D", "mlp.gate_up", "D 0 F"),
    Rule(_BLOCK + "mlp.up_proj.weight", "F D", "mlp.gate_up", "D 1 F"),
    Rule(_BLOCK + "mlp.down_proj.weight", "D F", "mlp.down", "F D"),
)
_QK_NORM = (
    Rule(_BLOCK + "self_attn.q_norm.weight", "(K G H)", "attention.q_norm", "K G H"),
    Rule(_BLOCK + "self_attn.k_norm.weight", "(K H)", "attention.k_norm", "K H"),
)
_POST_NORMS = (
    Rule(_BLOCK + "post_attention_layernorm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "post_feedforward_layernorm.weight", "D", "mlp_norm", "D"),
)
_PRE_NORMS = (
    Rule(_BLOCK + "input_layernorm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "post_attention_layernorm.weight", "D", "mlp_norm", "D"),
)

# config.json key -> our key, where the value is the same.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
# Settings that change the arithmetic in ways that these families' tables do not hold: only this value is accepted.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None,
         "clip_qkv": None, "partial_rotary_factor": 1.0}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
      name: its `model_type`.
      architecture: its class for causal language modelling.
      rules: its tensors.
      choices: fields of ModelConfig that the family fixes.
      defaults: what transformers (5.24) takes for keys that a config.json leaves out.
      pattern: the usual pattern of its layers, preferred when several explain the layers of a model.
      writes: keys of config.json with fixed values.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    choices: Mapping[str, Any]
    defaults: Mapping[str, Any]
    pattern: tuple[LayerKind, ...] = ("full",)
    writes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    @property
    def windows(self) -> bool:
        """Whether its layers may have windows; then config.json lists the kind of each layer."""
        return "window" in self.pattern

    def rules_of(self, model: ModelConfig) -> tuple[Rule, ...]:
        """The rules of one model: tied embeddings have no head of their own."""
        return tuple(rule for rule in self.rules if not (model.tie_embeddings and rule.leaf == "head"))

    def cannot_hold(self, model: ModelConfig) -> list[str]:
        """Why this family cannot stand for a model; empty when it can."""
        why = [f"model.{key} is {getattr(model, key)}, {self.name} has {value}" for key, value in self.choices.items()
               if getattr(model, key) != value]
        if any(window is not None for window in model.layer_windows) and not self.windows:
            why.append(f"{self.name} has no sliding windows")
        return why


_POST = {"norm_placement": "post", "qk_norm": "projection"}
_DEFAULTS = {"initializer_range": 0.02, "tie_word_embeddings": False}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="olmo2",
            architecture="Olmo2ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _POST_NORMS,
            choices=_POST,
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0},
            writes={"attention_bias": False, "attention_dropout": 0.0},
        ),
        Family(
            name="olmo3",
            architecture="Olmo3ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _POST_NORMS,
            choices=_POST,
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
            pattern=("window", "window", "window", "full"),
            writes={"attention_bias": False, "attention_dropout": 0.0},
        ),
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            rules=_ENDS + _PROJECTIONS + _PRE_NORMS,
            choices={"norm_placement": "pre", "qk_norm": "none"},
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
            writes={"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1},
        ),
    )
}

_KINDS: dict[str, LayerKind] = {"sliding_attention": "window", "full_attention": "full"}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names. Raises ConvertError when it is none of ours."""
    name = config.get("model_type")
    if name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f"; did it mean {near[0]}?" if near else ""
        raise ConvertError(f"{where}: model_type {name!r} has no conversion table{hint} Tables exist for "
                           f"{', '.join(FAMILIES)} (maxtext/convert/families.py)")
    return FAMILIES[name]


def family_for(model: ModelConfig, preferred: str | None = None) -> Family:
    """A family that stands for a model, the preferred one first. Raises ConvertError when there is none."""
    order = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)
    faults = {family.name: family.cannot_hold(model) for family in order}
    for family in order:
        if not faults[family.name]:
            return family
    raise ConvertError("no family of transformers stands for this model:\n" + "\n".join(
        f"  {name}: {'; '.join(why)}" for name, why in faults.items()))


def read_model(family: Family, config: Mapping[str, Any], where: str) -> ModelConfig:
    """The architecture that a config.json describes; ConvertError names every setting that we cannot honour."""
    known = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    missing = [key for key in _SIZES if known.get(key) is None]
    faults = [f"{key} is missing" for key in missing]
    faults += [f"{key} is {known[key]!r}; only {value!r} is supported" for key, value in _ONLY.items()
               if known.get(key, value) != value]
    faults += [f"{key} is {known[key]!r}; {family.name} has {value!r}" for key, value in family.writes.items()
               if key not in _ONLY and key not in ("attention_dropout", "pretraining_tp")
               and known.get(key, value) != value]
    theta, scaling = rope.read(known, family.windows, faults)
    kinds = [] if missing else _layer_kinds(family, known, faults)
    if "window" in kinds and config.get("sliding_window", 0) is None:
        faults.append("sliding_window is null, but layer_types has sliding_attention")
    if faults:
        raise ConvertError("\n  ".join([f"{where}: this model cannot be converted; nothing was written:", *faults]))
    pattern, last_full = _pattern(kinds, family.pattern)
    return ModelConfig(
        **{ours: known[theirs] for theirs, ours in _SIZES.items()},
        **family.choices,
        head_dim=known.get("head_dim"),
        layer_pattern=pattern,
        last_layer_full=last_full,
        window=int(known["sliding_window"]) if "window" in pattern else None,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _layer_kinds(family: Family, known: Mapping[str, Any], faults: list[str]) -> list[LayerKind]:
    """The kind of each layer; a family with windows whose config.json lists no kinds has its usual pattern."""
    layers = int(known["num_hidden_layers"])
    if not family.windows:
        return ["full"] * layers
    names = known.get("layer_types")
    if names is None:
        return [family.pattern[i % len(family.pattern)] for i in range(layers)]
    unknown = sorted(set(names) - set(_KINDS))
    if unknown or len(names) != layers:
        faults.append(f"layer_types has {len(names)} entries for {layers} layers" if not unknown else
                      f"layer_types has {', '.join(unknown)}; supported are {', '.join(_KINDS)}")
        return []
    return [_KINDS[name] for name in names]


def _pattern(kinds: list[LayerKind], usual: tuple[LayerKind, ...]) -> tuple[tuple[LayerKind, ...], bool]:
    """(layer_pattern, last_layer_full) that give these kinds: the usual pattern if it does, else the shortest."""
    last_full = kinds[-1] == "full"
    free = kinds[:-1] if last_full else kinds
    candidates = [usual, *(tuple(kinds[:n]) for n in range(1, len(kinds) + 1))]
    return next(pattern for pattern in candidates
                if all(kind == pattern[i % len(pattern)] for i, kind in enumerate(free))), last_full


def write_config(family: Family, model: ModelConfig, dtype: str, positions: int,
                 kept: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for a model.

    Args:
      dtype: of the tensors, in torch's words.
      positions: the longest sequence that the model is meant for.
      kept: keys that say nothing about the architecture, such as token ids; the others are all written anew.
    """
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    config |= {theirs: getattr(model, ours) for theirs, ours in _SIZES.items()}
    config |= {"num_key_value_heads": model.kv_heads, "hidden_act": "silu", "use_cache": True, "dtype": dtype,
               "max_position_embeddings": positions, **family.writes}
    if model.head_width * model.n_heads != model.d_model or family.name == "llama":
        config["head_dim"] = model.head_width
    if family.windows:
        names = {kind: name for name, kind in _KINDS.items()}
        config["layer_types"] = [names["full" if w is None else "window"] for w in model.layer_windows]
        config["sliding_window"] = model.window
    config["rope_parameters"] = rope.write(model, family.windows)
    return config | {key: value for key, value in kept.items() if key not in config}
