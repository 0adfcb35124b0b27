"""What the backward pass keeps under each setting of remat."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxtext.config.schema import DEFAULT_EXECUTION, REMAT_PRESETS, ModelConfig, RematConfig
from maxtext.model.cost import kept_values
from maxtext.model.decoder import block_forward, make_context, rematerialised
from maxtext.parallel.sharding import spec
from tests.generate.families import random_weights
from tests.tiny import mesh_of, tiny_model

B, T = 2, 24
MODEL = tiny_model(n_layers=1, layer_pattern=("full",), d_ff=112)
SETTINGS = [RematConfig("full"), *map(RematConfig, REMAT_PRESETS),
            *(RematConfig("names", (name,)) for name in REMAT_PRESETS["minimal"][0]),
            RematConfig("names", ("gate_up",), ("block", "qkv"))]


def residuals(model: ModelConfig, remat: RematConfig) -> list[Any]:
    """What one layer keeps of each token."""
    mesh = mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        params = random_weights(model, mesh)
        block = jax.tree.map(lambda w: w[0], params.segments[0][0])
        x_BTD = jnp.zeros((B, T, model.d_model), out_sharding=spec("batch", "residual", None))

        def backward(block: Any, x_BTD: jax.Array) -> Any:
            context = make_context(model, jnp.arange(T))
            run = rematerialised(block_forward, remat)
            layer = lambda block, x: run(block, x, context, model, None, DEFAULT_EXECUTION, None)[0]  # noqa: E731
            return jax.vjp(layer, block, x_BTD)[1]

        found = jax.tree.leaves(jax.eval_shape(backward, block, x_BTD))
    return [x for x in found if x.shape[:2] == (B, T) or x.shape[:1] == (B * T,)]


@pytest.mark.parametrize("remat", SETTINGS, ids=lambda r: "-".join((r.mode, *r.save, *r.offload)))
def test_a_layer_keeps_what_the_estimate_says(remat: RematConfig):
    kept = sum(x.size for x in residuals(MODEL, remat)) / (B * T)
    assert kept == sum(kept_values(MODEL, remat))


def test_presets_keep_less_and_less_on_the_devices():
    def here(mode: Any) -> int:
        return kept_values(MODEL, RematConfig(mode))[0]

    assert here("none") > here("minimal") > here("balanced") > here("full") > here("offload") == 0
    assert kept_values(MODEL, RematConfig("offload"))[1] == here("balanced")
