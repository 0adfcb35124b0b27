"""Matmul of sorted rows, each by the matrix of its group: the experts of a routed layer.

One function, with a back end for each platform behind it. Where a row stands decides its matrix, so that no row is
multiplied by the matrices of other groups.

Dims: M row, K width in, N width out, E group, R row of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.parallel.collectives import platform, untyped, vary, varying_axes

Backend = Literal["blocked", "ragged_dot", "megablox", "megablox_interpreted"]

BACKENDS: dict[str, Backend] = {"cpu": "blocked", "gpu": "blocked", "tpu": "megablox"}  # others: ragged_dot
BLOCK = 128  # rows of one matmul of the blocked back end
TILES = (512, 1024, 1024)  # most rows, width in and width out of a step of megablox in bfloat16: 12 MiB of VMEM


def default_backend(platform: str) -> Backend:
    """The back end of a platform."""
    return BACKENDS.get(platform, "ragged_dot")


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, backend: Backend | None = None) -> jax.Array:
    """Multiplies the first sizes[0] rows of x by w[0], the next sizes[1] by w[1], and so on.

    Args:
      x_MK: rows sorted by group.
      w_EKN: a matrix for each group, in the dtype of x.
      sizes_E: int32 rows of each group; their sum is at most M. Rows beyond it give zeros, and get zero gradients.
      backend: by default the platform's; they differ by rounding only.

    Returns:
      (M, N) in the dtype of x; sums are taken in float32. Differentiable in x and w.
    """
    backend = backend or default_backend(platform())
    return _grouped(backend, *vary((x_MK, w_EKN, sizes_E), varying_axes(x_MK, w_EKN, sizes_E)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(backend: Backend, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return multiply(backend, x_MK, w_EKN, sizes_E)


def _forward(backend: Backend, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple:
    return multiply(backend, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(backend: Backend, saved: tuple, dy_MN: jax.Array) -> tuple:
    x_MK, w_EKN, sizes_E = saved
    return multiply(backend, dy_MN, w_EKN, sizes_E, transposed=True), outer(backend, x_MK, dy_MN, sizes_E), None


_grouped.defvjp(_forward, _backward)


def multiply(backend: Backend, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, transposed: bool = False,
             dtype: Any = None) -> jax.Array:
    """One grouped matmul, without gradients. With `transposed`, w is (E, N, K). `dtype` of the result; None: x's."""
    dtype = dtype or x_MK.dtype
    if backend.startswith("megablox"):
        y_MN = _megablox(backend, x_MK, w_EKN, sizes_E, transposed, dtype)
    else:
        w_EKN = w_EKN.swapaxes(1, 2) if transposed else w_EKN
        if backend == "blocked":
            return _blocked(x_MK, w_EKN, sizes_E, dtype)
        y_MN = _ragged_dot(x_MK, w_EKN, sizes_E, dtype)
    # What these leave in rows that are in no group is not the same everywhere.
    return jnp.where(jnp.arange(x_MK.shape[0])[:, None] < sizes_E.sum(), y_MN, 0)


def outer(backend: Backend, x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, dtype: Any = None) -> jax.Array:
    """(E, K, N): for each group, the sum over its rows of x times dy, the gradient of its matrix."""
    dtype = dtype or x_MK.dtype
    if backend == "blocked":
        return _blocked_outer(x_MK, dy_MN, sizes_E, dtype)
    if backend == "ragged_dot":
        return _ragged_dot_outer(x_MK, dy_MN, sizes_E, dtype)
    return _megablox_outer(backend, x_MK, dy_MN, sizes_E, dtype)


# Blocked: a loop over blocks of rows of one group. Each group is rounded up to whole blocks; the loop ends with the
# last row that is in a group.


class _Block(NamedTuple):
    """Rows [first, first + R) of the arrays, of which the `valid` ones are of this group and not in another block."""

    group: jax.Array
    first: jax.Array
    valid_R1: jax.Array


