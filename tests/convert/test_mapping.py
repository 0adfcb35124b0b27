"""The table engine: every entry of every array once, there and back."""

import dataclasses

import jax
import numpy as np
import pytest

from maxtext.config.architecture import LatentConfig, MoeConfig
from maxtext.convert import ConvertError, olmo_core
from maxtext.convert.families import FAMILIES
from maxtext.convert.mapping import Rule, assemble, check_tensors, layer_places, pieces, places
from maxtext.model.decoder import decoder_params, leaf_names
from maxtext.parallel.sharding import is_param
from tests.tiny import tiny_model

LLAMA = {"norm_placement": "pre", "qk_norm": "none"}
LATENT = {"n_kv_heads": None, "head_dim": None, "layer_pattern": ("full",), "window": None, **LLAMA}
DEEPSEEK = tiny_model(**LATENT, latent=LatentConfig(kv_rank=16, q_rank=20, nope_dim=6, rope_dim=4, value_dim=10),
                      moe=MoeConfig(experts=4, d_expert=12, shared_experts=1, dense_layers=1, selection_bias=True))
MODELS = [
    ("olmo3", tiny_model()),
    ("olmo3", tiny_model(n_layers=11)),
    ("olmo3", tiny_model(n_layers=8, layer_pattern=("window", "full"), last_layer_full=False)),
    ("olmo3", tiny_model(n_heads=4, n_kv_heads=4, head_dim=16)),
    ("olmo2", tiny_model(layer_pattern=("full",), window=None, n_kv_heads=1)),
    ("llama", tiny_model(layer_pattern=("full",), window=None, tie_embeddings=True, **LLAMA)),
    ("qwen3_moe", tiny_model(layer_pattern=("full",), window=None, norm_placement="pre", qk_norm="head",
                             moe=MoeConfig(experts=4, d_expert=12, dense_layers=2))),
    ("gpt_oss", tiny_model(layer_pattern=("window", "full"), last_layer_full=False, attention_sinks=True, d_ff=None,
                           attention_bias="all", activation="clamped_swish", **LLAMA,
                           moe=MoeConfig(experts=4, d_expert=12, router_bias=True, expert_bias=True))),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v2", tiny_model(**LATENT, latent=LatentConfig(kv_rank=16, nope_dim=6, rope_dim=4, value_dim=10),
                               moe=MoeConfig(experts=4, d_expert=12, shared_experts=2, dense_layers=1))),
    # Compressed queries as wide as the model: the two tables of queries are told apart by more than their sizes.
    ("deepseek_v2", tiny_model(**LATENT, latent=LatentConfig(kv_rank=16, q_rank=32),
                               moe=MoeConfig(experts=4, d_expert=12, shared_experts=2, dense_layers=1))),
]


@pytest.mark.parametrize(("family", "model"), MODELS)
def test_every_number_goes_to_one_place_and_back(family, model):
    found = places(FAMILIES[family].rules, model)
    count = sum(int(np.prod(place.shape)) for place in found.values())
    numbers = np.random.default_rng(0).permutation(count).astype(np.float32)  # all different, exact in float32
    tensors, start = {}, 0
    for name, place in found.items():
        size = int(np.prod(place.shape))
        tensors[name] = numbers[start : start + size].reshape(place.shape)
        start += size
    declared = decoder_params(model)
    shapes = dict(zip(jax.tree.leaves(leaf_names(declared)), jax.tree.leaves(declared, is_leaf=is_param), strict=True))
    arrays = {name: np.full(param.shape, np.nan, np.float32) for name, param in shapes.items()}
    for piece, parts in pieces(found.values()).items():
        arrays[piece.leaf][... if piece.repeat is None else piece.repeat] = assemble(piece, parts, tensors.__getitem__)
    np.testing.assert_array_equal(np.sort(np.concatenate([a.ravel() for a in arrays.values()])), np.arange(count))
    for name, place in found.items():
        piece = arrays[place.piece.leaf]
        piece = piece if place.piece.repeat is None else piece[place.piece.repeat]
        np.testing.assert_array_equal(place.to_theirs(piece), tensors[name])


def test_layers_are_counted_through_the_segments():
    """Five layers, [window window window full] and a forced full one: two segments."""
    assert layer_places(tiny_model()) == [("segments.0.0", 0), ("segments.0.1", 0), ("segments.0.2", 0),
                                          ("segments.0.3", 0), ("segments.1.0", 0)]
    assert layer_places(tiny_model(n_layers=8))[4:6] == [("segments.0.0", 1), ("segments.0.1", 1)]


def test_query_head_7_of_8_with_4_groups_is_the_second_of_the_last_group():
    model = tiny_model()  # 8 query heads of width 8, 4 key/value heads
    place = places(FAMILIES["olmo3"].rules, model)["model.layers.0.self_attn.q_proj.weight"]
    tensor = np.zeros((64, 32), np.float32)
    tensor[7 * 8 + 3, 5] = 1
    at = np.argwhere(place.to_ours(tensor))
    assert place.index == (slice(None), slice(None), slice(0, 2), slice(None))
    np.testing.assert_array_equal(at, [[5, 3, 1, 3]])


