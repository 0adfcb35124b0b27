"""Every family, by the tiny model behind its trace: on a mesh the numbers of one device, from a cache those of all.

The mesh of a mixture is data 2 x expert 2 x tensor 2, of the others data 2 x fsdp 2 x tensor 2.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.schema import ModelConfig, RematConfig
from maxtext.convert.config_json import read_model
from maxtext.convert.families import family_of
from maxtext.model.decoder import Decoder
from maxtext.model.loss import mean_loss
from tests.convert.tiny_families import NAMES, trace_of
from tests.generate.families import random_weights
from tests.generate.test_cache import both_ways
from tests.tiny import mesh_of, place, random_batch, tiny_config


def loss_and_gradients(cfg, batch, mesh) -> tuple[np.ndarray, Decoder]:
    with jax.set_mesh(mesh):
        batch = place(batch, mesh)
        loss = functools.partial(mean_loss, tokens_BT=batch.tokens_BT, targets_BT=batch.targets_BT,
                                 weights_BT=batch.weights_BT, total_weight=jnp.float32(batch.weights_BT.sum()), cfg=cfg)
        (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(random_weights(cfg.model, mesh))
    return np.asarray(value), jax.tree.map(np.asarray, grads)


def tiny(name: str) -> ModelConfig:
    """The model behind a trace, with losses on its routers."""
    with np.load(trace_of(name)) as file:
        config = json.loads(str(file["config"]))
    model = read_model(family_of(config, ""), config, "")
    losses = {"load_balance_loss": 0.1, "z_loss": 0.1} if model.moe.experts else {}
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, **losses))


def families(*every_pass: str) -> list:
    """All of them; those not named are left out of the second pass of .ci/run."""
    assert set(every_pass) <= set(NAMES)
    return [pytest.param(name, marks=[] if name in every_pass else [pytest.mark.one_pass]) for name in NAMES]


@pytest.mark.parametrize("name", families("deepseek_v3", "gpt_oss"))
def test_a_family_has_the_numbers_of_one_device_on_a_mesh(name):
    cfg = tiny_config(tiny(name), remat=RematConfig("none"))
    batch, split = random_batch(cfg), mesh_of((2, 1, 2), expert=2) if cfg.model.moe.experts else mesh_of((2, 2, 2))
    one, grads = loss_and_gradients(cfg, batch, mesh_of((1, 1, 1)))
    shared, shared_grads = loss_and_gradients(cfg, batch, split)
    np.testing.assert_allclose(shared, one, rtol=1e-6)

    def close(ours: np.ndarray, theirs: np.ndarray) -> None:
        assert np.isfinite(theirs).all()
        assert np.linalg.norm(ours - theirs) <= 1e-5 * max(np.linalg.norm(theirs), 1e-6)

    jax.tree.map(close, shared_grads, grads)


@pytest.mark.parametrize("name", families("deepseek_v3"))
def test_a_family_decodes_from_a_cache_to_the_logits_of_the_full_forward_pass(name):
    found, full = both_ways(dataclasses.replace(tiny(name), vocab_size=96), mesh_of((1, 1, 1)))
    assert full.std() > 0.1
    np.testing.assert_allclose(found, full, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), full.argmax(-1))
