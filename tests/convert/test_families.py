"""config.json in and out: both spellings of rotary settings, and refusal of whatever would change the arithmetic."""

import dataclasses
import json
from pathlib import Path

import pytest

from maxtext.config.architecture import LatentConfig, MoeConfig, RopeScalingConfig
from maxtext.config.load import load
from maxtext.convert import ConvertError, rope
from maxtext.convert.config_json import read_model, structure, write_config
from maxtext.convert.families import FAMILIES, family_for, family_of
from tests.convert.folders import FAMILIES as FOLDERS
from tests.convert.folders import HF
from tests.tiny import tiny_model

BASE = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 5, "vocab_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
OURS = RopeScalingConfig(kind="yarn", factor=8.0, original_length=16)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
# What the publishers' config.json say, by the name of our configs/models/*.yml.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 8,
            "first_k_dense_replace": 1, "kv_lora_rank": 16, "n_group": 4, "topk_group": 2}


def model_of(kind, **keys):
    return read_model(FAMILIES[kind], {**BASE, "model_type": kind, **keys}, "config.json")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_written_config_says_what_the_read_one_said(name):
    config = json.loads((HF / name / "config.json").read_text())
    family = family_of(config, "")
    model = read_model(family, config, "")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    written = write_config(family, model, "float32", config["max_position_embeddings"], ids)
    assert family_for(model).cannot_hold(model) == []
    assert read_model(family, written, "") == model
    del config["transformers_version"]
    for parameters in (config["rope_parameters"], *config["rope_parameters"].values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "yarn":
            parameters["attention_factor"] = pytest.approx(1.2079441541679836)
    assert written == config


@pytest.mark.parametrize(("kind", "keys", "theta", "scaling"), [
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": None}, 5e5, RopeScalingConfig()),
    ("olmo3", {"rope_theta": 1e4, "rope_scaling": YARN}, 1e4, OURS),
    ("olmo3", {"rope_theta": 5e5, "rope_scaling": {**YARN, "attention_factor": 1.2079441541679836}}, 5e5, OURS),
    ("olmo3", {"rope_parameters": {"full_attention": {**PLAIN, **YARN}, "sliding_attention": PLAIN}}, 5e5, OURS),
    ("olmo3", {}, 5e5, RopeScalingConfig()),
    ("olmo2", {}, 1e4, RopeScalingConfig()),
    ("olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}}, 2e5, RopeScalingConfig()),
    ("llama", {"rope_theta": 1e5, "rope_scaling": None}, 1e5, RopeScalingConfig()),
    ("llama", {"rope_theta": 1e5, "rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, 1e5, OURS),
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e5, "original_max_position_embeddings": None}}, 1e5,
     RopeScalingConfig(kind="yarn", factor=8.0, original_length=64)),
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5,
     RopeScalingConfig(kind="llama3", factor=8.0, original_length=16, beta_fast=4.0, beta_slow=1.0)),
    ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 2e5}}, 2e5, RopeScalingConfig(kind="linear", factor=4.0)),
    ("qwen2", {"rope_scaling": {**YARN, "truncate": False}}, 1e4,
     RopeScalingConfig(kind="yarn", factor=8.0, original_length=16, truncate=False)),
    ("deepseek_v3", {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}, 1e4,
     RopeScalingConfig(kind="yarn", factor=8.0, original_length=16, mscale=0.7, mscale_all_dim=0.5)),
    ("mistral", {"rope_scaling": YARN, "sliding_window": 8}, 1e4,
     RopeScalingConfig(kind="yarn", factor=8.0, original_length=16, window_layers=True)),
    ("mistral", {"rope_scaling": YARN, "sliding_window": None}, 1e4, OURS),
    ("gpt_oss", {"num_local_experts": 4}, 150000.0,
     RopeScalingConfig(kind="yarn", factor=32.0, original_length=4096, truncate=False, window_layers=True)),
    ("gemma3_text", {}, 1e6, RopeScalingConfig()),
    ("gemma3_text", {"rope_theta": 5e5, "rope_scaling": LINEAR}, 5e5, RopeScalingConfig(kind="linear", factor=4.0)),
    ("olmo3", {"rope_parameters": {"full_attention": {**PLAIN, **YARN}, "sliding_attention": {**PLAIN, **YARN}}}, 5e5,
     RopeScalingConfig(kind="yarn", factor=8.0, original_length=16, window_layers=True)),
])
def test_rotary_settings_of_both_ages(kind, keys, theta, scaling):
    model = model_of(kind, **keys)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(("kind", "keys", "theta"), [
    ("gemma3_text", {"sliding_window": 8}, 1e4),
    ("gemma3_text", {"rope_local_base_freq": 2e4}, 2e4),
    ("gemma3_text", {"rope_theta": 1e4}, None),
    ("gemma3_text", {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}, None),
    ("gemma3_text", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {"rope_theta": 3e4}}}, 3e4),
    ("olmo3", {"rope_theta": 1e4}, None),
    ("olmo3", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {"rope_theta": 1e4}}}, 1e4),
])
def test_window_layers_may_have_a_base_of_their_own(kind, keys, theta):
    model = model_of(kind, **keys)
    assert model.window_rope_theta == theta
    assert read_model(FAMILIES[kind], write_config(FAMILIES[kind], model, "float32", 64, {}), "") == model


