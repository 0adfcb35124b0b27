"""Every family against what transformers computed with a tiny model of it, part by part, and every bit back.

The traces are committed (tests/oracles/families); the weights behind them are drawn anew from their names.
"""

import dataclasses
import functools
import json

import numpy as np
import pytest

from maxtext.checkpoint import streamed
from maxtext.convert import hf, parity, replay, trace
from maxtext.convert.commands import run
from maxtext.convert.families import FAMILIES
from maxtext.convert.parity import LIMITS
from maxtext.convert.saved import open_saved
from tests.convert.folders import float32_tensors, raw_tensors, write_weights
from tests.convert.tiny_families import NAMES, trace_of, write_folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Gives the folder of a tiny model: `hf` as transformers wrote it, and `out`, imported by the command."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def folder(name):
        assert run(["import", str(write_folder(name, root / name / "hf")), str(root / name / "out")]) == 0
        return root / name

    return folder


def test_every_family_has_a_tiny_model():
    kinds = {trace.load(str(trace_of(name))).config["model_type"] for name in NAMES}
    assert kinds == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_hidden_states_and_every_part_are_those_of_transformers(imported, tmp_path, name):
    """The stated limit is 1e-4; what is left is rounding, so a tenth of it is asked for."""
    assert run(["verify", str(imported(name) / "out"), str(imported(name) / "hf"), "--trace", str(trace_of(name)),
                "--report", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["max_logit_difference"] < 1e-5
    assert max(layer["max"] for layer in report["layers"]) < 1e-5
    assert max(part["relative"] for part in report["blocks"]) < 1e-6
    assert {part["name"] for part in report["blocks"]} == set(trace.load(str(trace_of(name))).modules)
    assert (report["first_wrong_block"], report["different_weights"]) == (None, [])


@pytest.mark.parametrize("name", NAMES)
def test_export_and_import_are_inverse(imported, tmp_path, name):
    source, out = imported(name) / "hf", imported(name) / "out"
    assert run(["export", str(out), str(tmp_path / "hf")]) == 0
    assert raw_tensors(tmp_path / "hf") == raw_tensors(source)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == json.loads(
        (source / "config.json").read_text())["architectures"]
    assert run(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    first, second = (open_saved(str(path)) for path in (out, tmp_path / "again"))
    assert first.cfg.model == second.cfg.model
    assert {k: v.fingerprint for k, v in first.manifest.leaves.items()} == {
        k: v.fingerprint for k, v in second.manifest.leaves.items()}


def test_a_trained_capacity_drops_no_token_here(imported):
    saved, theirs = open_saved(str(imported("olmoe") / "out")), trace.load(str(trace_of("olmoe")))
    moe = dataclasses.replace(saved.cfg.model.moe, capacity_factor=0.1)
    cfg = dataclasses.replace(saved.cfg, model=dataclasses.replace(saved.cfg.model, moe=moe))
    limited = dataclasses.replace(saved, cfg=cfg)
    logits_BTV = parity.ours(limited, theirs.tokens_BT, "float32").logits_BTV
    np.testing.assert_allclose(logits_BTV, theirs.logits_BTV, atol=1e-5)
    assert replay.replay(limited, theirs, LIMITS["float32"], "float32")["first_wrong_block"] is None


def test_a_layer_that_predicts_further_tokens_is_left_out(imported, tmp_path, capsys):
    source = write_folder("deepseek_v3", tmp_path / "hf")
    tensors = float32_tensors(source)
    more = {name.replace("layers.1", "layers.2"): tensor for name, tensor in tensors.items() if "layers.1" in name}
    more["model.layers.2.eh_proj.weight"] = np.zeros((24, 48), np.float32)
    write_weights(source, tensors | more)
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    assert f"left out {len(more)} tensors that this model does not use: model.layers.2." in capsys.readouterr().out
    first, second = (open_saved(str(p)).manifest.leaves for p in (imported("deepseek_v3") / "out", tmp_path / "out"))
    assert {k: v.fingerprint for k, v in first.items()} == {k: v.fingerprint for k, v in second.items()}


# ---- a wrong mapping is found, in the first part that is wrong, with its cause


def faulty(tmp_path, name, change, config=None):
    """What the replay says of an import of a folder with changed tensors, or changed keys of config.json."""
    source = write_folder(name, tmp_path / "hf")
    tensors = float32_tensors(source)
    change(tensors)
    write_weights(source, tensors)
    keys = json.loads((source / "config.json").read_text()) | (config or {})
    (source / "config.json").write_text(json.dumps(keys))
    hf.import_folder(str(source), str(tmp_path / "out"), lambda text: None)
    saved, theirs = open_saved(str(tmp_path / "out")), trace.load(str(trace_of(name)))
    return replay.replay(saved, theirs, LIMITS["float32"], "float32")


LAYER = "model.layers.1."
ATTENTION, MLP = LAYER + "self_attn", LAYER + "mlp"


def of(pattern, function):
    """A change of all tensors of layer 1 with one of these words, separated by |, in their names."""
    def change(tensors):
        chosen = [name for name in tensors if name.startswith(LAYER) and any(w in name for w in pattern.split("|"))]
        assert chosen
        tensors.update({name: np.ascontiguousarray(function(tensors[name]), np.float32) for name in chosen})

    return change


def swapped(first, second):
    """Tensors of layer 1 with the first word in their names exchanged with those with the second."""
    def change(tensors):
        for name in [name for name in tensors if name.startswith(LAYER) and first in name]:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def heads(tensor):
    """Rows of 4 heads of 6, counted through the two key/value heads first."""
    return tensor.reshape(2, 2, 6, -1).swapaxes(0, 1).reshape(tensor.shape)


def to_neighbours(width):
    def change(tensor):
        rows = tensor.reshape(-1, 2, width // 2, *tensor.shape[1:])
        return rows.swapaxes(1, 2).reshape(tensor.shape)

    return change


def tail_to_neighbours(tensor, heads):
    """The last 4 rows of each head."""
    rows = tensor.reshape(heads, -1, tensor.shape[-1])
    return np.concatenate([rows[:, :-4], rows[:, -4:][:, [0, 2, 1, 3]]], 1).reshape(tensor.shape)


def latent_rows(tensors):
    of("q_b_proj", lambda t: tail_to_neighbours(t, 4))(tensors)
    of("kv_a_proj", lambda t: tail_to_neighbours(t, 1))(tensors)


def permuted(tensors):
    """Experts 1, 2 and 5 in a ring."""
    before = dict(tensors)
    for name in before:
        for place, expert in ((1, 2), (2, 5), (5, 1)):
            if f"{MLP}.experts.{place}." in name:
                tensors[name] = before[name.replace(f"experts.{place}.", f"experts.{expert}.")]


def nothing(tensors):
    pass


FAULTS = [
    ("llama", of("o_proj.weight", np.transpose), ATTENTION, "self_attn.o_proj.weight is transposed"),
    ("llama", of("q_proj.weight", np.transpose), ATTENTION, "self_attn.q_proj.weight is transposed"),
    ("llama", of("q_proj.weight|o_proj.weight", np.transpose), ATTENTION, "all square matrices are transposed"),
    ("llama", of("q_proj.weight", heads), ATTENTION, "self_attn.q_proj.weight: the order of its heads is wrong"),
    ("llama", of("o_proj.weight", lambda t: heads(t.T).T), ATTENTION, "o_proj.weight: the order of its heads is wrong"),
    ("llama", of("q_proj|k_proj", to_neighbours(6)), ATTENTION, "k_proj.bias: the order of its rotary rows is wrong"),
    ("llama", of("k_proj.weight", to_neighbours(6)), ATTENTION, "k_proj.weight: the order of its rotary rows is wrong"),
    ("llama", swapped("k_proj", "v_proj"), ATTENTION, "two tensors are swapped: self_attn.k_proj and self_attn.v_proj"),
    ("llama", of("o_proj.weight", lambda t: 3 * t), ATTENTION, "self_attn.o_proj.weight is 3 times theirs: scaled"),
    ("llama", of("k_proj", lambda t: t * np.float32(6**-0.5)), ATTENTION, "with model.attention_scale 1.0 it agrees"),
    ("llama", of("o_proj.bias", np.zeros_like), ATTENTION, "a bias is missing"),
    ("llama", of("down_proj", lambda t: t[::-1]), MLP, "no single edit that is known here explains it"),
    ("mixtral", of("k_proj", lambda t: 4 * t), ATTENTION,
     "self_attn.k_proj.weight is 4 times theirs: scaled (or model.attention_scale is not theirs)"),
    ("llama", swapped("gate_proj", "up_proj"), MLP, "gate and up are swapped: mlp.gate_proj and mlp.up_proj"),
    ("llama", of("down_proj", lambda t: t / 2), MLP, "mlp.down_proj.weight is 0.5 times theirs"),
    ("llama", of("input_layernorm", np.ones_like), LAYER + "input_layernorm", "the norm gain is missing"),
    ("llama", of("input_layernorm", lambda t: 2 * t), LAYER + "input_layernorm", "our gain is 2 times theirs"),
    ("llama", of("input_layernorm", lambda t: t[::-1]), LAYER + "input_layernorm", "the same gains in another order"),
    ("llama", of("input_layernorm", lambda t: t + 1), LAYER + "input_layernorm", "our gain is not theirs"),
    ("llama", swapped("input_layernorm", "post_attention_layernorm"), LAYER + "input_layernorm",
     "the gain that we have from model.layers.1.post_attention_layernorm.weight: swapped"),
    ("llama", lambda t: t.update({"model.norm.weight": t["model.norm.weight"] ** 2}), "model.norm", "is not theirs"),
    ("llama", lambda t: t.update({"lm_head.weight": 2 * t["lm_head.weight"]}), "lm_head", "ours is 2 times theirs"),
    ("llama", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), "lm_head", "are not theirs"),
    ("llama", lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"] / 4}),
     "model.embed_tokens", "ours is 0.25 times theirs"),
    ("olmoe", of("q_norm", np.ones_like), ATTENTION + ".q_norm", "the norm gain is missing"),
    ("olmoe", permuted, MLP, "the experts are permuted against their router: expert 1 is 5, 2 is 1, 5 is 2 of ours"),
    ("olmoe", swapped("gate_proj", "up_proj"), MLP, "gate and up are swapped: mlp.experts.*.gate_proj"),
    ("gpt_oss", of("experts.gate_up_proj", lambda t: t.reshape(*t.shape[:-1], 12, 2).swapaxes(-1, -2).reshape(t.shape)),
     MLP, "gate and up alternate in one of the two"),
    ("gpt_oss", of("experts.gate_up_proj", lambda t: t.reshape(*t.shape[:-1], 12, 2)[..., ::-1].reshape(t.shape)),
     MLP, "gate and up are swapped"),
    ("gpt_oss", of("mlp.experts", lambda t: t[[2, 0, 1, 3]]), MLP, "expert 0 is 1, 1 is 2, 2 is 0 of ours"),
    ("deepseek_v3", latent_rows, ATTENTION, "the order of its rotary rows is wrong"),
    ("deepseek_v3", of("q_a_layernorm", np.ones_like), ATTENTION + ".q_a_layernorm", "the norm gain is missing"),
    ("gemma3", of("norm", lambda t: t + 1), LAYER + "input_layernorm", "model.norm_gain weight"),
]


@pytest.mark.parametrize(("name", "change", "part", "cause"), FAULTS)
def test_a_wrong_mapping_is_named_with_its_cause(tmp_path, name, change, part, cause):
    report = faulty(tmp_path, name, change)
    assert report["first_wrong_block"] == part
    assert cause in report["likely_cause"]
    assert report["likely_cause"].count("are swapped") <= 1  # said once
    wrong = [row["name"] for row in report["blocks"] if not row["relative"] < 1e-4]
    assert not [row for row in wrong if row.startswith("model.layers.0")]  # fed with their input, the others agree


@pytest.mark.parametrize(("norm", "wrong"), [("self_attn.q_norm", "self_attn"), ("post_feedforward_layernorm", "")])
def test_a_norm_that_this_model_lacks_is_named(imported, norm, wrong):
    """As if the layer had one more norm: the part around it gives out something else, and every other part agrees."""
    saved, theirs = open_saved(str(imported("llama") / "out")), trace.load(str(trace_of("llama")))
    part = f"{LAYER}{wrong}".rstrip(".")
    given, out = theirs.modules[part]
    more = {part: (given, 2 * out), LAYER + norm: (given, given)}
    report = replay.replay(saved, dataclasses.replace(theirs, modules={**theirs.modules, **more}), LIMITS["float32"],
                           "float32")
    assert report["first_wrong_block"] == part
    assert report["likely_cause"] == f"theirs has {LAYER}{norm}, which this model does not: a norm is missing"


def test_parts_that_are_put_together_in_another_way(imported):
    saved, theirs = open_saved(str(imported("llama") / "out")), trace.load(str(trace_of("llama")))
    given, out = theirs.modules["model.layers.1"]
    modules = {**theirs.modules, "model.layers.1": (given, out - given)}
    report = replay.replay(saved, dataclasses.replace(theirs, modules=modules), LIMITS["float32"], "float32")
    assert report["first_wrong_block"] == "model.layers.1"
    assert "each part of the layer agrees, but not the whole" in report["likely_cause"]


@pytest.mark.parametrize(("name", "keys", "part", "cause"), [
    ("qwen2", {"sliding_window": 7}, ATTENTION, "with model.window 6 it agrees"),
    ("deepseek_v3", {"rope_interleave": False}, "model.layers.0.self_attn", "halves or neighbours, model.rope_pairs"),
    ("olmoe", {"norm_topk_prob": True}, "model.layers.0.mlp", "with model.moe.renormalise False it agrees"),
    ("mixtral", {"rope_parameters": {"rope_theta": 5e5}}, "model.layers.0.self_attn", "with model.rope_theta 1000000"),
    ("llama", {"rms_norm_eps": 0.5}, "model.layers.0.input_layernorm", "no gain explains it: look at model.norm_eps"),
])
def test_a_wrong_setting_is_named(tmp_path, name, keys, part, cause):
    report = faulty(tmp_path, name, nothing, keys)
    assert report["first_wrong_block"] == part
    assert cause in report["likely_cause"]


def test_the_report_names_the_part_and_the_cause(tmp_path, capsys):
    source = write_folder("llama", tmp_path / "hf")
    tensors = float32_tensors(source)
    swapped("gate_proj", "up_proj")(tensors)
    write_weights(source, tensors)
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    assert run(["verify", str(tmp_path / "out"), "--trace", str(trace_of("llama"))]) == 1
    page = (tmp_path / "out" / "parity.md").read_text()
    assert "First part that differs when fed with the reference's input: model.layers.1.mlp\nLikely cause: gate" in page
    assert "- the first part that differs when fed with the reference's input is model.layers.1.mlp: gate and" in page
    assert "Weights were not compared: no transformers folder was given" in page
    assert page in capsys.readouterr().out


def test_parts_that_all_agree_leave_only_rounding(imported, tmp_path):
    recorded = trace.load(str(trace_of("qwen3")))
    logits_BTV = recorded.logits_BTV + np.float32(2e-4)
    trace.save(str(tmp_path / "t.npz"), dataclasses.replace(recorded, logits_BTV=logits_BTV))
    assert run(["verify", str(imported("qwen3") / "out"), "--trace", str(tmp_path / "t.npz"), "--report",
                str(tmp_path)]) == 1
    page = (tmp_path / "parity.md").read_text()
    assert "input: none\nEach part computes the same, so that what differs over the whole is" in page


def test_traces_that_do_not_fit_are_refused(imported, tmp_path, capsys):
    np.savez(tmp_path / "golden.npz", input_ids=np.zeros((1, 4), np.int32), logits=np.zeros((1, 4, 64), np.float32))
    for options, message in (
        ([], "give the transformers folder, or a saved --trace or --golden of it"),
        (["--trace", str(tmp_path / "golden.npz")], "has no modules' inputs and outputs; write one with: maxtext conv"),
        (["--trace", str(trace_of("gemma3"))], "the trace is of 3 layers of width 24, the checkpoint has 2 of 24"),
    ):
        assert run(["verify", str(imported("qwen3") / "out"), *options]) == 2
        assert message in capsys.readouterr().err


def test_a_trace_is_saved_as_it_was_recorded(imported, tmp_path, capsys):
    """Under the very name that is given; and one that lacks a part is refused."""
    recorded = trace.load(str(trace_of("mixtral")))
    older = {name.replace(".mlp", ".block_sparse_moe"): arrays for name, arrays in recorded.modules.items()}
    for name, modules in (("same", recorded.modules), ("older", older),
                          ("less", {name: arrays for name, arrays in older.items() if not name.endswith("_attn")})):
        trace.save(str(tmp_path / name), dataclasses.replace(recorded, modules=modules))
        found = trace.load(str(tmp_path / name))
        assert found.config == recorded.config
        assert found.modules.keys() == modules.keys()
        for key, arrays in modules.items():
            assert all(np.array_equal(a, b) for a, b in zip(found.modules[key], arrays, strict=True))
    verify = ["verify", str(imported("mixtral") / "out"), "--report", str(tmp_path), "--trace"]
    assert run([*verify, str(tmp_path / "older")]) == 0  # transformers 4 calls it so
    assert run([*verify, str(tmp_path / "less")]) == 2
    assert "the trace has no model.layers.0.self_attn; record it with transformers 5" in capsys.readouterr().err


def test_the_bias_of_the_choice_of_experts_stays_float32(imported, tmp_path):
    """Whatever the other tensors are: rounding it would move tokens to other experts."""
    out = str(imported("deepseek_v3") / "out")
    assert run(["export", out, str(tmp_path / "hf"), "--dtype", "bfloat16", "--shard-gb", "0.00001"]) == 0
    types = {name: dtype for name, (dtype, _, _) in raw_tensors(tmp_path / "hf").items()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert [name for name, dtype in types.items() if dtype != "BF16"] == [bias]
    np.testing.assert_array_equal(float32_tensors(tmp_path / "hf")[bias],
                                  float32_tensors(imported("deepseek_v3") / "hf")[bias])
    size = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert size == sum(len(data) for _, _, data in raw_tensors(tmp_path / "hf").values())
    assert run(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0


def test_an_untied_folder_without_a_head_is_refused(tmp_path, capsys):
    source = write_folder("qwen3", tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert run(["import", str(source), str(tmp_path / "out")]) == 2
    assert "missing: lm_head.weight, though its config.json says that embeddings are not tied" in (
        capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_stored_row_that_changed_is_not_exported(imported, monkeypatch, tmp_path, capsys):
    read = streamed.read_row
    monkeypatch.setattr(streamed, "read_row", lambda path, name, row: read(path, name, row) + np.float32(row == 0))
    assert run(["export", str(imported("llama") / "out"), str(tmp_path / "hf")]) == 2
    assert "does not have the fingerprint that it was saved with" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_what_our_rules_forbid_is_refused(tmp_path, capsys):
    source = write_folder("mixtral", tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 5}))
    assert run(["import", str(source), str(tmp_path / "out")]) == 2
    assert "model.moe.top_k 5 is more than" in capsys.readouterr().err
    for keys, message in (({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'; a whole number"),
                          ({"model_type": ["mixtral"]}, "model_type ['mixtral'] has no conversion table")):
        (source / "config.json").write_text(json.dumps(config | keys))
        assert run(["import", str(source), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
