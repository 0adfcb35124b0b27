"""config.json in and out: both spellings of rotary settings, and refusal of whatever would change the arithmetic."""

import json

import pytest

from maxtext.config.architecture import RopeScalingConfig
from maxtext.convert import ConvertError, rope
from maxtext.convert.families import FAMILIES, family_for, family_of, read_model, write_config
from tests.convert.folders import FAMILIES as FOLDERS
from tests.convert.folders import HF
from tests.tiny import tiny_model

BASE = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 5, "vocab_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
OURS = RopeScalingConfig(kind="yarn", factor=8.0, original_length=16)
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


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
])
def test_rotary_settings_of_both_ages(kind, keys, theta, scaling):
    model = model_of(kind, **keys)
    assert (model.rope_theta, model.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(("kind", "keys", "message"), [
    ("olmo3", {"attention_bias": True}, "attention_bias is True; only False"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True; only False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type linear is not supported"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic is not supported"),
    ("olmo3", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor 1.0 is not supported; 1.207944"),
    ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate False"),
    ("olmo3", {"rope_scaling": {**YARN, "factor": None}}, "needs factor"),
    ("olmo3", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, **YARN}}},
     "sliding layers|sliding_attention: rope_type is yarn"),
    ("olmo3", {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {"rope_theta": 1e4}}},
     "rope_theta is 10000.0 in sliding layers and 500000.0"),
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
    with pytest.raises(ConvertError, match=r"model_type 'olmo' has no conversion table; did it mean olmo[23]\?"):
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


def test_four_layers_of_olmo_3_have_the_tree_of_its_recipes():
    """window window window full could be three windows and a forced full layer too, which is another tree."""
    model = model_of("olmo3", num_hidden_layers=4, sliding_window=8)
    assert model.layer_pattern == (W, W, W, F)


@pytest.mark.parametrize(("model", "family"), [
    (tiny_model(), "olmo3"),
    (tiny_model(layer_pattern=("full",), window=None), "olmo2"),
    (tiny_model(layer_pattern=("full",), window=None, norm_placement="pre", qk_norm="none"), "llama"),
])
def test_the_family_of_a_model_follows_from_its_structure(model, family):
    assert family_for(model).name == family
    assert family_for(tiny_model(layer_pattern=("full",), window=None), "olmo3").name == "olmo3"


def test_a_model_that_no_family_has():
    with pytest.raises(ConvertError, match="llama: llama has no sliding windows") as error:
        family_for(tiny_model(norm_placement="pre", qk_norm="none"))
    assert "olmo3: model.norm_placement is pre, olmo3 has post; model.qk_norm is none" in str(error.value)


def test_both_kinds_of_layers_are_written():
    model = tiny_model(rope_scaling=OURS)
    written = rope.write(model, by_layer_type=True)
    assert written["sliding_attention"] == PLAIN
    assert written["full_attention"] == {**PLAIN, **YARN, "attention_factor": pytest.approx(1.2079441541679836)}