@pytest.mark.parametrize(("kind", "keys", "message"), [
    ("llama", {"mlp_bias": True}, "mlp_bias is True; only False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "only None is supported; dequantise the weights first"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type longrope is not supported"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic is not supported"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
    ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "rope_type llama3 needs low_freq_factor"),
    ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}, "mscale_all_dim 0.7 is not supported"),
    ("llama", {"rope_scaling": {**PLAIN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("olmo3", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor 1.0 is not supported; 1.207944"),
    ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate False"),
    ("olmo3", {"rope_scaling": {**YARN, "factor": None}}, "needs factor"),
    ("olmo3", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, **YARN}}},
     "sliding layers|sliding_attention: rope_type is yarn"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 5}, "use_sliding_window is false or sliding_window null"),
    ("mistral", {"attention_bias": True}, "attention_bias is True; only False"),
    ("mistral", {"layer_types": ["full_attention"] * 5}, "layer_types is"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only None"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; only 'gelu_pytorch_tanh'"),
    ("olmoe", {**MOE, "clip_qkv": 8.0}, "clip_qkv is 8.0; only None"),
    ("olmoe", {**MOE, "num_experts": 0}, "num_experts is 0; at least 1"),
    ("mixtral", {"num_experts_per_tok": "absent", "intermediate_size": None}, "intermediate_size is missing"),
    ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}, "put dense layers after routed ones"),
    ("qwen3_moe", {**MOE, "mlp_only_layers": [0, 2]}, "put dense layers after routed ones"),
    ("deepseek_v2", {**DEEPSEEK, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ("deepseek_v2", {**DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob is True"),
    ("deepseek_v2", {**DEEPSEEK, "rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; only 1e-06"),
    ("deepseek_v2", {**DEEPSEEK, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ("deepseek_v3", {**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("deepseek_v3", {**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("deepseek_v3", {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 0.7}}, "only both or neither"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; only 7.0"),
    ("llama", {"num_attention_heads": "four"}, "num_attention_heads is 'four'; a whole number is needed"),
    ("llama", {"hidden_size": 24.0}, "hidden_size is 24.0; a whole number"),
    ("llama", {"num_hidden_layers": [2]}, r"num_hidden_layers is \[2\]; a whole number"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0; at least 1"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; true or false"),
    ("qwen3_moe", {**MOE, "decoder_sparse_step": 0}, "a value is not of the type"),
    ("llama", {"num_hidden_layers": float("inf")}, "num_hidden_layers is inf; a whole number"),
    ("llama", {"rope_theta": -1.0}, "model.rope_theta is -1.0; it must be above 0"),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 0}, "model.latent.q_rank is 0; at least 1"),
    ("llama", {"rope_theta": "high"}, "a value is not of the type that it should be .*'high'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0; at least 1"),
    ("olmoe", {**MOE, "num_experts": "8"}, "num_experts is '8'; a whole number"),
    ("olmo3", {"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 5 layers"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 5}, "layer_types has chunked_attention"),
    ("olmo3", {"sliding_window": None}, "sliding_window is null"),
    ("olmo3", {"num_hidden_layers": None, "hidden_size": None}, "num_hidden_layers is missing"),
])
def test_what_we_cannot_honour_is_named(kind, keys, message):
    with pytest.raises(ConvertError, match=message) as error:
        model_of(kind, **keys)
    assert "nothing was written" in str(error.value)


def test_all_faults_at_once():
    with pytest.raises(ConvertError) as error:
        model_of("llama", hidden_act="gelu", mlp_bias=True, vocab_size=None)
    assert str(error.value).count("\n") == 3


def test_an_unknown_family_names_the_tables_there_are():
    with pytest.raises(ConvertError, match=r"model_type 'olmo' has no conversion table; did it mean olmo[23e]\?"):
        family_of({"model_type": "olmo"}, "config.json")


W, F = "window", "full"


@pytest.mark.parametrize(("types", "pattern", "last"), [
    ("ssssf", (W,), True),
    ("sssff", (W, W, W, F), True),
    ("sssfs", (W, W, W, F), False),
    ("fffff", (F,), True),
    ("sssss", (W,), False),
    ("sfsfs", (W, F), False),
    ("fsfsf", (F, W), True),
    ("ffssf", (F, F, W, W), True),
])
def test_kinds_of_layers_become_the_usual_pattern_or_the_shortest(types, pattern, last):
    names = {"s": "sliding_attention", "f": "full_attention"}
    model = model_of("olmo3", layer_types=[names[t] for t in types], sliding_window=8)
    assert list(model.layer_windows) == [8 if t == "s" else None for t in types]
    assert (model.layer_pattern, model.last_layer_full) == (pattern, last)


@pytest.mark.parametrize(("kind", "keys", "windows"), [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}, "...88"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 5, "sliding_window": 8}, "....."),
    ("qwen3", {"max_window_layers": 0, "sliding_window": 8}, "....."),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, "....."),
    ("mistral", {"sliding_window": 8}, "88888"),
    ("mistral", {"sliding_window": None}, "....."),
    ("mixtral", {"num_local_experts": 4}, "....."),
    ("qwen3_moe", {**MOE, "use_sliding_window": True, "sliding_window": 8}, "88888"),
    ("qwen3_moe", {**MOE, "sliding_window": 8}, "....."),
    ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 8}, "88888.88"),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, "8.8.8"),
    ("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}, "8.8.8"),
    ("olmo3", {"sliding_window": 8}, "888.8"),
])
def test_layers_that_no_list_describes(kind, keys, windows):
    model = model_of(kind, **keys)
    assert "".join("." if window is None else str(window) for window in model.layer_windows) == windows
    assert family_for(model, kind).name == kind


def test_four_layers_of_olmo_3_have_the_tree_of_its_recipes():
    """window window window full could be three windows and a forced full layer too, which is another tree."""
    model = model_of("olmo3", num_hidden_layers=4, sliding_window=8)
    assert model.layer_pattern == (W, W, W, F)


# What tells a family from those before it in the table.
STRUCTURES = {
    "qwen2": {}, "qwen3": {"use_sliding_window": True, "max_window_layers": 3}, "mistral": {"sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 168, "rope_scaling": LINEAR}, "mixtral": {"num_local_experts": 4},
    "olmoe": MOE | {"num_attention_heads": 4}, "flex_olmo": MOE | {"num_attention_heads": 4},
    "qwen3_moe": MOE | {"mlp_only_layers": [0, 1]}, "deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False},
    "gpt_oss": {"num_local_experts": 4, "attention_bias": False},
}


@pytest.mark.parametrize(("model", "family"), [
    (tiny_model(), "olmo3"),
    (tiny_model(layer_pattern=("full",), window=None), "olmo2"),
    (tiny_model(layer_pattern=("full",), window=None, norm_placement="pre", qk_norm="none"), "llama"),
    *((model_of(kind, **keys), kind) for kind, keys in STRUCTURES.items()),
])
def test_the_family_of_a_model_follows_from_its_structure(model, family):
    assert family_for(model).name == family
    assert family_for(tiny_model(layer_pattern=("full",), window=None), "olmo3").name == "olmo3"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_ours(name, tmp_path):
    """As configs/models says, and back; of training alone a config.json says less."""
    family = family_of(PUBLISHED[name], "")
    model = read_model(family, PUBLISHED[name], "")
    run = tmp_path / "run.yml"
    run.write_text(f"base: [models/{name}]\ndata: {{prepared: x, sequence_length: 64}}\noptim: {{lr: 1e-3}}\n"
                   "train: {steps: 1, global_batch: 1}\n")
    assert structure(model) == structure(load(run).model)
    assert family.cannot_hold(model) == []
    written = write_config(family, model, "bfloat16", 64, {})
    assert structure(read_model(family, written, "")) == structure(model)


@pytest.mark.parametrize(("change", "reason"), [
    ({"attention_sinks": True}, "model.attention_sinks is True, llama would have False"),
    ({"attention_scale": 0.5}, "model.attention_scale is 0.5, llama would have 0.35355"),
    ({"norm_gain": "one_plus_weight"}, "model.norm_gain is one_plus_weight, llama would have weight"),
    ({"rope_pairs": "neighbours"}, "model.rope_pairs is neighbours"),
    ({"scale_embeddings": True}, "model.scale_embeddings"),
    ({"activation": "clamped_swish"}, "model.activation is clamped_swish, llama would have silu"),
    ({"attention_bias": "qkv"}, "model.attention_bias is qkv, llama would have none"),
    ({"rope_scaling": RopeScalingConfig(kind="yarn", mscale=0.7, mscale_all_dim=0.7)}, "mscale_all_dim 0.7 is not"),
    ({"d_ff": None, "moe": MoeConfig(experts=4, d_expert=8)}, "intermediate_size is missing"),
    ({"latent": LatentConfig(kv_rank=8), "n_kv_heads": None, "head_dim": None}, "model.latent.kv_rank is 8"),
    ({"layer_pattern": ("window",), "window": 4}, "llama has no sliding windows"),
])
def test_every_choice_that_a_family_lacks_is_a_reason(change, reason):
    model = tiny_model(**{"layer_pattern": ("full",), "window": None, "norm_placement": "pre", "qk_norm": "none",
                          **change})
    assert any(reason in why for why in FAMILIES["llama"].cannot_hold(model))


def test_what_only_trains_is_no_reason():
    model = model_of("mixtral", num_local_experts=4)
    moe = MoeConfig(**{**vars(model.moe), "load_balance_loss": 0.01, "z_loss": 0.001, "capacity_factor": 1.25})
    assert family_for(type(model)(**{**vars(model), "moe": moe})).name == "mixtral"


@pytest.mark.parametrize(("kind", "change"), [
    ("llama", {"rope_scaling": dataclasses.replace(OURS, window_layers=True)}),
    ("llama", {"rope_scaling": RopeScalingConfig(factor=3.0)}),
    ("llama", {"attention_scale": 8**-0.5}),
    ("mixtral", {"moe": MoeConfig(experts=4, d_expert=48, renormalise=True, group_score="max")}),
    ("llama", {"moe": MoeConfig(scale=2.0)}),
    ("llama", {"latent": LatentConfig(rope_dim=2)}),
])
def test_what_is_not_used_is_no_reason(kind, change):
    model = model_of(kind, **({"num_local_experts": 4} if kind == "mixtral" else {}))
    assert FAMILIES[kind].cannot_hold(dataclasses.replace(model, **change)) == []


def test_a_model_that_no_family_has():
    with pytest.raises(ConvertError, match="llama: llama has no sliding windows") as error:
        family_for(tiny_model(norm_placement="pre", qk_norm="none"))
    assert "olmo3: model.norm_placement is pre, olmo3 has post; model.qk_norm is none" in str(error.value)
    assert "mistral: mistral cannot have windows on these layers alone" in str(error.value)


def test_both_kinds_of_layers_are_written():
    model = tiny_model(rope_scaling=OURS)
    written = rope.write(model, by_layer_type=True)
    assert written["sliding_attention"] == PLAIN
    assert written["full_attention"] == {**PLAIN, **YARN, "attention_factor": pytest.approx(1.2079441541679836)}
