"""Eight-bit matmuls: the error of a value against its format's, products against float64, and what stays visible."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.config.quant_rules import INT8_PRODUCTS
from maxtext.config.quant_rules import MX_BLOCK as BLOCK
from maxtext.config.schema import QuantConfig
from maxtext.kernels import quantized
from maxtext.kernels.quantized import dequantize, matmul
from maxtext.parallel.sharding import per_device, sharding, spec
from tests.tiny import mesh_of

KINDS = ["int8", "fp8", "mxfp8"]
quantize = jax.jit(quantized.quantize, static_argnums=(1, 2), static_argnames=("gradient", "salt"))
B, T, D, F = 4, 32, 64, 96


@functools.cache
def arguments():
    """x, w and the gradient of x @ w, of magnitudes that differ by thousands."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape) for shape in [(B, T, D), (D, 2, F), (B, T, 2, F)])
    return tuple(np.float32(a * np.exp2(rng.integers(-5, 6, a.shape))) for a in (x, w / 8, dy))


def largest(kind, gradient):
    return 127 if kind == "int8" else 57344 if gradient and kind == "fp8" else 448


def spread_over(scales, shape):
    """Scales in the shape of what they scale."""
    for axis, size in enumerate(shape):
        scales = np.repeat(scales, size // scales.shape[axis], axis)
    return scales


def by_hand(x, kind, axes, gradient=False):
    """x as eight bits have it, float64: from the published definitions of the formats alone."""
    x, most = np.asarray(x, np.float64), largest(kind, gradient)
    groups = np.moveaxis(x, axes, range(-len(axes), 0))
    if kind == "mxfp8":
        blocks = groups.reshape(*groups.shape[:-1], -1, BLOCK)
    else:
        blocks = groups.reshape(*groups.shape[: -len(axes)], -1)
    scales = np.abs(blocks).max(-1, keepdims=True) / most
    if kind != "int8":
        scales = 2.0 ** np.ceil(np.log2(scales))
    if kind == "int8":
        values = np.round(blocks / np.float32(scales))
    else:
        dtype = ml_dtypes.float8_e5m2 if gradient and kind == "fp8" else ml_dtypes.float8_e4m3fn
        values = (blocks / scales).astype(dtype).astype(np.float64)
    return np.moveaxis((values * scales).reshape(groups.shape), range(-len(axes), 0), axes)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_value_is_half_a_step_of_its_format(kind, gradient):
    """A step is relative to the value, or near zero to the largest of those that share its scale."""
    x = arguments()[0]
    q = quantize(x, kind, (2,), gradient=gradient)
    scales = spread_over(np.asarray(q.scales, np.float64), x.shape)
    error = np.abs(np.float64(x) - np.asarray(dequantize(q), np.float64))
    bits, least = (2, -16) if gradient and kind == "fp8" else (3, -9)  # of the mantissa; exponent of the least value
    bound = scales / 2 if kind == "int8" else np.maximum(np.abs(x) * 2.0 ** -(bits + 1), scales * 2.0 ** (least - 1))
    assert (error <= bound * (1 + 1e-6)).all()
    assert (error / bound).max() > 0.85  # the bound is no larger than need be
    top = np.abs(x).reshape(B, T, -1, BLOCK if kind == "mxfp8" else D).max(-1)
    assert (top / q.scales <= largest(kind, gradient) * (1 + 1e-6)).all()  # nothing saturates
    assert (top / q.scales > largest(kind, gradient) * 0.499).all()  # and no range is wasted
    if kind != "int8":
        np.testing.assert_array_equal(np.asarray(q.scales).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
                                      q.scales)


@functools.cache
def compiled(quant):
    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: matmul(x, w, quant), x, w)
        return y, *pull(dy)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_are_products_of_what_eight_bits_hold(kind):
    """Against float64; each matmul quantises both its operands along what it sums over."""
    x, w, dy = arguments()
    got = compiled(QuantConfig(kind))(x, w, dy)
    expected = (
        np.einsum("btd,dgf->btgf", by_hand(x, kind, (2,)), by_hand(w, kind, (0,))),
        np.einsum("btgf,dgf->btd", by_hand(dy, kind, (2, 3), True), by_hand(w, kind, (1, 2))),
        np.einsum("btd,btgf->dgf", by_hand(x, kind, (0, 1)), by_hand(dy, kind, (0, 1), True)),
    )
    for array, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(array, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_several_dims_are_summed_over():
    x, w, dy = arguments()
    x, w = dy, w.transpose(1, 2, 0)
    y = jax.jit(lambda x, w: matmul(x, w, QuantConfig("mxfp8"), contract=2))(x, w)
    exact = np.einsum("btgf,gfd->btd", by_hand(x, "mxfp8", (2, 3)), by_hand(w, "mxfp8", (0, 1)))
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_gradients_of_weights_may_stay_whole():
    x, w, dy = arguments()
    got = compiled(QuantConfig("int8", weight_gradients=False))(x, w, dy)
    exact = np.einsum("btd,btgf->dgf", np.float64(x), np.float64(dy))
    np.testing.assert_allclose(got[2], exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())
    np.testing.assert_array_equal(got[1], compiled(QuantConfig("int8"))(x, w, dy)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once(kind):
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in arguments())
    got = compiled(QuantConfig(kind))(x, w, dy)
    again = compiled(QuantConfig(kind))(*(a.astype(jnp.float32) for a in (x, w, dy)))
    for array, whole in zip(got, again, strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(array, np.float32), whole, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_changes_nothing_but_the_order_of_sums(kind):
    """Tokens, and the dims summed over in both directions, are split over devices; random numbers stay the same."""
    mesh, quant = mesh_of((2, 1, 2)), QuantConfig(kind, stochastic_rounding=True)
    x, up, dy = (a[..., : BLOCK * 2] for a in arguments())
    up, hidden, down, dy = up[:, 0], dy[:, :, 1], up[:, 1].T, dy[:, :, 0]

    def both(x, up, hidden, down, dy, out_sharding=None):  # the last as between layers: positions split too
        y, pull = jax.vjp(lambda x, w: matmul(x, w, quant), x, up)
        z, pull_down = jax.vjp(lambda x, w: matmul(x, w, quant, out_sharding=out_sharding), hidden, down)
        return y, *pull(hidden), z, *pull_down(dy)

    arrays = (x, up, hidden, down, dy)
    alone = jax.jit(both)(*arrays)
    dims = [("batch", None, None), (None, "mlp"), ("batch", None, "mlp"), ("mlp", None), ("batch", "residual", None)]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, sharding(mesh, *d)) for a, d in zip(arrays, dims, strict=True)]
        spread = jax.jit(functools.partial(both, out_sharding=spec("batch", "residual", None)))(*placed)
    for one, other in zip(alone, spread, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * np.abs(one).max())


