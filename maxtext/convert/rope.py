"""Rotary settings between config.json and ours: `rope_parameters` of transformers 5, and the older two keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from maxtext.config.architecture import ModelConfig, RopeScalingConfig

FULL, SLIDING = "full_attention", "sliding_attention"
# Settings of YaRN that we have no counterpart for, with the only value (or absence) that means the same as ours.
_YARN_ONLY: dict[str, Any] = {"truncate": True, "mscale": None, "mscale_all_dim": None, "partial_rotary_factor": 1.0}


def attention_factor(factor: float) -> float:
    """What YaRN multiplies both rotary tables by (Peng et al. 2023, section 3.4)."""
    return 0.1 * math.log(factor) + 1.0


def read(known: Mapping[str, Any], by_layer_type: bool, faults: list[str]) -> tuple[float, RopeScalingConfig]:
    """Rotary base and scaling of the full-attention layers.

    Older files have `rope_theta` and `rope_scaling`. In a family with sliding layers those keep the plain table, whose
    base is the same: that is how such files were made, though transformers 5.24 takes 500000 there in any case.

    Args:
      known: config.json with the family's defaults.
      by_layer_type: whether the family has a table for each kind of layer.
      faults: a line is added for everything that cannot be honoured.
    """
    given = known.get("rope_parameters") or {}
    plain = {"rope_type": "default", "rope_theta": known["rope_theta"]}
    if FULL in given or SLIDING in given:
        full, sliding = (plain | (given.get(kind) or {}) for kind in (FULL, SLIDING))
    else:
        full = plain | (known.get("rope_scaling") or {}) | given
        sliding = plain | {"rope_theta": full["rope_theta"]}
    theta = float(full["rope_theta"])
    if by_layer_type:
        if _kind(sliding) != "default":
            faults.append(f"rope_parameters.{SLIDING}: rope_type is {_kind(sliding)}; only default is supported there")
        if float(sliding["rope_theta"]) != theta:
            faults.append(f"rope_parameters: rope_theta is {sliding['rope_theta']} in sliding layers and {theta} in "
                          "full ones; one base for both is supported")
    return theta, _scaling(full, known, faults)


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("type", "default") if parameters.get("rope_type") in (None, "default") else (
        parameters["rope_type"])


def _scaling(full: Mapping[str, Any], known: Mapping[str, Any], faults: list[str]) -> RopeScalingConfig:
    kind = _kind(full)
    if kind == "default":
        return RopeScalingConfig()
    if kind != "yarn":
        faults.append(f"rope_type {kind} is not supported; supported are default and yarn")
        return RopeScalingConfig()
    length = full.get("original_max_position_embeddings") or known.get("max_position_embeddings")
    if full.get("factor") is None or length is None:
        faults.append("rope_type yarn needs factor and original_max_position_embeddings")
        return RopeScalingConfig()
    faults += [f"yarn with {key} {full[key]!r} is not supported; only {value!r}" for key, value in _YARN_ONLY.items()
               if full.get(key, value) != value]
    factor = float(full["factor"])
    wanted = attention_factor(factor)
    if not math.isclose(full.get("attention_factor") or wanted, wanted, rel_tol=1e-6):
        faults.append(f"yarn with attention_factor {full['attention_factor']} is not supported; {wanted:.6f} follows "
                      f"from factor {factor:g}")
    return RopeScalingConfig(kind="yarn", factor=factor, original_length=int(length),
                             beta_fast=float(full.get("beta_fast") or 32), beta_slow=float(full.get("beta_slow") or 1))


def write(model: ModelConfig, by_layer_type: bool) -> dict[str, Any]:
    """`rope_parameters`, written for both kinds of layers where the family has both."""
    plain = {"rope_type": "default", "rope_theta": model.rope_theta}
    scaling, full = model.rope_scaling, plain
    if scaling.kind == "yarn":
        full = {
            "rope_type": "yarn",
            "rope_theta": model.rope_theta,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": attention_factor(scaling.factor),
        }
    return {FULL: full, SLIDING: plain} if by_layer_type else full
