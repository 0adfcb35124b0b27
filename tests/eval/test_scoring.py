"""Nats of rows and choices: with determinism any_mesh they have the same bits on each mesh of data and fsdp."""

import jax
import numpy as np
import pytest

from maxtext.config.schema import Config
from maxtext.eval.scoring import Scorer
from maxtext.train.state import init_state
from tests.tiny import mesh_of, random_batch, tiny_config, tiny_model

ONE, DATA, FSDP, BOTH = (1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1)
CHOICES = np.arange(24, dtype=np.int32).reshape(8, 3)


def config(determinism: str, dtype: str = "float32") -> Config:
    # With a hidden width like this a plain scorer gives other bits on most rows, on each of these meshes.
    model = tiny_model(n_layers=2, layer_pattern=("window", "full"), d_model=64, n_heads=4, n_kv_heads=2, head_dim=16,
                       d_ff=2048)
    return tiny_config(model, determinism=determinism, compute_dtype=dtype)


def scored(cfg: Config, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Nats of the rows of a batch, 24 of them so that a part has three, and of choices, on a mesh of this shape."""
    mesh, batch = mesh_of(shape), random_batch(cfg)
    with jax.set_mesh(mesh):
        scorer, params, rows = Scorer(cfg, mesh), init_state(cfg).params, 24
        nats_B = scorer.row_nats(params, batch.tokens_BT, batch.targets_BT, batch.weights_BT, rows)
        nats_BC = scorer.choice_nats(params, batch.tokens_BT, np.arange(8, dtype=np.int32), CHOICES, rows)
        return np.asarray(nats_B)[:8], np.asarray(nats_BC)[:8]


@pytest.fixture(scope="module")
def on_one_device():
    return {dtype: scored(config("any_mesh", dtype), ONE) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize(("shape", "dtype"), [(DATA, "float32"), (FSDP, "float32"), (BOTH, "bfloat16")])
def test_a_mesh_changes_no_bit_of_what_is_scored(on_one_device, shape, dtype):
    for found, expected in zip(scored(config("any_mesh", dtype), shape), on_one_device[dtype], strict=True):
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


def test_batches_are_as_large_on_every_mesh():
    assert {Scorer(config("any_mesh"), mesh_of(shape)).batch_rows(19) for shape in (ONE, DATA, BOTH)} == {24}


def test_it_scores_what_it_scores_otherwise(on_one_device):
    for found, expected in zip(scored(config("none"), DATA), on_one_device["float32"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6)
