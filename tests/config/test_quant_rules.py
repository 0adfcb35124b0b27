"""Rules of the section `quant`: each names both keys and both numbers; a configuration just inside each rule passes."""

import pytest

from maxtext.config.quant_rules import INT8_PRODUCTS
from maxtext.config.validate import mesh_problems, problems
from tests.config.test_validate import LATENT, changed

pytestmark = pytest.mark.one_pass

FITS = {"model__head_dim": 32, "data__sequence_length": 32}
MX = {**FITS, "quant__kind": "mxfp8"}
MOE = {"model__d_ff": None, "model__moe__experts": 8, "model__moe__d_expert": 64}
INT8 = {"quant__kind": "int8", "data__sequence_length": 32768}


@pytest.mark.parametrize(("change", "key", "message"), [
    ({"quant__stochastic_rounding": True}, "quant.stochastic_rounding",
     "quant.stochastic_rounding is set, but quant.kind is none; write quant.kind: int8, fp8 or mxfp8, or remove"),
    ({"quant__weight_gradients": False}, "quant.weight_gradients", "is set, but quant.kind is none"),
    ({"quant__parts": ("dense",)}, "quant.parts", "is set, but quant.kind is none"),
    ({"quant__kind": "fp8", "quant__parts": ()}, "quant.parts", "quant.parts names no part that this model has"),
    ({"quant__kind": "fp8", "quant__parts": ("experts",)}, "quant.parts", "write quant.kind: none, or quant.parts: [d"),
    ({"quant__kind": "fp8", "quant__parts": ("dense", "dense")}, "quant.parts", "dense is listed twice"),
    ({**MX, "model__d_model": 80}, "quant.kind",
     "quant.kind mxfp8 has blocks of 32, but model.d_model is 80 (80 = 32 x 2 + 16); set it to 64 or 96, or write "
     "quant.kind: fp8"),
    ({**MX, "model__d_ff": 100}, "quant.kind", "model.d_ff is 100"),
    ({**MX, "data__sequence_length": 40}, "quant.kind", "data.sequence_length is 40"),
    ({**MX, **MOE, "model__moe__d_expert": 16}, "quant.kind", "model.moe.d_expert is 16"),
    ({**MX, **MOE, "model__moe__d_expert": 16, "quant__parts": ("experts",)}, "quant.kind", "model.moe.d_expert is 16"),
    ({**INT8, "train__gradient_accumulation_steps": 1}, "quant.weight_gradients",
     f"surely holds {INT8_PRODUCTS:,} products, but a micro-batch has 262,144 tokens; set quant.weight_gradients: "
     "false, or train.gradient_accumulation_steps to 2 or more"),
])
def test_a_broken_rule_is_one_problem_that_names_keys_and_numbers(change, key, message):
    [(found_key, found)] = problems(changed(**change))
    assert found_key == key
    assert message in found


def test_the_widths_of_latent_attention_are_cut_into_blocks_too():
    cfg = changed(**MX | LATENT | {"model__head_dim": None}, model__latent__rope_dim=24, model__latent__value_dim=24)
    assert [message.split(" is ")[0].split("but ")[1] for _, message in problems(cfg)] == [
        "the width of a head's query", "the width of a head's value", "model.latent.kv_rank",
        "model.latent.kv_rank + rope_dim", "model.latent.nope_dim + value_dim"]


@pytest.mark.parametrize("change", [
    {"quant__kind": "fp8"}, {"quant__kind": "int8", "quant__parts": ("dense",)}, MX,
    {"quant__kind": "fp8", "quant__stochastic_rounding": True, "quant__weight_gradients": False},
    {**MX, "data__sequence_length": 40, "quant__weight_gradients": False},
    {**MX, **MOE, "model__moe__d_expert": 16, "quant__parts": ("dense",)},
    {**MX, **MOE, "model__head_dim": 8, "data__sequence_length": 40, "quant__parts": ("experts",)},
    {**INT8, "quant__weight_gradients": False}, {**INT8, "train__gradient_accumulation_steps": 2},
    {**INT8, "quant__kind": "fp8"},
])
def test_a_configuration_just_inside_the_rules_has_no_problem(change):
    assert problems(changed(**change)) == []


@pytest.mark.parametrize("change", [{}, {**MOE, "model__moe__d_expert": 96}])
def test_a_mesh_may_not_cut_a_block(change):
    """96 = 2 x 48: each device would end in half a block."""
    cfg = changed(**MX, **change, mesh__tensor=2)
    [(key, message)] = mesh_problems(cfg, 2)
    assert key == "mesh.tensor"
    name = "model.moe.d_expert" if change else "model.d_ff"
    assert f"{name} 96 / mesh.tensor 2 = 48 on a device, which blocks of 32 of quant.kind mxfp8" in message
    assert mesh_problems(changed(**MX, **change), 2) == []
    assert mesh_problems(changed(**{**MX, **change, "quant__kind": "fp8"}, mesh__tensor=2), 2) == []
