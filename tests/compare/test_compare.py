"""`maxtext compare`: its arithmetic, and what it says of sides that are equal, near and apart."""

import dataclasses

import numpy as np
import pytest

from maxtext.cli import main
from maxtext.compare.command import GROUPS, CompareError, compare, verdict
from maxtext.compare.measure import measure
from maxtext.config.schema import MeshConfig, RematConfig
from tests.tiny import tiny_config

AFTER_ADAM = ("update 2", "weight")  # which divides gradients by their own size, those near zero too
SIDE = {"layer 00": np.float32([[3, 4]]), "logits": np.float32([0, 0]), "update 1 loss": np.float32(2)}
CONFIG = """
model: {vocab_size: 64, d_model: 16, n_layers: 2, n_heads: 2, d_ff: 24, window: 4, layer_pattern: [window, full]}
data: {sequence_length: 16, vocab_size: 64, eos_id: 0, pad_id: 1, document_masking: true, sources: {x: {paths: [x]}}}
optim: {lr: 1e-3}
train: {steps: 10, global_batch: 2, compute_dtype: float32}
"""


def test_a_difference_is_relative_to_the_norm_and_in_the_order_of_computing():
    other = SIDE | {"layer 00": np.float32([[3, 4.5]]), "update 1 loss": np.float32(2)}
    rows = compare(SIDE, other)
    assert [row.name for row in rows] == ["layer 00", "logits", "update 1 loss"]
    assert rows[0].relative == pytest.approx(0.1)
    assert rows[0].largest == 0.5
    assert [row.identical for row in rows] == [False, True, True]


def test_the_verdict_tells_identical_near_and_far_apart():
    assert verdict(compare(SIDE, SIDE), 0.0) == ("byte-identical: 3 arrays", True)
    near = compare(SIDE, SIDE | {"layer 00": np.float32([[3, 4.0001]])})
    assert verdict(near, 1e-3)[0].startswith("within 0.001: the largest relative difference is")
    sentence, good = verdict(near, 1e-6)
    assert not good
    assert "the first in the order of computing is layer 00" in sentence


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_within_no_bound(value):
    assert not verdict(compare(SIDE, SIDE | {"logits": np.float32([0, value])}), 1e9)[1]


def test_a_zero_of_the_other_sign_is_not_byte_identical():
    assert not compare(SIDE, SIDE | {"logits": np.float32([0, -0.0])})[1].identical


@pytest.mark.parametrize("other", [{"logits": np.float32([0])}, {"layer 01": np.float32([1])}])
def test_unlike_models_are_refused(other):
    with pytest.raises(CompareError, match="unlike models"):
        compare(SIDE, SIDE | other)


def test_meshes_and_recomputation_stay_within_a_bound_and_another_rate_does_not():
    cfg = dataclasses.replace(tiny_config(remat=RematConfig("none")), mesh=MeshConfig(data=8, fsdp=1))
    a = measure(cfg, steps=2)
    assert {name.split(" ")[0] for name in a} == set(GROUPS)
    assert len([name for name in a if name.startswith("layer")]) == cfg.model.n_layers
    split = dataclasses.replace(cfg, mesh=MeshConfig(fsdp=2, context=2, tensor=2),
                                train=dataclasses.replace(cfg.train, remat=RematConfig("full")))
    rows = [row for row in compare(a, measure(split, steps=2)) if not row.name.startswith(AFTER_ADAM)]
    assert verdict(rows, 1e-5)[1]
    assert not all(row.identical for row in rows)
    faster = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=2e-2))
    beyond = [row.name for row in compare(a, measure(faster, steps=2)) if row.relative > 1e-5]
    assert beyond
    assert all(name.startswith(AFTER_ADAM) for name in beyond)
    assert any(name.startswith("weight") for name in beyond)


def test_the_command_says_what_is_the_same(tmp_path, capsys):
    config = tmp_path / "x.yml"
    config.write_text(CONFIG)
    assert main(["compare", str(config), "--steps", "1"]) == 0
    assert "byte-identical" in capsys.readouterr().out
    assert main(["compare", str(config), "--steps", "1", "--b", "seed=1"]) == 1
    assert "not within 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "nowhere"),
    (["quickstart", "--bound", "nan"], "--bound"),
    (["quickstart", "--steps", "0"], "--steps"),
    (["quickstart@no-such-commit"], "no such commit"),
    (["quickstart", "--b", "model.layers=3"], "model.layers"),
])
def test_mistakes_are_named(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err
