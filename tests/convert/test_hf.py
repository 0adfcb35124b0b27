"""Folders of transformers in and out, against what transformers computed, and against everything that may be wrong."""

import dataclasses
import functools
import json
import os
import pickle
import shutil
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.load import to_yaml
from maxtext.config.schema import DataConfig, InitFromConfig, SourceConfig
from maxtext.convert import ConvertError, hf, safetensors
from maxtext.convert.commands import run
from maxtext.convert.loaded import Loaded
from maxtext.convert.saved import open_saved
from maxtext.train.state import init_state
from maxtext.train.warm_start import warm_start
from tests.convert.folders import HF, edited, float32_tensors, raw_tensors, write_weights
from tests.convert.tiny_families import write_folder
from tests.tiny import mesh_of, tiny_config, tiny_model

QUIET = {"note": lambda text: None}


def refused(source, tmp_path, message):
    """An import that must fail, with nothing written."""
    with pytest.raises(ConvertError, match=message) as error:
        hf.import_folder(str(source), str(tmp_path / "out"), **QUIET)
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Some committed folders, imported by the command."""
    root = tmp_path_factory.mktemp("imported")
    for name in ("olmo2", "olmo3", "olmo3_gqa", "llama_tied"):
        assert run(["import", str(HF / name), str(root / name)]) == 0
    return root


@pytest.fixture(scope="module")
def out_of(tmp_path_factory):
    """Gives the import of a folder."""
    @functools.cache
    def out(folder):
        target = tmp_path_factory.mktemp("import") / folder.name
        assert run(["import", str(folder), str(target)]) == 0
        return target

    return out


def test_logits_and_every_hidden_state_are_those_of_transformers(out_of, tmp_path, hf_folder):
    """The stated limit is 1e-4; what is left is rounding, so a tenth of it is asked for."""
    assert run(["verify", str(out_of(hf_folder)), str(hf_folder), "--golden", str(hf_folder / "expected.npz"),
                "--report", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["max_logit_difference"] < 1e-5
    assert len(report["layers"]) == 1 + json.loads((hf_folder / "config.json").read_text())["num_hidden_layers"]
    assert max(layer["max"] for layer in report["layers"]) < 3e-5
    assert report["different_weights"] == []


@pytest.mark.parametrize(("name", "shape", "expert"), [
    ("olmo3_gqa", (1, 4, 2), 1), ("llama_tied", (1, 4, 2), 1), ("deepseek_v3", (2, 1, 2), 2), ("gpt_oss", (1, 1, 2), 4),
])
def test_weights_read_onto_a_mesh_are_those_of_an_import(out_of, tmp_path_factory, name, shape, expert):
    source = HF / name if (HF / name).is_dir() else write_folder(name, tmp_path_factory.mktemp(name) / "hf")
    folder, saved = Loaded(str(source)), open_saved(str(out_of(source)))
    mesh = mesh_of(shape, expert=expert)
    found, expected = folder.params(folder.cfg.model, mesh), saved.params(mesh)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.sharding == theirs.sharding
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert dataclasses.replace(folder.cfg, output_dir=saved.cfg.output_dir) == saved.cfg


def test_export_writes_every_bit_back(out_of, tmp_path, hf_folder):
    assert run(["export", str(out_of(hf_folder)), str(tmp_path / "hf")]) == 0
    assert raw_tensors(tmp_path / "hf") == raw_tensors(hf_folder)
    assert run(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    first, second = (open_saved(str(path)).manifest.leaves for path in (out_of(hf_folder), tmp_path / "again"))
    assert {k: v.fingerprint for k, v in first.items()} == {k: v.fingerprint for k, v in second.items()}


def test_export_in_small_files_has_an_index(imported, tmp_path):
    assert run(["export", str(imported / "olmo3"), str(tmp_path / "hf"), "--shard-gb", "0.0003"]) == 0
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == 4
    assert files[0] == "model-00001-of-00004.safetensors"
    assert all((tmp_path / "hf" / file).stat().st_size < 310_000 for file in files)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 269_632
    assert sorted(index["weight_map"]) == sorted(raw_tensors(HF / "olmo3"))
    assert raw_tensors(tmp_path / "hf") == raw_tensors(HF / "olmo3")


def test_export_in_bfloat16_rounds_to_nearest(imported, tmp_path):
    assert run(["export", str(imported / "olmo2"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in float32_tensors(HF / "olmo2").items():
        dtype, _, data = raw_tensors(tmp_path / "hf")[name]
        assert (dtype, data) == ("BF16", tensor.astype(ml_dtypes.bfloat16).tobytes())


def test_a_bfloat16_folder_comes_back_as_bfloat16(tmp_path):
    def halve(tensors):
        tensors.update({name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})

    source = edited("olmo2", tmp_path / "source", halve)
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    assert raw_tensors(tmp_path / "hf") == raw_tensors(source)
    leaf = open_saved(str(tmp_path / "out")).leaf("params.norm")
    assert leaf.dtype == np.float32


# ---- what is refused


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), r"missing: model.layers.1.self_attn.q_norm.weight"),
    (lambda t: t.update({"model.layers.1.mlp.bias": t["model.norm.weight"]}), r"unknown: model.layers.1.mlp.bias \[64"),
    (lambda t: t.update({"model.layers.0.mlp.up.weight": t.pop("model.layers.0.mlp.up_proj.weight")}),
     r"nearest: model.layers.0.mlp.up.weight"),
    (lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t["model.layers.2.mlp.down_proj.weight"].T}),
     r"model.layers.2.mlp.down_proj.weight is \[160, 64\], the model needs \[64, 160\]; it looks transposed"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:200]}), r"lm_head.weight is \[200, 64\]"),
    (lambda t: t.pop("lm_head.weight"), r"missing: lm_head.weight"),
])
def test_tensors_that_are_not_the_model_are_named_and_nothing_is_written(tmp_path, change, message):
    refused(edited("olmo2", tmp_path / "source", change), tmp_path, message)


def test_layers_that_config_does_not_count_are_named(tmp_path):
    text = refused(edited("olmo2", tmp_path / "source", num_hidden_layers=2), tmp_path, "unknown: model.layers.2")
    assert text.count("unknown") == 11


def test_tied_embeddings_with_a_head_of_their_own_are_refused(tmp_path):
    def with_head(scale):
        return lambda t: t.update({"lm_head.weight": np.float32(scale) * t["model.embed_tokens.weight"]})

    refused(edited("llama_tied", tmp_path / "other", with_head(2)), tmp_path, "lm_head.weight is not model.embed")
    copied = edited("llama_tied", tmp_path / "same", with_head(1))
    hf.import_folder(str(copied), str(tmp_path / "out"), **QUIET)
    assert "params.head" not in open_saved(str(tmp_path / "out")).manifest.leaves


def test_integers_are_no_weights(tmp_path):
    def quantise(tensors):
        tensors.update({name: (9 * tensor).astype(np.int8) for name, tensor in tensors.items()})

    source = edited("olmo2", tmp_path / "source", quantise)
    refused(source, tmp_path, "lm_head.weight is int8")


@pytest.mark.parametrize(("name", "value", "place"), [
    ("model.layers.1.mlp.down_proj.weight", np.nan, "segments.0.0.mlp.down (repeat 1) has 1 NaN"),
    ("model.embed_tokens.weight", -np.inf, "embed has 1 NaN"),
])
def test_weights_that_are_not_finite_are_named_unless_asked_for(tmp_path, capsys, name, value, place):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[5] = value

    source, out = edited("olmo2", tmp_path / "source", spoil), tmp_path / "out"
    assert run(["import", str(source), str(out)]) == 2
    said = capsys.readouterr().err
    assert place in said
    assert said.count("\n") == 1
    assert "--allow-nonfinite" in said
    assert not out.exists()
    assert run(["import", str(source), str(out), "--allow-nonfinite"]) == 0
    assert sum(leaf.nonfinite for leaf in open_saved(str(out), None).manifest.leaves.values()) == 1


def test_large_finite_weights_are_no_infinity(tmp_path):
    def raise_all(tensors):
        tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)

    assert run(["import", str(edited("olmo2", tmp_path / "source", raise_all)), str(tmp_path / "out")]) == 0


def test_an_index_that_lies_is_refused(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(HF / "olmo3", source)
    index = json.loads((source / hf.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = files[1]
    del index["weight_map"]["model.norm.weight"]
    (source / hf.INDEX).write_text(json.dumps(index))
    text = refused(source, tmp_path, f"lm_head.weight is listed in {files[1]}, but is in {files[0]}")
    assert f"model.norm.weight in {files[1]} is not listed" in text
    (source / files[1]).unlink()
    refused(source, tmp_path, "cannot be read: No such file")


def test_a_part_that_is_not_there_is_missed_without_an_index(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(HF / "olmo3_yarn", source)
    (source / "model-00002-of-00002.safetensors").unlink()
    refused(source, tmp_path, "is one of 2 files, 1 are there")


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: data[:-4], r"has 653820 bytes, its header says 653824; copy it again"),
    (lambda data: data[:4], "not a safetensors file, or cut off"),
    (lambda data: data.replace(b'"F32"', b'"F99"', 1), "dtype F99"),
    (lambda data: data[:8] + b"x" + data[9:], "its header is not that of a safetensors file"),
    (lambda data: data.replace(b'"shape":[256,64]', b'"shape":[256,63]', 1), "has 65536 bytes, its shape needs 64512"),
])
def test_damaged_files_are_named(tmp_path, damage, message):
    source = edited("olmo2", tmp_path / "source")
    file = source / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(source, tmp_path, message)


def test_folders_that_are_none(tmp_path):
    refused(tmp_path, tmp_path, r"config.json: not found")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, tmp_path, "a JSON object is expected")
    shutil.copy(HF / "olmo2" / "config.json", tmp_path)
    refused(tmp_path, tmp_path, "no weights")


def test_a_used_target_is_left_alone(imported, tmp_path, capsys):
    (tmp_path / "keep").write_text("mine")
    assert run(["import", str(HF / "olmo2"), str(tmp_path)]) == 2
    assert run(["export", str(imported / "olmo2"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("exists and is not empty; choose another place") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert run(["export", str(imported / "olmo2"), str(tmp_path / "keep" / "below")]) == 2
    assert f"below: cannot be made ({tmp_path}/keep is no folder); give a place" in capsys.readouterr().err


def test_an_export_that_fails_leaves_nothing(imported, tmp_path, monkeypatch):
    def fails(*_):
        raise ConvertError("disk full")

    monkeypatch.setattr(safetensors.Writer, "write", fails)
    assert run(["export", str(imported / "olmo2"), str(tmp_path / "hf")]) == 2
    assert list(tmp_path.iterdir()) == []


# ---- the older weight files


def bin_folder(tmp_path):
    source = tmp_path / "bin"
    source.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(HF / "llama_tied" / name, source)
    return source


def test_bin_files_give_the_same_bits(imported, tmp_path):
    hf.import_folder(str(bin_folder(tmp_path)), str(tmp_path / "out"), **QUIET)
    first, second = (open_saved(str(path)).manifest.leaves for path in (imported / "llama_tied", tmp_path / "out"))
    assert {k: v.fingerprint for k, v in first.items()} == {k: v.fingerprint for k, v in second.items()}


def test_a_bin_file_cannot_run_anything(tmp_path):
    class Bad:
        def __reduce__(self):
            return eval, ("1",)  # not print, in whose place Ray may have put its own

    source = bin_folder(tmp_path)
    with zipfile.ZipFile(source / "pytorch_model.bin", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"lm_head.weight": Bad()}))
    refused(source, tmp_path, r"it wants (builtins|__builtin__).eval, which no weights need")
    (source / "pytorch_model.bin").write_bytes(b"no archive")
    refused(source, tmp_path, "cannot be read as weights alone")


# ---- what becomes of it


def test_a_run_starts_from_converted_weights(imported):
    """train.init_from on a mesh of 8 devices, from the folder that import wrote."""
    saved = open_saved(str(imported / "olmo3_gqa"))
    cfg = tiny_config(saved.cfg.model)
    with jax.set_mesh(mesh_of((2, 2, 2))):
        source = InitFromConfig(path=str(imported / "olmo3_gqa"))
        state = warm_start(init_state(cfg), source, lambda text: None)
    np.testing.assert_array_equal(state.params.embed, float32_tensors(HF / "olmo3_gqa")["model.embed_tokens.weight"])
    gains = float32_tensors(HF / "olmo3_gqa")["model.layers.4.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(np.asarray(state.params.segments[1][0].attention.k_norm).ravel(), gains)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A checkpoint of a training run, with a vocabulary of 90 padded to 96."""
    folder = tmp_path_factory.mktemp("run")
    data = DataConfig(sequence_length=16, vocab_size=90, eos_id=88, pad_id=89, sources={"a": SourceConfig(("x.npy",))})
    cfg = dataclasses.replace(tiny_config(tiny_model()), data=data)
    with jax.set_mesh(mesh_of((1, 4, 2))):
        checkpoints = Checkpoints(str(folder / "checkpoints"), cfg.checkpoint, config_text=to_yaml(cfg))
        checkpoints.save(7, init_state(cfg), {"data": {}, "record": {}})
        checkpoints.wait()
        checkpoints.close()
    return folder


