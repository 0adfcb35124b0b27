"""Which tokens may be drawn, exactly, and how they are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.generate.sampler import Sampling, allowed, sample, sample_rows

LIKELY = [0.1, 0.4, 0.05, 0.3, 0.15]  # by size: tokens 1, 3, 4, 0, 2
EQUAL = [0.25, 0.25, 0.25, 0.25]


def kept(probabilities, top_k=None, top_p=1.0):
    return np.flatnonzero(allowed(jnp.log(jnp.array(probabilities)), top_k, top_p)).tolist()


@pytest.mark.parametrize(("top_p", "expected"), [
    (0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.84, [1, 3, 4]),
    (0.86, [0, 1, 3, 4]), (0.94, [0, 1, 3, 4]), (0.96, [0, 1, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4])])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, expected):
    assert kept(LIKELY, top_p=top_p) == expected


def test_of_equal_tokens_those_of_lower_ids_are_kept():
    assert kept(EQUAL, top_p=0.5) == [0, 1]  # exactly reached
    assert kept(EQUAL, top_p=0.51) == [0, 1, 2]
    assert kept(EQUAL, top_k=3) == [0, 1, 2]
    assert kept([0.2, 0.4, 0.4], top_k=1) == [1]


def test_top_k_comes_before_top_p():
    assert kept(LIKELY, top_k=2) == [1, 3]
    assert kept(LIKELY, top_k=9) == [0, 1, 2, 3, 4]
    # Of 0.4 and 0.3 alone, the first has 0.571.
    assert kept(LIKELY, top_k=2, top_p=0.56) == [1]
    assert kept(LIKELY, top_k=2, top_p=0.58) == [1, 3]


def test_a_token_of_probability_zero_is_never_kept():
    logits = jnp.array([-jnp.inf, 0.0, -jnp.inf, -1.0])
    assert np.flatnonzero(allowed(logits, 4, 1.0)).tolist() == [1, 3]
    assert np.flatnonzero(allowed(logits, None, 0.99999)).tolist() == [1, 3]


def test_temperature_zero_takes_the_likeliest_and_of_these_the_lowest_id():
    assert sample(jnp.array([1.0, 3.0, 2.0, 3.0]), jax.random.key(0), Sampling()) == 1


def test_frequencies_are_the_probabilities():
    """20,000 draws at temperature 0.5, which squares the probabilities, among the likeliest three."""
    logits_BV = jnp.tile(jnp.log(jnp.array(LIKELY)), (20_000, 1))
    drawn = jax.jit(lambda x, rows: sample_rows(x, rows, jnp.int32(0), jnp.uint32(0), Sampling(0.5, top_k=3)))(
        logits_BV, jnp.arange(20_000))
    expected = np.array([0, 0.4**2, 0, 0.3**2, 0.15**2])
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 20_000, expected / expected.sum(), atol=0.01)


def test_a_draw_depends_on_seed_row_and_step_alone():
    rng = np.random.default_rng(0)
    logits_BV = jnp.asarray(rng.normal(size=(64, 50)), jnp.float32)
    draw = jax.jit(lambda x, rows, step, seed: sample_rows(x, rows, step, seed, Sampling(1.0)))
    rows_B = jnp.arange(64)
    first = draw(logits_BV, rows_B, 0, 0)
    np.testing.assert_array_equal(draw(logits_BV[::-1], rows_B[::-1], 0, 0), first[::-1])
    others = draw(logits_BV, rows_B, 1, 0), draw(logits_BV, rows_B, 0, 1), draw(logits_BV, rows_B + 64, 0, 0)
    assert all((other != first).mean() > 0.5 for other in others)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_the_lowest_temperatures_take_the_likeliest(temperature):
    logits_V = jnp.array([-jnp.inf, 2.0, 5.0, 4.0])
    assert all(sample(logits_V, jax.random.key(i), Sampling(temperature, top_k=3)) == 2 for i in range(4))


@pytest.mark.parametrize(("choice", "message"), [
    ({"temperature": -1.0}, "temperature -1.0 is below 0"), ({"temperature": float("nan")}, "temperature nan"),
    ({"temperature": float("inf")}, "temperature inf leaves nothing"),
    ({"top_k": 0}, "top_k 0 leaves no token"), ({"top_p": 0.0}, "top_p 0.0 is no probability"),
    ({"top_p": 1.5}, "top_p 1.5 is no")])
def test_choices_that_are_none(choice, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**choice)
