"""Decoding with a cache gives the logits of the full forward pass at every position (of every family:
model/test_families.py)."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from maxtext.generate.cache import decode, prefill
from maxtext.model.loss import head_logits, logits
from maxtext.parallel.sharding import sharding
from tests.generate.families import FAMILIES, WINDOW, random_weights
from tests.tiny import mesh_of, tiny_config

LENGTH, STEPS = 10, 12
LENGTHS = np.array([1, 3, 7, LENGTH], np.int32)  # ragged, up to past the window
TOKENS = np.random.default_rng(0).integers(0, 96, (4, LENGTH + STEPS)).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def cached(params, tokens_BT, lengths_B, following_NB, model, dtype="float32"):
    """Logits after each prompt and after each following token, (N + 1, B, V)."""
    cache, x_B1D = prefill(params, tokens_BT, lengths_B, LENGTH + STEPS, model, dtype)
    first = head_logits(params, x_B1D)[:, 0]

    def step(cache, tokens_B):
        cache, x_B1D = decode(params, tokens_B, cache, model, dtype)
        return cache, head_logits(params, x_B1D)[:, 0]

    return first, jax.lax.scan(step, cache, following_NB)[1]


def both_ways(model, mesh, rows=slice(None), dtype="float32"):
    """Logits by the cache and by the full forward pass, at the same positions of every row, (B, N + 1, V)."""
    tokens_BT, lengths_B = TOKENS[rows], LENGTHS[rows]
    following_NB = np.stack([row[n : n + STEPS] for row, n in zip(tokens_BT, lengths_B, strict=True)], axis=1)
    with jax.set_mesh(mesh):
        params = random_weights(model, mesh)
        place = functools.partial(_place, mesh)
        # What stands behind the end of a prompt is its own continuation, so that seeing it would show.
        first, later = cached(params, place(tokens_BT[:, :LENGTH], "batch", None), place(lengths_B, "batch"),
                              place(following_NB, None, "batch"), model, dtype)
        full_BTV = jax.jit(lambda p, t: logits(p, t, tiny_config(model, compute_dtype=dtype)))(
            params, place(tokens_BT, "batch", None))
    found = np.concatenate([np.asarray(first)[None], np.asarray(later)]).swapaxes(0, 1)
    full = np.stack([row[n - 1 : n + STEPS] for row, n in zip(np.asarray(full_BTV), lengths_B, strict=True)])
    return found, full


def _place(mesh, array, *dims):
    return jax.device_put(array, sharding(mesh, *dims))


@pytest.mark.parametrize("family", ["olmo3", "gpt_oss"])
def test_ragged_rows_have_the_logits_of_the_full_forward_pass(family):
    assert STEPS > 2 * WINDOW
    found, full = both_ways(FAMILIES[family], mesh_of((1, 1, 1)))
    assert full.std() > 0.5  # weights that say something
    np.testing.assert_allclose(found, full, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), full.argmax(-1))


@pytest.mark.parametrize(("family", "shape", "expert"), [("gemma3", (1, 2, 2), 1), ("deepseek_v3", (1, 1, 2), 2)])
def test_on_a_mesh(family, shape, expert):
    found, full = both_ways(FAMILIES[family], mesh_of(shape, expert))
    np.testing.assert_allclose(found, full, atol=1e-4)


def test_a_cache_is_no_larger_than_what_is_read_again():
    def shapes(family):
        mesh = mesh_of((1, 1, 1))
        with jax.set_mesh(mesh):
            params = random_weights(FAMILIES[family], mesh)
            prompts = _place(mesh, TOKENS, "batch", None), _place(mesh, LENGTHS, "batch")
            cache, _ = jax.eval_shape(lambda *args: prefill(*args, 30, FAMILIES[family], "bfloat16"), params, *prompts)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.segments)} == {"bfloat16"}
        return [[jax.tree.map(lambda x: x.shape, (kept.keys, kept.values)) for kept in pattern]
                for pattern in cache.segments]

    window, full = (2, 4, WINDOW, 4, 8), (2, 4, 30, 4, 8)
    assert shapes("olmo3") == [[(window, window), (full, full)]]
    assert shapes("deepseek_v3") == [[((1, 4, 30, 1, 16), None)], [((2, 4, 30, 1, 16), None)]]