def test_a_run_is_exported_without_its_padding(run_folder, tmp_path, capsys):
    assert run(["export", str(run_folder), str(tmp_path / "hf")]) == 0
    assert "vocabulary: 90 of 96 rows" in capsys.readouterr().out
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    tensors = float32_tensors(tmp_path / "hf")
    expected = {"vocab_size": 90, "eos_token_id": 88, "pad_token_id": 89, "bos_token_id": None, "head_dim": 8,
                "num_key_value_heads": 4, "max_position_embeddings": 16, "sliding_window": 6, "model_type": "olmo3"}
    assert {key: config[key] for key in expected} == expected
    saved = open_saved(str(run_folder))
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], saved.leaf("params.embed")[:90])
    np.testing.assert_array_equal(tensors["lm_head.weight"], saved.leaf("params.head").T[:90])
    q_norm, k_norm = (tensors[f"model.layers.0.self_attn.{x}_norm.weight"].shape for x in "qk")
    assert (q_norm, k_norm) == ((64,), (32,))


def test_a_run_is_exported_with_its_padding(run_folder, tmp_path):
    assert run(["export", str(run_folder), str(tmp_path / "hf"), "--keep-padding", "--step", "7"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 96
    assert run(["import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    before, after = open_saved(str(run_folder)), open_saved(str(tmp_path / "again"))
    weights = {name for name in before.manifest.leaves if name.startswith("params.")}
    assert weights == set(after.manifest.leaves)
    for name in weights:
        np.testing.assert_array_equal(before.leaf(name), after.leaf(name))


@pytest.mark.parametrize("words", [
    ["import", str(HF / "olmo2"), "file/out"], ["export", "absent", "file/out"], ["export", "empty", "out"],
    ["export", "absent", "out"], ["import", "empty", "out"], ["import", "odd", "out"],
    ["import", str(HF / "olmo2"), "closed/out"],
])
def test_mistakes_with_places_are_one_line_that_says_what_to_do(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *rest, **more: "closed" not in str(path) and
                        access(path, *rest, **more))  # who runs the tests may be allowed everything
    assert run(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not line.startswith("error")  # as no other verb says
    assert "Errno" not in line
    assert "output_dir" not in line.replace("<output_dir>", "")
    assert "; give " in line or "cannot be read: Is a directory" in line
    assert not (tmp_path / "out").exists()


def test_a_damaged_or_absent_checkpoint_is_not_exported(run_folder, tmp_path, capsys):
    assert run(["export", str(run_folder), str(tmp_path / "hf"), "--step", "8"]) == 2
    assert "no good checkpoint of step 8 (step_00000007: good)" in capsys.readouterr().err
    shutil.copytree(run_folder, tmp_path / "run")
    data = max((tmp_path / "run").rglob("d/*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 2
    assert "has changed since it was saved" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_tokenizer_files_travel_along(tmp_path):
    source = edited("olmo2", tmp_path / "source")
    files = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}", "generation_config.json": b"{ }"}
    for name, content in files.items():
        (source / name).write_bytes(content)
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "hf")]) == 0
    assert {name: (tmp_path / "hf" / name).read_bytes() for name in files} == files


def test_writing_and_reading_are_inverse_for_every_type(tmp_path):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        tensors = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": np.zeros((), dtype),
                   "c": np.zeros((0, 3), dtype)}
        write_weights(tmp_path, tensors)
        found = safetensors.read_header(str(tmp_path / "model.safetensors"))
        assert {name: (stored.shape, stored.dtype) for name, stored in found.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(found[name].read(), tensor)
