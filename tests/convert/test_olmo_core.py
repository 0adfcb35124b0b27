"""A checkpoint of a real OLMo-core run: the same logits and moments, and training that goes on as it did there."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.architecture import MoeConfig
from maxtext.config.load import to_yaml
from maxtext.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ScheduleConfig,
    SourceConfig,
    TrainConfig,
)
from maxtext.convert import ConvertError, olmo_core, parity
from maxtext.convert.commands import run
from maxtext.convert.distcp import Distributed
from maxtext.convert.saved import open_saved
from maxtext.data.batch import Batch
from maxtext.parallel.sharding import sharding
from maxtext.train.loop import train
from maxtext.train.state import abstract_state, init_state
from maxtext.train.step import compile_train_step
from maxtext.train.warm_start import warm_start
from tests.convert.folders import ORACLES
from tests.tiny import mesh_of

STEP = ORACLES / "olmo_core" / "step3"


@pytest.fixture(scope="module")
def expected():
    with np.load(ORACLES / "olmo_core" / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    out = tmp_path_factory.mktemp("olmo_core") / "out"
    assert run(["import", str(STEP), str(out)]) == 0
    return out


def test_the_model_is_read_from_its_own_config(imported):
    cfg = open_saved(str(imported)).cfg
    assert (cfg.model.vocab_size, cfg.model.kv_heads, cfg.model.d_ff, cfg.model.layer_windows) == (128, 2, 48,
                                                                                                    (8, None, None))
    assert (cfg.data.vocab_size, cfg.data.eos_id, cfg.data.pad_id, cfg.data.sequence_length) == (120, 119, 118, 24)


def test_logits_are_those_of_olmo_core(imported, expected):
    trace = parity.ours(open_saved(str(imported)), expected["tokens"][0], "float32")
    assert np.abs(trace.logits_BTV - expected["logits"]).max() < 2e-6


def run_config(imported, folder, tokens):
    """The config of the same run here; the data is only what is needed to have a position in it."""
    tokens.astype(np.uint8).tofile(folder / "tokens.npy")
    data = DataConfig(sequence_length=24, vocab_size=128, eos_id=119, pad_id=118,
                      sources={"all": SourceConfig((str(folder / "tokens.npy"),))})
    return dataclasses.replace(
        open_saved(str(imported)).cfg, data=data, optim=OptimConfig(lr=1e-2), schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(steps=5, global_batch=4, compute_dtype="float32"), checkpoint=CheckpointConfig(every=None),
        eval=EvalConfig(every=None), log=LogConfig(tensorboard=False, report=False), run_name="continued",
        output_dir=str(folder))


@pytest.fixture(scope="module")
def continued(imported, expected, tmp_path_factory):
    """A run of ours, made of the checkpoint and a config of ours."""
    folder = tmp_path_factory.mktemp("run")
    cfg = run_config(imported, folder, expected["tokens"])
    (folder / "run.yml").write_text(to_yaml(cfg))
    assert run(["import", str(STEP), str(folder / "continued"), "--config", str(folder / "run.yml")]) == 0
    return cfg


def test_training_goes_on_as_it_did_there(continued, expected):
    """Moments, Adam count, decay groups and clipping: three more updates give the reference's losses and norms."""
    cfg, mesh = continued, mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, writer=False)
        restored = checkpoints.restore(abstract_state(cfg, mesh))
        state, step_fn = restored.state, compile_train_step(cfg)
        assert (restored.step, int(state.step), int(state.optimizer.count), int(state.optimizer.n_recorded)) == (3,) * 4
        assert sum(restored.extra["data"]["source_tokens"].values()) == 3 * cfg.batch_tokens
        placement = sharding(mesh, "batch", None)
        for step in range(3, 6):
            tokens = expected["tokens"][step]
            targets = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
            weights = np.ones(tokens.shape, np.float32)
            weights[:, -1] = 0
            state, metrics = step_fn(state, jax.device_put(Batch(tokens, targets, weights), placement))
            assert float(metrics["cross_entropy"]) == pytest.approx(expected["ce"][step], abs=1e-5)
            assert float(metrics["grad_norm"]) == pytest.approx(expected["grad_norm"][step], rel=2e-4)
            assert int(metrics["skipped"]) == 0


