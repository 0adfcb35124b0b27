"""Every back end of the grouped matmul against a loop over the groups, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.grouped_matmul import BLOCK, grouped_matmul
from maxtext.parallel.sharding import per_device, sharding
from tests.tiny import mesh_of

ROWS, IN, OUT, GROUPS = 2 * BLOCK + 44, 6, 4, 5
BACKENDS = ["blocked", "ragged_dot", "megablox_interpreted"]
SIZES = {
    "uneven": [100, 7, 130, 13, 50],
    "empty groups": [0, 200, 0, 100, 0],
    "rows in no group": [3, 0, BLOCK, 0, 60],
    "whole blocks": [BLOCK, BLOCK, 0, 44, 0],
    "all in the first": [ROWS, 0, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, ROWS],
    "none": [0, 0, 0, 0, 0],
}


@functools.cache
def arguments(rows=ROWS):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in
                 [(rows, IN), (GROUPS, IN, OUT), (rows, OUT)])


def by_loop(x, w, dy, sizes):
    """Result, and gradients of sum(dy * result), in float64."""
    x, w, dy = (array.astype(np.float64) for array in (x, w, dy))
    y, dx, dw, stop = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w), 0
    for group, size in enumerate(sizes):
        rows = slice(stop, stop := stop + size)
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], dy[rows] @ w[group].T, x[rows].T @ dy[rows]
    return y, dx, dw


@functools.cache
def compiled(backend):
    """One program for all sizes."""

    @jax.jit
    def run(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend), x, w)
        return y, *pull(dy)

    return run


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_meets_the_matrix_of_its_group(backend, sizes):
    got = compiled(backend)(*arguments(), jnp.array(sizes, jnp.int32))
    for array, expected in zip(got, by_loop(*arguments(), sizes), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_fewer_rows_than_a_block(backend):
    sizes = [1, 0, 2, 0, 1]
    got = compiled(backend)(*arguments(5), jnp.array(sizes, jnp.int32))
    for array, expected in zip(got, by_loop(*arguments(5), sizes), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_rounded_once(backend):
    """Sums over 300 rows in bfloat16 would be off by several per cent."""
    x, w, dy = (jnp.asarray(array, jnp.bfloat16) for array in arguments())
    sizes = SIZES["all in the first"]
    got = compiled(backend)(x, w, dy, jnp.array(sizes, jnp.int32))
    exact = by_loop(*(np.asarray(array, np.float32) for array in (x, w, dy)), sizes)
    for array, expected in zip(got, exact, strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(array, np.float32), expected, rtol=2**-8, atol=1e-3)


def test_no_multiplication_by_all_matrices_on_cpu():
    """There XLA's own ragged_dot multiplies every row by every matrix."""
    x, w, _ = arguments()
    text = str(jax.make_jaxpr(grouped_matmul)(x, w, jnp.array(SIZES["uneven"], jnp.int32)))
    assert "ragged_dot" not in text
    assert f"f32[{BLOCK},{OUT}] = dot_general" in text


def test_the_tpu_kernel_is_traced_where_types_tell_of_the_mesh():
    """The kernels of megablox were written without such types. Shapes only: they run on no CPU."""
    mesh = mesh_of((2, 1, 1))
    with jax.set_mesh(mesh):
        dims = (("batch", None), (None, None, None), (None,))
        arrays = (*arguments()[:2], np.array(SIZES["uneven"], np.int32))
        placed = [jax.device_put(a, sharding(mesh, *d)) for a, d in zip(arrays, dims, strict=True)]
        run = per_device(functools.partial(grouped_matmul, backend="megablox"), dims, ("batch", None))
        grads = jax.eval_shape(jax.grad(lambda x, w, sizes: run(x, w, sizes).sum(), argnums=(0, 1)), *placed)
    assert [grad.shape for grad in grads] == [arrays[0].shape, arrays[1].shape]
