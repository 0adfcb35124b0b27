"""The grouped matmul in eight bits: each group as if it were alone, on every back end."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.quant_rules import MX_BLOCK as BLOCK
from maxtext.config.schema import QuantConfig
from maxtext.kernels.quantized import matmul
from maxtext.kernels.quantized_groups import quantized_grouped_matmul
from maxtext.parallel.sharding import per_device, sharding
from tests.tiny import mesh_of

ROWS, IN, OUT, GROUPS = 5 * BLOCK + 7, 64, 32, 5
KINDS = ["int8", "fp8", "mxfp8"]
SIZES = {
    "uneven": [71, 1, 2 * BLOCK, 2, 9],
    "empty groups": [0, BLOCK, 0, 1, 0],
    "all in the last": [0, 0, 0, 0, ROWS],
    "none": [0, 0, 0, 0, 0],
}


@functools.cache
def arguments():
    """Rows, matrices and gradients whose size differs from group to group, so that a scale of another's shows."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in [(ROWS, IN), (GROUPS, IN, OUT), (ROWS, OUT)])
    x, dy = (a * np.exp2(rng.integers(-9, 10, (ROWS, 1))) for a in (x, dy))
    return tuple(np.float32(a) for a in (x, w * np.exp2(np.arange(GROUPS) * 4 - 8)[:, None, None], dy))


@functools.cache
def compiled(quant, backend="blocked"):
    """One program for all sizes."""

    @jax.jit
    def run(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: quantized_grouped_matmul(x, w, sizes, quant, backend), x, w)
        return y, *pull(dy)

    return run


def run(quant, sizes, backend="blocked", arrays=None):
    return compiled(quant, backend)(*(arrays or arguments()), jnp.array(sizes, jnp.int32))


@functools.cache
def alone(quant):
    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: matmul(x, w, quant), x, w)
        return y, *pull(dy)

    return run


def one_by_one(quant, sizes):
    """Each group by the dense matmul; its rows are filled up with zeros, which change no scale."""
    x, w, dy = arguments()
    y, dx, dw, stop = np.zeros((ROWS, OUT)), np.zeros((ROWS, IN)), np.zeros(w.shape), 0
    for group, size in enumerate(sizes):
        rows = slice(stop, stop := stop + size)
        filled = [np.pad(a[rows], ((0, 6 * BLOCK - size), (0, 0))) for a in (x, dy)]
        y_own, dx_own, dw[group] = alone(quant)(filled[0], w[group], filled[1])
        y[rows], dx[rows] = y_own[:size], dx_own[:size]
    return y, dx, dw


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_is_as_if_it_were_alone(kind, sizes):
    quant = QuantConfig(kind)
    for array, expected in zip(run(quant, sizes), one_by_one(quant, sizes), strict=True):
        scale = np.abs(expected).max(-1, keepdims=True)  # rows of large groups do not hide those of small ones
        assert (np.abs(array - expected) <= 1e-6 * scale).all()


@pytest.mark.one_pass
@pytest.mark.parametrize("backend", ["ragged_dot", "megablox_interpreted"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_back_end_multiplies_the_same_values(kind, backend):
    quant, sizes = QuantConfig(kind), SIZES["uneven"]
    for array, expected in zip(run(quant, sizes, backend), run(quant, sizes), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_group(kind):
    x, w, dy = (a.copy() for a in arguments())
    x[3, 5] = dy[75, 6] = np.nan  # of the first and of the third group
    y, dx, dw = (np.isfinite(a) for a in run(QuantConfig(kind), SIZES["uneven"], arrays=(x, w, dy)))
    assert not y[3].any()
    assert y.sum() == y.size - OUT
    assert not dx[75].any()
    assert dx.sum() == dx.size - IN
    assert not dw[0, 5].any()
    assert not dw[2, :, 6].any()
    assert dw.sum() == dw.size - OUT - IN


def test_gradients_of_matrices_may_stay_whole():
    sizes = SIZES["uneven"]
    _, dx, dw = run(QuantConfig("int8", weight_gradients=False), sizes)
    x, _, dy = (np.float64(a) for a in arguments())
    stops = np.cumsum([0, *sizes])
    exact = np.stack([x[a:b].T @ dy[a:b] for a, b in itertools.pairwise(stops)])
    np.testing.assert_allclose(dw, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(dx, run(QuantConfig("int8"), sizes)[1])


def test_random_rounding_reaches_the_gradients_alone():
    nearest, random = (run(QuantConfig("fp8", stochastic_rounding=s), SIZES["uneven"]) for s in (False, True))
    np.testing.assert_array_equal(nearest[0], random[0])
    exact = run(QuantConfig("mxfp8", weight_gradients=False), SIZES["uneven"])[2]
    for i in (1, 2):
        assert not np.array_equal(nearest[i], random[i])
    assert 0 < np.linalg.norm(random[2] - exact) < 0.2 * np.linalg.norm(exact)


def test_devices_sum_the_gradients_of_their_rows():
    """Scales are of a device's own rows; the matrices are everybody's."""
    mesh, quant = mesh_of((2, 1, 1)), QuantConfig("fp8")
    x, w, _ = arguments()
    x, sizes = x[: 4 * BLOCK], np.array([[40, 0, 20, 3, 1], [0, 1, 60, 0, 3]], np.int32)

    def local(x, w, sizes):
        return quantized_grouped_matmul(x, w, sizes.reshape(-1), quant)

    def loss(run):
        return jax.jit(jax.grad(lambda w, x, sizes: (run(x, w, sizes) / 1e6).sum()))

    with jax.set_mesh(mesh):
        dims = (("batch", None), (None, None, None), ("batch", None))
        placed = [jax.device_put(a, sharding(mesh, *d)) for a, d in zip((x, w, sizes), dims, strict=True)]
        got = loss(per_device(local, dims, ("batch", None)))(placed[1], placed[0], placed[2])
    half = x.shape[0] // 2
    expected = sum(loss(local)(w, x[i * half:(i + 1) * half], sizes[i]) for i in range(2))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
