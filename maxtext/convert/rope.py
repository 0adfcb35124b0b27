"""Rotary settings between config.json and ours: `rope_parameters` of transformers 5, and the older two keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxtext.config.architecture import ModelConfig, RopeScalingConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_NONE = RopeScalingConfig()


def yarn_factor(factor: float, slope: float) -> float:
    """0.1 slope ln(factor) + 1: with slope 1 what YaRN multiplies both rotary tables by (Peng et al. 2023, 3.4)."""
    return 0.1 * slope * math.log(factor) + 1.0


def read(known: Mapping[str, Any], by_layer_type: bool, on_scores: bool, windows: bool,
         faults: list[str]) -> dict[str, Any]:
    """rope_theta, window_rope_theta and rope_scaling.

    Older files have `rope_theta` and `rope_scaling`, and `rope_local_base_freq` for window layers. In a family with a
    table for each kind of layer those keep the plain table in window layers: that is how such files were made, though
    transformers 5.24 takes 500000 there for OLMo 3 in any case.

    Args:
      known: config.json with the family's defaults.
      by_layer_type: whether the family has a table for each kind of layer.
      on_scores: whether its attention multiplies the scores by mscale_all_dim's factor.
      windows: whether some layer has a window.
      faults: a line is added for everything that cannot be honoured.
    """
    given = known.get("rope_parameters") or {}
    plain = {"rope_type": "default", "rope_theta": known["rope_theta"]}
    if FULL in given or SLIDING in given:
        full = plain | (given.get(FULL) or {})
        sliding = plain | {"rope_theta": known.get("rope_local_base_freq", known["rope_theta"])} | (
            given.get(SLIDING) or {})
    else:
        full = plain | (known.get("rope_scaling") or {}) | given
        sliding = plain | {"rope_theta": known.get("rope_local_base_freq", full["rope_theta"])}
    if not by_layer_type:
        sliding = full
    scaling = _scaling(full, known, by_layer_type, on_scores, faults)
    if windows and _kind(sliding) != "default":
        if _scaling(sliding, known, by_layer_type, on_scores, []) != scaling:
            faults.append(f"rope_parameters.{SLIDING}: rope_type is {_kind(sliding)}; only default, or what full "
                          "layers have, is supported there")
        scaling = dataclasses.replace(scaling, window_layers=scaling.kind != "none")
    theta, local = float(full["rope_theta"]), float(sliding["rope_theta"])
    return {"rope_theta": theta, "window_rope_theta": local if windows and local != theta else None,
            "rope_scaling": scaling}


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("type", "default") if parameters.get("rope_type") in (None, "default") else (
        parameters["rope_type"])


def _scaling(given: Mapping[str, Any], known: Mapping[str, Any], by_layer_type: bool, on_scores: bool,
             faults: list[str]) -> RopeScalingConfig:
    kind = _kind(given)
    length = given.get("original_max_position_embeddings") or known.get("max_position_embeddings")
    needs: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": given.get("factor")},
        "llama3": {"factor": given.get("factor"), "low_freq_factor": given.get("low_freq_factor"),
                   "high_freq_factor": given.get("high_freq_factor"), "original_max_position_embeddings": length},
        "yarn": {"factor": given.get("factor"), "original_max_position_embeddings": length},
    }
    if kind not in needs:
        faults.append(f"rope_type {kind} is not supported; supported are {', '.join(needs)}")
        return _NONE
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        faults.append(f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; only 1.0")
    missing = [key for key, value in needs[kind].items() if value is None]
    if missing:
        faults.append(f"rope_type {kind} needs {' and '.join(missing)}")
        return _NONE
    if kind == "linear":
        return RopeScalingConfig(kind="linear", factor=float(given["factor"]))
    if kind == "llama3":
        return RopeScalingConfig(kind="llama3", factor=float(given["factor"]), original_length=int(length),
                                 beta_fast=float(given["high_freq_factor"]), beta_slow=float(given["low_freq_factor"]))
    return _yarn(given, int(length), by_layer_type, on_scores, faults) if kind == "yarn" else _NONE


def _yarn(given: Mapping[str, Any], length: int, by_layer_type: bool, on_scores: bool,
          faults: list[str]) -> RopeScalingConfig:
    factor, truncate = float(given["factor"]), given.get("truncate", True)
    slopes = (given.get("mscale"), given.get("mscale_all_dim"))
    if not truncate and by_layer_type:  # transformers looks for it outside the tables of the kinds, and finds nothing
        faults.append(f"yarn with truncate {truncate!r} is not supported in this family; only True")
    mscale, all_dim = 1.0, 0.0
    if on_scores and all(slopes):
        mscale, all_dim = map(float, slopes)
    elif slopes not in ((None, None), (1, None), (1, 0)):
        faults.append(f"yarn with mscale {slopes[0]} and mscale_all_dim {slopes[1]} is not supported; only "
                      f"{'both or ' if on_scores else ''}neither")
    wanted = yarn_factor(factor, mscale) / yarn_factor(factor, all_dim)
    if not math.isclose(given.get("attention_factor") or wanted, wanted, rel_tol=1e-6):
        faults.append(f"yarn with attention_factor {given['attention_factor']} is not supported; {wanted:.6f} follows "
                      f"from factor {factor:g}")
    return RopeScalingConfig(kind="yarn", factor=factor, original_length=length, mscale=mscale, mscale_all_dim=all_dim,
                             beta_fast=float(given.get("beta_fast") or 32),
                             beta_slow=float(given.get("beta_slow") or 1), truncate=bool(truncate))


def write(model: ModelConfig, by_layer_type: bool) -> dict[str, Any]:
    """`rope_parameters`, written for both kinds of layers where the family has both."""
    full = _write(model.rope_theta, model.rope_scaling)
    if not by_layer_type:
        return full
    local = model.window_rope_theta or model.rope_theta
    return {FULL: full, SLIDING: _write(local, model.rope_scaling if model.rope_scaling.window_layers else _NONE)}


def _write(theta: float, scaling: RopeScalingConfig) -> dict[str, Any]:
    if scaling.kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    found = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    found["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        return found | {"high_freq_factor": scaling.beta_fast, "low_freq_factor": scaling.beta_slow}
    found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    found |= {} if scaling.truncate else {"truncate": False}
    if scaling.mscale_all_dim:
        return found | {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return found | {"attention_factor": yarn_factor(scaling.factor, scaling.mscale)}
