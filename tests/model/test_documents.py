"""Document masking: a document's losses do not depend on what else its row holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.model.decoder import decoder_forward, init_decoder
from maxtext.model.loss import mean_loss
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

PATTERNS = {"windowed": ("window",), "full": ("full",), "both": ("window", "full")}


@pytest.fixture(params=PATTERNS)
def cfg(request):
    return tiny_config(tiny_model(n_layers=2, layer_pattern=PATTERNS[request.param], last_layer_full=False))


def hidden(cfg, tokens, segments):
    mesh = mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        params = init_decoder(cfg.model, jax.random.key(0))
        tokens, segments = place(tokens, mesh), None if segments is None else place(segments, mesh)
        return jax.jit(lambda p, t, s: decoder_forward(p, t, cfg.model, cfg.execution, s))(
            params, tokens, segments)


def test_a_document_sees_only_itself(cfg):
    """[A | B] and [A' | B]: B's hidden states are identical, and equal those of B alone; unmasked, they differ."""
    tokens = random_batch(cfg).tokens_BT
    border = 7
    other = tokens.copy()
    other[:, :border] = (other[:, :border] + 1) % 96
    segments = np.broadcast_to((np.arange(16) >= border).astype(np.int32), tokens.shape)
    packed, changed = hidden(cfg, tokens, segments), hidden(cfg, other, segments)
    np.testing.assert_array_equal(packed[:, border:], changed[:, border:])
    assert not np.allclose(packed[:, :border], changed[:, :border])
    alone = hidden(cfg, tokens[:, border:], None)
    # Sums over 16 and over 9 keys round differently: 1e-6 to 2e-6 in six batches, where values go up to 3.3.
    np.testing.assert_allclose(packed[:, border:], alone, atol=1e-6 * np.abs(alone).max())
    unmasked, unmasked_changed = hidden(cfg, tokens, None), hidden(cfg, other, None)
    assert np.abs(unmasked[:, border:] - unmasked_changed[:, border:]).max() > 1e-3


def test_one_document_a_row_is_the_same_as_no_documents(cfg):
    tokens = random_batch(cfg).tokens_BT
    np.testing.assert_allclose(hidden(cfg, tokens, np.zeros_like(tokens)), hidden(cfg, tokens, None), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 4, 2), (2, 2, 2)])
def test_losses_and_gradients_on_a_mesh(shape):
    cfg = tiny_config()
    batch = random_batch(cfg)
    segments = np.sort(np.random.default_rng(5).integers(0, 3, batch.tokens_BT.shape), axis=1).astype(np.int32)

    def loss_and_norm(shape):
        mesh = mesh_of(shape)
        with jax.set_mesh(mesh):
            params = init_decoder(cfg.model, jax.random.key(0))
            b = place(batch, mesh)
            (loss, _), grads = jax.jit(jax.value_and_grad(
                lambda p: mean_loss(p, b.tokens_BT, b.targets_BT, b.weights_BT, b.weights_BT.sum(), cfg,
                                    place(segments, mesh)), has_aux=True))(params)
            return float(loss), [float(jnp.sqrt((g**2).sum())) for g in jax.tree.leaves(grads)]

    (loss, norms), (exact_loss, exact_norms) = loss_and_norm(shape), loss_and_norm((1, 1, 1))
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-6)
    np.testing.assert_allclose(norms, exact_norms, rtol=1e-5)