def _block(index: jax.Array, sizes_E: jax.Array, rows: int, total: int) -> _Block:
    blocks_E = -(-sizes_E // rows)
    stop_E, block_stop_E = jnp.cumsum(sizes_E), jnp.cumsum(blocks_E)
    group = (index >= block_stop_E).sum(dtype=jnp.int32)
    stop = stop_E[group]
    start = stop - sizes_E[group] + (index - block_stop_E[group] + blocks_E[group]) * rows
    first = jnp.minimum(start, total - rows)  # a slice never leaves the array
    row_R = first + jnp.arange(rows)
    return _Block(group, first, ((row_R >= start) & (row_R < stop))[:, None])


def _blocked(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
    total, rows = x_MK.shape[0], min(BLOCK, x_MK.shape[0])

    def body(index: jax.Array, y_MN: jax.Array) -> jax.Array:
        block = _block(index, sizes_E, rows, total)
        x_RK = jax.lax.dynamic_slice_in_dim(x_MK, block.first, rows)
        y_RN = jnp.matmul(x_RK, jax.lax.dynamic_index_in_dim(w_EKN, block.group, keepdims=False),
                          preferred_element_type=dtype)
        y_RN = jnp.where(block.valid_R1, y_RN, jax.lax.dynamic_slice_in_dim(y_MN, block.first, rows))
        return jax.lax.dynamic_update_slice_in_dim(y_MN, y_RN, block.first, axis=0)

    zeros_MN = vary(jnp.zeros((total, w_EKN.shape[2]), dtype), varying_axes(x_MK))
    return _over_blocks(sizes_E, rows, total, body, zeros_MN)


def _blocked_outer(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
    sums = jnp.int32 if dtype == jnp.int32 else jnp.float32
    total, rows = x_MK.shape[0], min(BLOCK, x_MK.shape[0])

    def body(index: jax.Array, dw_EKN: jax.Array) -> jax.Array:
        block = _block(index, sizes_E, rows, total)
        # Both: 0 times what is not finite in a row of another group is not 0.
        x_RK, dy_RN = (jnp.where(block.valid_R1, jax.lax.dynamic_slice_in_dim(array, block.first, rows), 0)
                       for array in (x_MK, dy_MN))
        return dw_EKN.at[block.group].add(jnp.einsum("rk,rn->kn", x_RK, dy_RN, preferred_element_type=sums))

    shape = (sizes_E.shape[0], x_MK.shape[1], dy_MN.shape[1])
    zeros_EKN = vary(jnp.zeros(shape, sums), varying_axes(x_MK))
    return _over_blocks(sizes_E, rows, total, body, zeros_EKN).astype(dtype)


def _over_blocks(sizes_E: jax.Array, rows: int, total: int, body: Callable[..., jax.Array], start: jax.Array
                 ) -> jax.Array:
    """A loop as long as the groups need. Its scope names the trips of equal groups, by which a plan counts it."""
    groups = sizes_E.shape[0]
    with jax.named_scope(f"loop_trips_{groups * -(-total // (groups * rows))}"):
        return jax.lax.fori_loop(0, (-(-sizes_E // rows)).sum(), body, start)


# jax.lax.ragged_dot: what XLA has. On some platforms that is a matmul with every group's matrix.


def _ragged_dot(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.ragged_dot(x_MK, w_EKN, sizes_E, preferred_element_type=jnp.float32).astype(dtype)


def _ragged_dot_outer(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
    dw_EKN = jax.lax.ragged_dot_general(x_MK, dy_MN, sizes_E, dims, preferred_element_type=jnp.float32)
    return dw_EKN.astype(dtype)


# Megablox: JAX's Pallas kernels for TPU (Gale et al. 2023, "MegaBlocks").


def _megablox(backend: Backend, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, transposed: bool,
              dtype: Any) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # half a second that other platforms save

    total, tiles = x_MK.shape[0], _tiles(x_MK.dtype, *x_MK.shape, w_EKN.shape[1 if transposed else 2])
    kernel = functools.partial(gmm, preferred_element_type=dtype, tiling=tiles, transpose_rhs=transposed,
                               interpret=backend == "megablox_interpreted")
    return untyped(kernel)(_padded(x_MK, tiles[0]), w_EKN, sizes_E)[:total]


def _megablox_outer(backend: Backend, x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(x_MK.dtype, *x_MK.shape, dy_MN.shape[1])
    kernel = functools.partial(tgmm, preferred_element_type=dtype, tiling=tiles,
                               interpret=backend == "megablox_interpreted")
    return untyped(kernel)(_padded(x_MK, tiles[0]).T, _padded(dy_MN, tiles[0]), sizes_E)


def _tiles(dtype: jnp.dtype, *shape: int) -> tuple[int, ...]:
    """Whole multiples of the 128 lanes, no larger than need be; half as large in float32."""
    tiles = (most * 2 // dtype.itemsize for most in TILES)
    return tuple(min(tile, -(-size // 128) * 128) for tile, size in zip(tiles, shape, strict=True))


def _padded(x_MK: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x_MK, ((0, -x_MK.shape[0] % rows), (0, 0)))
