"""Every family, by the tiny model behind its trace: from a cache the numbers of a forward pass."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from maxtext.config.schema import ModelConfig
from maxtext.convert.config_json import read_model
from maxtext.convert.families import family_of
from tests.convert.tiny_families import NAMES, trace_of
from tests.generate.test_cache import both_ways
from tests.tiny import mesh_of


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


@pytest.mark.parametrize("name", families("deepseek_v3"))
def test_a_family_decodes_from_a_cache_to_the_logits_of_the_full_forward_pass(name):
    found, full = both_ways(dataclasses.replace(tiny(name), vocab_size=96), mesh_of((1, 1, 1)))
    assert full.std() > 0.1
    np.testing.assert_allclose(found, full, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), full.argmax(-1))
