"""transformers loads what we export, to the same logits. Needs torch and transformers: TORCH=1 scripts/test.sh."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.architecture import LatentConfig, MoeConfig, RopeScalingConfig
from maxtext.config.load import to_yaml
from maxtext.config.schema import DataConfig, SourceConfig
from maxtext.convert import trace
from maxtext.convert.commands import run
from maxtext.model.decoder import Decoder
from maxtext.train.state import init_state
from tests.convert.folders import HF, float32_tensors
from tests.convert.tiny_families import NAMES, trace_of, write_folder
from tests.materials import imported
from tests.tiny import mesh_of, tiny_config, tiny_model

torch, transformers = imported("torch"), imported("transformers")

YARN = RopeScalingConfig(kind="yarn", factor=8.0, original_length=32)
PLAIN = {"layer_pattern": ("full",), "window": None}
LLAMA = {"norm_placement": "pre", "qk_norm": "none", **PLAIN}
MODELS = {
    "olmo3": tiny_model(n_kv_heads=2, window=16),
    "olmo3 yarn": tiny_model(n_kv_heads=2, window=16, rope_scaling=YARN),
    "olmo3 wide heads": tiny_model(n_heads=2, n_kv_heads=2, head_dim=32),
    "olmo3 tied": tiny_model(tie_embeddings=True),
    "olmo2": tiny_model(n_kv_heads=2, **PLAIN),
    "olmo2 yarn": tiny_model(rope_scaling=YARN, **PLAIN),
    "llama": tiny_model(**LLAMA),
    "llama yarn tied": tiny_model(tie_embeddings=True, rope_scaling=YARN, **LLAMA),
    "deepseek_v3": tiny_model(
        n_kv_heads=None, head_dim=None, rope_pairs="neighbours", **LLAMA,
        latent=LatentConfig(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=10),
        moe=MoeConfig(experts=8, d_expert=12, shared_experts=2, dense_layers=2, scores="sigmoid", renormalise=True,
                      scale=2.5, selection_bias=True)),
}


def random_gains(params: Decoder) -> Decoder:
    """Every weight with a larger deviation, and every gain away from 1: else a misplaced norm would go unseen."""
    rng = np.random.default_rng(0)

    def draw(p):
        values = rng.standard_normal(p.shape, np.float32) * np.float32(0.15)
        gain = bool((np.asarray(p) == 1).all())
        return jax.device_put(np.float32(1) + 2 * values if gain else values, p.sharding)

    return jax.tree.map(draw, params)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_the_same_model_in_transformers(tmp_path, name):
    """200 tokens, more than the window, a padded vocabulary, random gains; the stated limit in float32 is 1e-4."""
    cfg = dataclasses.replace(
        tiny_config(MODELS[name]),
        data=DataConfig(sequence_length=256, vocab_size=90, eos_id=88, pad_id=89, sources={"a": SourceConfig(("x",))}))
    with jax.set_mesh(mesh_of((1, 1, 1))):
        state = init_state(cfg)
        state = state.replace(params=random_gains(state.params))
        checkpoints = Checkpoints(str(tmp_path / "checkpoints"), cfg.checkpoint, config_text=to_yaml(cfg))
        checkpoints.save(1, state, {})
        checkpoints.wait()
        checkpoints.close()
    assert run(["export", str(tmp_path), str(tmp_path / "hf")]) == 0
    assert run(["verify", str(tmp_path), str(tmp_path / "hf"), "--rows", "2", "--length", "200"]) == 0
    report = json.loads((tmp_path / "parity.json").read_text())
    assert (report["rows"], report["length"], report["tokens"]) == (2, 200, "random ids")
    assert report["max_logit_difference"] < 2e-5
    assert report["nll_reference"] > 4
    tensors = float32_tensors(tmp_path / "hf")
    if MODELS[name].qk_norm == "projection":
        heads, width = MODELS[name].n_heads, MODELS[name].head_width
        assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (heads * width,)
        assert tensors["model.layers.0.self_attn.k_norm.weight"].shape == (MODELS[name].kv_heads * width,)
        assert np.abs(tensors["model.layers.0.self_attn.k_norm.weight"] - 1).max() > 0.1


def test_an_import_that_is_exported_again(tmp_path, hf_folder):
    """Against transformers on the export, and against the committed golden: the fixture is what it says it is."""
    assert run(["import", str(hf_folder), str(tmp_path / "out")]) == 0
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    golden = trace.load(str(hf_folder / "expected.npz"))
    theirs = trace.record(str(tmp_path / "hf"), golden.tokens_BT, modules=False)
    np.testing.assert_allclose(theirs.logits_BTV, golden.logits_BTV, atol=2e-6)
    assert len(theirs.hidden) == len(golden.hidden)
    for ours, kept in zip(theirs.hidden, golden.hidden, strict=True):
        np.testing.assert_allclose(ours, kept, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_exported_as_transformers_wrote_it(tmp_path, name):
    """config.json is written anew from our model, and the trace is what it says it is."""
    assert run(["import", str(write_folder(name, tmp_path / "source")), str(tmp_path / "out")]) == 0
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    recorded = trace.load(str(trace_of(name)))
    theirs = trace.record(str(tmp_path / "hf"), recorded.tokens_BT)
    np.testing.assert_allclose(theirs.logits_BTV, recorded.logits_BTV, atol=2e-6)
    assert theirs.modules.keys() == recorded.modules.keys()
    for module, arrays in recorded.modules.items():
        for ours, kept in zip(theirs.modules[module], arrays, strict=True):
            np.testing.assert_allclose(ours, kept, atol=1e-5)


def test_a_trace_is_written_and_replayed(tmp_path, capsys):
    source = write_folder("qwen3_moe", tmp_path / "hf")
    command = ["trace", str(source), str(tmp_path / "trace.npz"), "--rows", "2", "--length", "40"]
    assert run(command) == 0
    assert "17 modules on 80 tokens of random ids" in capsys.readouterr().out
    found = trace.load(str(tmp_path / "trace.npz"))
    assert found.tokens_BT.shape == (2, 40)
    assert found.config["model_type"] == "qwen3_moe"
    assert run(command) == 2
    assert "trace.npz exists; choose another place" in capsys.readouterr().err
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    assert run(["verify", str(tmp_path / "out"), "--trace", str(tmp_path / "trace.npz")]) == 0


def test_a_trace_of_a_text(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = write_folder("llama3", tmp_path / "hf")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "rose": 2, "is": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (tmp_path / "text").write_text("a rose is a rose is what")
    command = ["trace", str(source), str(tmp_path / "trace.npz"), "--text", str(tmp_path / "text"), "--length"]
    assert run([*command, "8"]) == 2
    assert "has 7 tokens, 1 rows of 8 need 8" in capsys.readouterr().err
    assert run([*command, "7"]) == 0
    assert trace.load(str(tmp_path / "trace.npz")).tokens_BT.tolist() == [[1, 2, 3, 1, 2, 3, 0]]


def test_small_files_and_bfloat16_load_too(tmp_path):
    assert run(["import", str(HF / "olmo3"), str(tmp_path / "out")]) == 0
    options = ["--shard-gb", "0.0002", "--dtype", "bfloat16"]
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "hf"), *options]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"))
    assert model.dtype == torch.bfloat16
    kept = torch.from_numpy(float32_tensors(HF / "olmo3")["lm_head.weight"].copy()).bfloat16()
    assert torch.equal(model.lm_head.weight.detach(), kept)


def test_bin_files_of_torch(tmp_path):
    """Shared storage, strides and bfloat16, read without torch."""
    from maxtext.convert.torch_files import open_bins

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"a": base, "b": base.T, "c": base[1:3, ::2], "d": base.bfloat16(), "e": torch.nn.Parameter(base.half()),
               "f": torch.tensor(3.0), "g": torch.zeros(0, 3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = open_bins([tmp_path / "pytorch_model.bin"])
    for name, tensor in tensors.items():
        want = tensor.detach().float().numpy()
        assert (found[name].shape, found[name].read().astype(np.float32).tolist()) == (want.shape, want.tolist())