def test_inside_per_device_each_takes_its_own_scales():
    mesh, quant = mesh_of((2, 1, 1)), QuantConfig("fp8")
    x, w, _ = arguments()
    x = x[:, 0]
    with jax.set_mesh(mesh):
        dims = (("batch", None), (None, None, None))
        placed = [jax.device_put(a, sharding(mesh, *d)) for a, d in zip((x, w), dims, strict=True)]
        run = per_device(lambda x, w: matmul(x, w, quant), dims, ("batch", None, None))
        y, grad = jax.jit(jax.value_and_grad(lambda x, w: (run(x, w) ** 2).sum(), argnums=1))(*placed)
    half_of = jax.jit(jax.value_and_grad(lambda w, x: (matmul(x, w, quant) ** 2).sum()))
    halves = [half_of(w, half) for half in (x[:2], x[2:])]
    np.testing.assert_allclose(y, sum(half[0] for half in halves), rtol=1e-6)
    np.testing.assert_allclose(grad, sum(half[1] for half in halves), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_the_ends_of_float32(kind):
    rows = np.ones((4, D), np.float32) * np.float32([[0.0], [3e38], [1e-37], [1e-44]])
    q = quantize(rows, kind, (1,))
    assert np.isfinite(q.scales).all()
    whole = np.asarray(dequantize(q))
    np.testing.assert_array_equal(whole[0], 0)
    np.testing.assert_allclose(whole[1], 3e38, rtol=2**-4)
    np.testing.assert_allclose(whole[2], 1e-37, rtol=0.1)
    np.testing.assert_allclose(whole[3], 0, atol=1e-43)
    y = jax.jit(lambda x: matmul(x, jnp.eye(BLOCK), QuantConfig(kind)))(rows[:, :BLOCK])
    assert np.isfinite(np.asarray(y)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind, bad):
    """In every result that it takes part in, and in no other."""
    x, w, dy = (a.copy() for a in arguments())
    x[1, 2, 3] = dy[0, 5, 1, 6] = bad
    assert np.isnan(quantize(x, kind, (2,)).scales[1, 2, 0])
    y, dx, dw = (np.isfinite(a) for a in compiled(QuantConfig(kind))(x, w, dy))
    assert not y[1, 2].any()
    assert not dx[0, 5].any()
    assert not dw[3].any()
    assert not dw[:, 1, 6].any()
    assert y.sum() == y.size - 2 * F
    assert dx.sum() == dx.size - D
    assert dw.sum() == (D - 1) * (2 * F - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_random_rounding_has_the_value_as_its_mean(kind):
    """Over 20,000 places with the same value, all roundings are to its two neighbours, in the right shares."""
    count, value = 20_000, np.float32(0.3)
    x = np.full((count, BLOCK), value)
    x[:, 0] = 1  # gives the scale
    q = quantize(x, kind, (1,), gradient=True, salt=1)
    found = np.asarray(dequantize(q))[:, 1]
    low, high = found.min(), found.max()
    assert low < value < high
    assert set(np.unique(found)) == {low, high}
    spread = (high - low) / 2 / np.sqrt(count)
    assert abs(found.mean() - value) < 4 * spread
    nearest = np.asarray(dequantize(quantize(x, kind, (1,), gradient=True)))[0, 1]
    assert abs(nearest - value) > 10 * spread  # rounding to the nearest would show
    other = np.asarray(dequantize(quantize(x, kind, (1,), gradient=True, salt=2)))[:, 1]
    up = (value - low) / (high - low)
    assert abs(np.mean(found == other) - (up**2 + (1 - up) ** 2)) < 0.02  # another salt, other numbers
    again = np.asarray(dequantize(quantize(x, kind, (1,), gradient=True, salt=1)))[:, 1]
    np.testing.assert_array_equal(found, again)


def test_random_rounding_reaches_the_gradients_alone():
    nearest, random = (compiled(QuantConfig("fp8", stochastic_rounding=on))(*arguments()) for on in (False, True))
    np.testing.assert_array_equal(nearest[0], random[0])
    for one, other in zip(nearest[1:], random[1:], strict=True):
        assert 0.01 < np.linalg.norm(one - other) / np.linalg.norm(one) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_random_rounding_leaves_what_eight_bits_hold(kind):
    x = quantize(arguments()[0], kind, (2,), gradient=True)
    again = quantize(dequantize(x), kind, (2,), gradient=True, salt=3)
    np.testing.assert_allclose(dequantize(again), dequantize(x), rtol=1e-6)


def test_int8_is_summed_in_integers_and_refuses_sums_that_they_may_not_hold():
    x, w, dy = arguments()
    text = str(jax.make_jaxpr(compiled(QuantConfig("int8")))(x, w, dy))
    assert text.count("preferred_element_type=int32") == 3
    long = jax.ShapeDtypeStruct((1, INT8_PRODUCTS + 1), jnp.float32)
    with pytest.raises(ValueError, match="weight_gradients"):
        jax.eval_shape(lambda x: matmul(x, x.T, QuantConfig("int8")), long)


def test_blocks_that_do_not_fit_are_refused():
    x = jnp.zeros((4, BLOCK + 8))
    with pytest.raises(ValueError, match="blocks of 32, which do not divide a dim of 40 on 1 devices, 40 each"):
        quantize(x, "mxfp8", (1,))
    mesh = mesh_of((1, 1, 2))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="a dim of 96 on 2 devices, 48 each"):
        jax.eval_shape(lambda x: quantize(x, "mxfp8", (1,)), jax.device_put(jnp.zeros((4, 96)),
                                                                            sharding(mesh, None, "mlp")))