def _without(rules, name):
    return tuple(rule for rule in rules if name not in rule.name)


@pytest.mark.parametrize(("change", "message"), [
    (lambda rules: _without(rules, "k_proj"), "attention.qkv not exactly once"),
    (lambda rules: _without(rules, "model.norm"), "leaves arrays of the model out"),
    (lambda rules: (*rules, Rule("copy.{layer}", "(K H) D", "attention.qkv", "D K -1 H")), "not exactly once"),
    (lambda rules: (*rules, rules[0]), "two rules give model.embed_tokens"),
    (lambda rules: (*_without(rules, "model.norm"), Rule("model.norm.weight", "V", "norm", "V")), "norm"),
    (lambda rules: (*_without(rules, "model.norm"), Rule("model.norm.weight", "D V", "norm", "D")), "different dims"),
])
def test_a_wrong_table_is_a_fault_of_ours(change, message):
    model = tiny_model()
    with pytest.raises(AssertionError, match=message):
        places(change(FAMILIES["olmo3"].rules), model)


@pytest.mark.parametrize(("change", "message"), [
    (lambda rules: _without(rules, "experts.{expert}.up"), "mlp.gate_up not exactly once"),
    (lambda rules: _without(rules, "kv_b_proj"), "leaves arrays of the model out"),
    (lambda rules: (*_without(rules, "kv_b_proj"), Rule("b.{layer}", "(K N+R) C", "attention.kv_up", "C K N+R")),
     "attention.kv_up: 'C K N.R' is not"),
    (lambda rules: (*_without(rules, "mlp.gate.weight"), Rule("r.{layer}", "D", "mlp.router", "D E")), "E is in 'D E'"),
])
def test_a_wrong_table_of_experts_or_latents_is_a_fault_of_ours(change, message):
    with pytest.raises(AssertionError, match=message):
        places(change(FAMILIES["deepseek_v3"].rules), DEEPSEEK)


def test_an_expert_and_the_pair_of_gate_and_up_have_their_places():
    found = places(FAMILIES["deepseek_v3"].rules, DEEPSEEK)
    up = found["model.layers.3.mlp.experts.2.up_proj.weight"]
    assert (up.shape, up.piece.shape, up.piece.repeat) == ((12, 32), (4, 32, 2, 12), 2)
    assert up.index == (2, slice(None), 1, slice(None))
    assert found["model.layers.0.mlp.up_proj.weight"].piece.shape == (32, 2, 48)
    assert "model.layers.0.mlp.gate.weight" not in found
    fused = Rule("f.{layer}", "E D (X P)", "mlp.gate_up", "E D P X")
    others = _without(_without(FAMILIES["deepseek_v3"].rules, "{expert}.gate"), "{expert}.up")
    place = places((*others, fused), DEEPSEEK)["f.1"]
    tensor = np.arange(4 * 32 * 24).reshape(4, 32, 24)
    np.testing.assert_array_equal(place.to_ours(tensor)[:, :, 1], tensor[:, :, 1::2])


def test_both_tables_of_olmo_3_mean_the_same():
    """OLMo-core's names and those of transformers, from two tables: the same shapes in the same places."""
    model = tiny_model()
    two = [places(rules, model) for rules in (FAMILIES["olmo3"].rules, olmo_core.RULES)]
    same = [sorted((str(place.piece), str(place.index), place.shape, place.order) for place in found.values())
            for found in two]
    assert same[0] == same[1]


def test_faults_of_a_file_are_all_named():
    model = tiny_model()
    wanted = places(FAMILIES["olmo3"].rules, model)
    found = {name: place.shape for name, place in wanted.items()}
    del found["lm_head.weight"]
    found["model.layers.3.mlp.gate_project.weight"] = found.pop("model.layers.3.mlp.gate_proj.weight")
    found["model.layers.1.mlp.down_proj.weight"] = found["model.layers.1.mlp.down_proj.weight"][::-1]
    with pytest.raises(ConvertError) as error:
        check_tensors(wanted, found | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}, "here",
                      FAMILIES["olmo3"].ignored)
    text = str(error.value)
    assert "missing: lm_head.weight [96, 32]" in text
    assert "missing: model.layers.3.mlp.gate_proj.weight [48, 32] (nearest: model.layers.3.mlp.gate_project" in text
    assert "unknown: model.layers.3.mlp.gate_project.weight [48, 32] (nearest: model.layers.3.mlp.gate_proj.w" in text
    assert "shape: model.layers.1.mlp.down_proj.weight is [48, 32], the model needs [32, 48]; it looks trans" in text
    assert "inv_freq" not in text
    assert text.count("\n") == 4


def test_a_long_list_of_faults_is_cut():
    model = dataclasses.replace(tiny_model(), n_layers=20)
    with pytest.raises(ConvertError, match=r"\.\.\. and \d+ more"):
        check_tensors(places(FAMILIES["olmo3"].rules, model), {}, "here")
