"""Structure, initialisation and the forward pass of the decoder (numbers of the reference are in tests/oracles)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.layers import Layer, Segment, segments
from maxtext.config.schema import Execution, RematConfig
from maxtext.model.decoder import decoder_forward, decoder_params, init_decoder, leaf_names
from maxtext.parallel.sharding import is_param
from tests.tiny import MESHES, mesh_of, random_batch, tiny_config, tiny_model

W, F = Layer(6), Layer(None)


@pytest.mark.parametrize(("n_layers", "expected"), [
    (8, [Segment((W, W, W, F), 2)]),
    (4, [Segment((W, W, W, F), 1)]),
    (5, [Segment((W, W, W, F), 1), Segment((F,), 1)]),
    (7, [Segment((W, W, W, F), 1), Segment((W,), 2), Segment((F,), 1)]),
    (2, [Segment((W,), 1), Segment((F,), 1)]),
])
def test_layers_become_segments(n_layers, expected):
    model = tiny_model(n_layers=n_layers)
    assert list(segments(model)) == expected
    assert sum(segment.repeats * len(segment.layers) for segment in segments(model)) == n_layers


def test_every_array_is_declared_with_its_shape_and_a_name_of_its_own():
    declared = decoder_params(tiny_model())
    names = jax.tree.leaves(leaf_names(declared))
    assert len(set(names)) == len(names)
    assert {"embed", "head", "norm", "segments.0.2.attention.qkv", "segments.1.0.mlp.down"} <= set(names)
    with jax.set_mesh(mesh_of((1, 1, 1))):
        made = init_decoder(tiny_model(), jax.random.key(0))
    assert jax.tree.map(lambda p: p.shape, declared, is_leaf=is_param) == jax.tree.map(lambda x: x.shape, made)


def test_initial_weights_follow_the_reference_distribution():
    """Normal of 0.02 cut at 3 deviations and not rescaled: the realised deviation is 0.98658 of it; gains are 1."""
    model = tiny_model(vocab_size=4096, d_model=256, head_dim=32, d_ff=512)
    with jax.set_mesh(mesh_of((1, 1, 1))):
        made = init_decoder(model, jax.random.key(0))
    for name, x in zip(jax.tree.leaves(leaf_names(made)), jax.tree.leaves(made), strict=True):
        if "norm" in name:
            assert (x == 1).all()
            continue
        assert 0.0599 < float(jnp.abs(x).max()) <= 0.06
        np.testing.assert_allclose(float(x.std()), 0.02 * 0.98658, rtol=0.01)
        assert abs(float(x.mean())) < 2e-4


@pytest.mark.parametrize("shape", MESHES)
def test_initial_weights_do_not_depend_on_the_mesh(shape):
    def made_on(shape):
        with jax.set_mesh(mesh_of(shape)):
            return jax.tree.map(np.asarray, init_decoder(tiny_model(), jax.random.key(3)))

    jax.tree.map(np.testing.assert_array_equal, made_on((1, 1, 1)), made_on(shape))


def test_no_two_arrays_start_alike():
    with jax.set_mesh(mesh_of((1, 1, 1))):
        made = init_decoder(tiny_model(n_layers=8), jax.random.key(0))
    blocks = [np.asarray(block.mlp.down[r]) for block in made.segments[0] for r in range(2)]
    assert len({block.tobytes() for block in blocks}) == 8


def hidden(cfg, params, tokens, remat=None, dtype=jnp.float32):
    how = Execution(jnp.dtype(dtype).name, remat or RematConfig("none"))
    return jax.jit(lambda p, t: decoder_forward(p, t, cfg.model, how))(params, tokens)


def test_scanned_layers_equal_layers_one_after_another():
    cfg = tiny_config(tiny_model(n_layers=8))
    tokens = random_batch(cfg).tokens_BT
    with jax.set_mesh(mesh_of((1, 1, 1))):
        params = init_decoder(cfg.model, jax.random.key(0))
        scanned = hidden(cfg, params, tokens)
        # The same weights as eight segments of one layer each: a pattern as long as the stack.
        flat = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, layer_pattern=cfg.model.layer_pattern * 2))
        unrolled = params.replace(segments=(tuple(
            jax.tree.map(lambda w, r=r: w[r : r + 1], block) for r in range(2) for block in params.segments[0]),))
        assert segments(flat.model)[0].repeats == 1
        np.testing.assert_allclose(scanned, hidden(flat, unrolled, tokens), atol=1e-6)


def test_no_position_sees_the_future():
    cfg = tiny_config()
    tokens = random_batch(cfg).tokens_BT
    changed = tokens.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 96
    with jax.set_mesh(mesh_of((1, 1, 1))):
        params = init_decoder(cfg.model, jax.random.key(0))
        a, b = hidden(cfg, params, tokens), hidden(cfg, params, changed)
    np.testing.assert_array_equal(a[:, :9], b[:, :9])
    assert not np.allclose(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize("remat", [RematConfig("full"), RematConfig("names", ("qkv", "attention")),
                                   RematConfig("names", ("gate_up", "mlp_out", "attention_out")),
                                   RematConfig("offload")])
def test_remat_changes_no_gradient(remat):
    cfg = tiny_config()
    tokens = random_batch(cfg).tokens_BT
    with jax.set_mesh(mesh_of((1, 1, 1))):
        params = init_decoder(cfg.model, jax.random.key(0))
        # Weighted: a plain sum of squares is nearly constant behind a norm, and its gradient is only rounding.
        weight = np.random.default_rng(0).standard_normal(cfg.model.d_model, dtype=np.float32)
        kept, again = (jax.grad(lambda p, r=r: (hidden(cfg, p, tokens, r) * weight).sum())(params)
                       for r in (RematConfig("none"), remat))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())


def test_remat_by_name_keeps_only_what_is_listed():
    """Saved residuals: naming more values means fewer matmuls in the backward pass."""
    cfg = tiny_config()
    tokens = random_batch(cfg).tokens_BT

    def flops(remat):
        with jax.set_mesh(mesh_of((1, 1, 1))):
            params = init_decoder(cfg.model, jax.random.key(0))
            how = Execution(remat=remat)
            grad = jax.jit(jax.grad(lambda p: (decoder_forward(p, tokens, cfg.model, how) ** 2).sum()))
            return grad.lower(params).compile().cost_analysis()["flops"]

    modes = RematConfig("full"), RematConfig("names", ("gate_up",)), RematConfig("none")
    full, some, none = (flops(mode) for mode in modes)
    assert none < some < full


def test_compute_dtype_is_that_of_the_residual_stream():
    cfg = tiny_config()
    with jax.set_mesh(mesh_of((1, 1, 1))):
        params = init_decoder(cfg.model, jax.random.key(0))
        out = hidden(cfg, params, random_batch(cfg).tokens_BT, dtype=jnp.bfloat16)
        assert out.dtype == jnp.bfloat16
        exact = hidden(cfg, params, random_batch(cfg).tokens_BT)
    assert 0 < float(jnp.abs(out.astype(jnp.float32) - exact).max()) < 0.2
