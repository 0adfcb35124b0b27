"""Norm, rotary tables and positions against the reference's numbers (oracles/rope.json) and the formulas."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.architecture import RopeScalingConfig
from maxtext.model import layers
from maxtext.model.decoder import make_context, make_rows, row_positions
from maxtext.model.layers import (
    apply_rope,
    document_positions,
    rms_norm,
    rope_frequencies,
    rope_tables,
    stretched,
    table_factor,
)
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

ROPE = json.loads((Path(__file__).parents[1] / "oracles" / "rope.json").read_text())
YARN = RopeScalingConfig(kind="yarn", factor=8.0, original_length=8192)


@pytest.mark.parametrize("width", ROPE)
def test_frequencies_equal_the_reference(width):
    plain = rope_frequencies(int(width), 500000.0)
    np.testing.assert_allclose(plain, ROPE[width]["inv_freq"], rtol=3e-7)
    np.testing.assert_allclose(stretched(plain, 500000.0, YARN), ROPE[width]["yarn_inv_freq"], rtol=3e-7)
    np.testing.assert_allclose(table_factor(YARN), ROPE[width]["attention_rescale_factor"], rtol=1e-12)


def test_yarn_changes_only_the_scaled_tables_and_their_length():
    model = tiny_model(rope_scaling=YARN)
    plain, scaled = (rope_tables(model, jnp.arange(32), window=flag) for flag in (True, False))
    unscaled_model = rope_tables(tiny_model(), jnp.arange(32), window=False)
    np.testing.assert_array_equal(plain.cos, unscaled_model.cos)
    np.testing.assert_allclose(scaled.cos**2 + scaled.sin**2, 1.2079441541679836**2, rtol=1e-5)


def test_rope_turns_the_two_halves_by_position_times_frequency():
    x = np.random.default_rng(0).standard_normal((1, 5, 1, 8)).astype(np.float32)
    got = apply_rope(x, rope_tables(tiny_model(rope_theta=500000.0), jnp.arange(5), window=True))
    for t in range(5):
        for i in range(4):
            angle = t * 500000.0 ** (-2 * i / 8)
            turned = (x[0, t, 0, i] + 1j * x[0, t, 0, i + 4]) * np.exp(1j * angle)
            np.testing.assert_allclose([got[0, t, 0, i], got[0, t, 0, i + 4]], [turned.real, turned.imag], atol=1e-6)


def test_positions_restart_at_each_document():
    segments = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 2, 3, 3]], np.int32)
    expected = [[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 0, 1, 2, 3, 0, 1]]
    np.testing.assert_array_equal(jax.jit(document_positions)(segments), expected)


def test_positions_on_a_mesh():
    cfg, mesh = tiny_config(), mesh_of((2, 2, 2))
    segments = np.sort(random_batch(cfg).tokens_BT, axis=1)
    with jax.set_mesh(mesh):

        def cosines(s):
            return make_context(cfg.model, row_positions(s.shape[1]), make_rows(s, None)).full_rope.cos

        made = jax.jit(cosines)(place(segments, mesh))
        expected = rope_tables(cfg.model, document_positions(segments), window=False).cos
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_rms_norm_applies_the_gain_before_rounding():
    """The reference multiplies in float32 and rounds once; Llama rounds first. They differ in bfloat16."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), jnp.bfloat16)
    gain = jnp.asarray(np.random.default_rng(1).standard_normal(32), jnp.float32)
    x64 = np.asarray(x, np.float64)
    normed = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6)
    expected = jnp.asarray((normed * np.asarray(gain, np.float64)).astype(np.float32), jnp.bfloat16)
    wrong = jnp.asarray(normed.astype(np.float32), jnp.bfloat16) * gain.astype(jnp.bfloat16)
    got = rms_norm(x, gain, tiny_model())
    assert (got == expected).mean() > 0.99
    assert (got == wrong).mean() < 0.9


@pytest.mark.one_pass
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rope_by_a_matmul_is_the_same_to_the_bit(monkeypatch, pairs, dtype):
    """The form for TPUs, forward and backward; without a compiler that may join a product and a sum."""
    x, dy = jax.random.normal(jax.random.key(0), (2, 2, 5, 3, 16), jnp.float32).astype(dtype)
    angle = jax.random.normal(jax.random.key(1), (5, 8))
    rope = layers.Rope(jnp.cos(angle), jnp.sin(angle))

    def both(name):
        monkeypatch.setattr(layers, "platform", lambda: name)
        y, pull = jax.vjp(lambda x: apply_rope(x, rope, pairs), x)
        return y, *pull(dy)

    for turned, expected in zip(both("tpu"), both("cpu"), strict=True):
        np.testing.assert_array_equal(turned, expected)
