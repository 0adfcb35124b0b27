"""Fingerprints: the same on every mesh, different for every damage, and never changing between versions."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from maxtext.checkpoint import integrity
from tests.checkpoint.states import P, make_mesh, make_state

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.int32, np.uint32, np.bool_]


def random_bits(dtype: type, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 256, np.prod(shape, dtype=int) * np.dtype(dtype).itemsize, np.uint8)
    return (bits < 128 if dtype is np.bool_ else bits.view(dtype)).reshape(shape)


def sums(array: jax.Array, **how: int) -> tuple[int, int]:
    first, second, _ = integrity.leaf_sums(array, **how)
    return int(first), int(second)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_mesh_and_the_host_agree(dtype: type):
    host = random_bits(dtype, (8, 3, 16))
    expected = integrity.fingerprint_numpy(host)
    layouts = [
        (make_mesh(8), P("fsdp")),
        (make_mesh(4, 2), P("fsdp", None, "tensor")),
        (make_mesh(4, 2), P(None, None, ("fsdp", "tensor"))),
        (make_mesh(4, 2, AxisType.Auto), P("tensor", None, "fsdp")),
        (make_mesh(1), P()),
    ]
    for mesh, spec in layouts:
        assert sums(jax.device_put(host, NamedSharding(mesh, spec))) == expected, (mesh, spec)


def test_a_whole_state_has_one_fingerprint_whatever_the_mesh():
    expected = integrity.tree_fingerprints(make_state(make_mesh(8)))
    assert expected["params.blocks.1.wq"] != expected["params.blocks.0.wq"]
    assert list(expected)[:3] == ["params.embed", "params.blocks.0.wq", "params.blocks.0.norm"]
    assert {"optimizer.count", "optimizer.mu.blocks.0.norm", "optimizer.skipped", "key"} <= expected.keys()
    for fsdp, tensor in ((4, 2), (2, 2), (2, 1), (1, 1)):
        assert integrity.tree_fingerprints(make_state(make_mesh(fsdp, tensor))) == expected


def test_the_sums_are_those_of_earlier_versions():
    """Manifests on disk hold them: a change of the formula would condemn every checkpoint."""
    pinned = {
        "float32": (np.arange(6, dtype=np.float32).reshape(2, 3), (26474931, 2500708818)),
        "bool": (np.array([True, False, True]), (3988684711, 2144984074)),
        "scalar": (np.int32(-7), (3086469798, 2135946295)),
    }
    for name, (array, expected) in pinned.items():
        assert sums(jnp.asarray(array)) == expected, name
        assert integrity.fingerprint_numpy(np.asarray(array)) == expected, name


def test_one_flipped_bit_changes_both_sums():
    host = random_bits(np.float32, (64, 33))
    before = sums(jnp.asarray(host))
    rng = np.random.default_rng(1)
    for _ in range(200):
        flipped = host.copy()
        flipped.reshape(-1).view(np.uint32)[rng.integers(host.size)] ^= np.uint32(1 << rng.integers(32))
        after = sums(jnp.asarray(flipped))
        assert after[0] != before[0]
        assert after[1] != before[1]


def test_moved_values_change_both_sums():
    host = random_bits(np.float32, (64, 32))
    negated = np.concatenate([host[:1], -host[:1]])
    pairs = {
        "rows swapped": (host, host[[1, 0, *range(2, 64)]]),
        "shifted by one": (host, np.roll(host, 1)),
        "transposed": (host[:32], host[:32].T),
        "reshaped": (host[:32], host[:32].reshape(16, 64)[:, :32]),
        "only signs swapped": (negated, negated[::-1]),
        "a page of zeros": (host, np.concatenate([np.zeros_like(host[:8]), host[8:]])),
        "negative zero": (np.zeros(4, np.float32), np.array([0, 0, -0.0, 0], np.float32)),
    }
    for name, (a, b) in pairs.items():
        first, second = sums(jnp.asarray(a)), sums(jnp.asarray(b))
        assert first[0] != second[0], name
        assert first[1] != second[1], name


def test_arrays_of_more_elements_than_one_word_counts():
    """2^32 elements do not fit here, so the word is made to hold 16 positions; a plain index mod 16 would miss this."""
    host = random_bits(np.float32, (5, 4, 3))
    swapped = host.copy()
    swapped.reshape(-1)[[0, 16]] = host.reshape(-1)[[16, 0]]
    assert sums(jnp.asarray(host), word=16) == integrity.fingerprint_numpy(host, word=16)
    assert sums(jnp.asarray(host), word=16) != sums(jnp.asarray(host))
    assert sums(jnp.asarray(host), word=16) != sums(jnp.asarray(swapped), word=16)


def test_nan_and_infinite_values_are_counted():
    values = jnp.array([1, jnp.nan, -jnp.inf, 0], jnp.bfloat16)
    assert int(integrity.leaf_sums(values)[2]) == 2
    assert int(integrity.leaf_sums(jnp.array([2**31 - 1], jnp.int32))[2]) == 0


def test_typed_keys_are_told_apart_and_complex_arrays_refused():
    assert sums(jax.random.key(1)) != sums(jax.random.key(2))
    assert sums(jax.random.key(1)) == sums(jax.random.key_data(jax.random.key(1)))
    with pytest.raises(TypeError, match="no fingerprint for arrays of complex64"):
        integrity.leaf_sums(jnp.ones(2, jnp.complex64))


def test_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two leaves of the state are called a\.b"):
        integrity.tree_fingerprints({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    assert list(integrity.tree_fingerprints(jnp.ones(1))) == ["leaf"]