def test_the_training_verb_continues_it(continued):
    outcome = train(continued, devices=jax.devices()[:1])
    assert (outcome.step, outcome.trained) == (5, True)
    lines = Path(continued.run_dir, "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 4, 5]


def test_moments_are_taken_over_by_init_from(imported):
    saved = open_saved(str(imported))
    cfg = dataclasses.replace(saved.cfg, optim=OptimConfig(lr=1e-3))
    source = dataclasses.replace(cfg.train.init_from, path=str(imported), optimizer=True)
    with jax.set_mesh(mesh_of((1, 4, 2))):
        state = warm_start(init_state(cfg), source, lambda text: None)
    assert (int(state.step), int(state.optimizer.count), int(state.optimizer.n_recorded)) == (0, 3, 0)
    moments = Distributed(str(STEP / "model_and_optim"))
    nu = moments.read("optim.state.lm_head.w_out.weight.exp_avg_sq")
    np.testing.assert_array_equal(state.optimizer.nu.head, nu.T)
    np.testing.assert_array_equal(np.asarray(state.optimizer.mu.segments[1][0].attention.k_norm).ravel(),
                                  moments.read("optim.state.blocks.2.attention.k_norm.weight.exp_avg"))


# ---- what is refused


def without(monkeypatch, *names):
    """Distributed as if these tensors had not been saved."""
    original = Distributed.__init__

    def patched(self, folder):
        original(self, folder)
        for name in names:
            del self.shapes[name]

    monkeypatch.setattr(Distributed, "__init__", patched)


@pytest.mark.parametrize(("name", "message"), [
    ("model.blocks.1.attention.w_v.weight", r"\(model.\*\)[^:]*:\n  missing: blocks.1.attention.w_v.weight"),
    ("optim.state.lm_head.norm.weight.exp_avg", r"exp_avg\)[^:]*:\n  missing: lm_head.norm.weight"),
    ("optim.state.blocks.0.feed_forward.w2.weight.exp_avg_sq", r"exp_avg_sq\)[^:]*:\n  missing: blocks.0.feed"),
    ("optim.state.embeddings.weight.step", "optim.state.embeddings.weight.step is missing"),
])
def test_a_missing_tensor_is_named_and_nothing_is_written(monkeypatch, tmp_path, name, message):
    without(monkeypatch, name)
    with pytest.raises(ConvertError, match=message):
        olmo_core.import_checkpoint(str(STEP), str(tmp_path / "out"), None, print)
    assert not (tmp_path / "out").exists()


def test_weights_without_optimizer_state(monkeypatch, tmp_path):
    without(monkeypatch, *[n for n in Distributed(str(STEP / "model_and_optim")).shapes if n.startswith("optim.")])
    olmo_core.import_checkpoint(str(STEP), str(tmp_path / "out"), None, print)
    leaves = open_saved(str(tmp_path / "out")).manifest.leaves
    assert {name.split(".")[0] for name in leaves} == {"params", "step"}


def test_counts_that_differ(monkeypatch, tmp_path):
    original = Distributed.read

    def one_more(self, name):
        return original(self, name) + (name == "optim.state.lm_head.norm.weight.step")

    monkeypatch.setattr(Distributed, "read", one_more)
    with pytest.raises(ConvertError, match="different numbers of updates"):
        olmo_core.import_checkpoint(str(STEP), str(tmp_path / "out"), None, print)


def test_damaged_files(tmp_path, capsys):
    shutil.copytree(STEP, tmp_path / "step3")
    for file in (tmp_path / "step3" / "model_and_optim").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert run(["import", str(tmp_path / "step3"), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_metadata_cannot_run_anything(tmp_path):
    class Bad:
        def __reduce__(self):
            return eval, ("1",)  # not print, in whose place Ray may have put its own

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(ConvertError, match=r"it wants (builtins|__builtin__).eval, which no weights need"):
        Distributed(str(tmp_path))


def config_of(**changes):
    config = json.loads((STEP / "config.json").read_text())["model"]
    for path, value in changes.items():
        *sections, key = path.split("__")
        inside = config
        for section in sections:
            inside = inside[section]
        inside[key] = value
    return config


YARN = {"factor": 8, "beta_fast": 32, "beta_slow": 1, "old_context_len": 16,
        "_CLASS_": "olmo_core.nn.rope.YaRNRoPEScalingConfig"}


def stretched(*layers, **changes):
    """The config with YaRN on these blocks, as OLMo-core writes it."""
    config = config_of()
    config["block_overrides"] = {str(layer): json.loads(json.dumps(config["block"])) for layer in layers}
    for block in config["block_overrides"].values():
        block["sequence_mixer"]["rope"]["scaling"] = YARN
        block.update(changes)
    return config


def test_yarn_on_full_layers():
    scaling = olmo_core.read_model(stretched(1, 2), "here").rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_length) == ("yarn", 8.0, 16)


def routed(**changes):
    """The config with experts, as OLMo-core writes it."""
    config = config_of(block__name="moe_reordered_norm")
    del config["block"]["feed_forward"]
    config["block"]["feed_forward_moe"] = {
        "name": "dropless", "num_experts": 8, "hidden_size": 24, "capacity_factor": None, "lb_loss_weight": 0.01,
        "z_loss_weight": None, "lb_loss_granularity": "local_batch", "scale_loss_by_num_layers": True,
        "router": {"name": "default", "top_k": 2, "normalize_expert_weights": 1.0, "gating_function": "sigmoid",
                   "uniform_expert_assignment": False, "random_expert_assignment": False},
    } | changes
    return config


def test_experts():
    model = olmo_core.read_model(routed(), "here")
    assert model.moe == MoeConfig(experts=8, top_k=2, d_expert=24, scores="sigmoid", renormalise=True,
                                  load_balance_loss=0.01)
    assert (model.d_ff, model.norm_placement) == (None, "post")


@pytest.mark.parametrize(("config", "message"), [
    (routed(name="default"), "feed_forward_moe.name is 'default'"),
    (routed(router={"top_k": 2, "bias_gamma": 0.1}), "router.bias_gamma is 0.1"),
    (routed(lb_loss_granularity="instance"), "lb_loss_granularity is 'instance'"),
    (routed(shared_mlp={"hidden_size": 8}), "shared_mlp is"),
    (stretched(1), "not the same on all full-attention layers and on them alone"),
    (stretched(0, 1, 2), "not the same on all full-attention layers and on them alone"),
    (stretched(1, 2, name="default"), "block 1 differs from the others in more than rope scaling"),
    (config_of(block__sequence_mixer__use_head_qk_norm=True), "attention.use_head_qk_norm is True"),
    (config_of(block__sequence_mixer__bias=True), "attention.bias is True"),
    (config_of(block__name="normalized"), "block.name is 'normalized'"),
    (config_of(block__layer_norm__eps=1e-5), "the norms have different eps"),
    (config_of(block__layer_norm__name="l2_norm"), "not an RMSNorm"),
    (config_of(d_model=None), "d_model is missing"),
    (config_of(block__sequence_mixer__sliding_window__pattern=[8, 16, -1]), "windows of different sizes"),
    ({}, "vocab_size is missing"),
])
def test_models_that_we_cannot_honour(config, message):
    with pytest.raises(ConvertError, match=message):
        olmo_core.read_model(config, "here")
