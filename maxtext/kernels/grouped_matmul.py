"""Matmul of sorted rows, each by the matrix of its group: the experts of a routed layer.

One function, with back ends for platforms behind it. None of them multiplies a row by a matrix other than its own.

Dims: M row, K width in, N width out, E group, R row of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from maxtext.parallel.collectives import vary, varying_axes

Backend = Literal["blocked", "ragged_dot"]

BLOCK = 128  # rows of one matmul of the blocked back end


def grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, backend: Backend | None = None) -> jax.Array:
    """Multiplies the first sizes[0] rows of x by w[0], the next sizes[1] by w[1], and so on.

    Args:
      x_MK: rows sorted by group.
      w_EKN: a matrix for each group, in the dtype of x.
      sizes_E: int32 rows of each group; their sum is at most M. Rows beyond it give zeros, and get zero gradients.
      backend: how; by default what suits the platform that the program is compiled for.

    Returns:
      (M, N) in the dtype of x; sums are taken in float32. Differentiable in x and w.
    """
    axes = varying_axes(x_MK, w_EKN, sizes_E)
    return _grouped(backend, *vary((x_MK, w_EKN, sizes_E), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(backend: Backend | None, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _multiply(backend, x_MK, w_EKN, sizes_E)


def _forward(backend: Backend | None, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple:
    return _multiply(backend, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(backend: Backend | None, saved: tuple, dy_MN: jax.Array) -> tuple:
    x_MK, w_EKN, sizes_E = saved
    dx_MK = _multiply(backend, dy_MN, w_EKN.swapaxes(1, 2), sizes_E)
    return dx_MK, _outer(backend, x_MK, dy_MN, sizes_E), None


_grouped.defvjp(_forward, _backward)


def _multiply(backend: Backend | None, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _choose(backend, {"blocked": _blocked, "ragged_dot": _ragged_dot}, x_MK, w_EKN, sizes_E)


def _outer(backend: Backend | None, x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """(E, K, N): for each group, the sum over its rows of x times dy, the gradient of its matrix."""
    return _choose(backend, {"blocked": _blocked_outer, "ragged_dot": _ragged_dot_outer}, x_MK, dy_MN, sizes_E)


def _choose(backend: Backend | None, of: dict[str, Callable[..., jax.Array]], *arguments: jax.Array) -> jax.Array:
    if backend is not None:
        return of[backend](*arguments)
    return jax.lax.platform_dependent(*arguments, cpu=of["blocked"], default=of["ragged_dot"])


# Blocked: a loop over blocks of rows of one group. Every group is rounded up to whole blocks, and the loop ends with
# the last row that is in a group.


class _Block:
    """Rows [first, first + R) of the arrays, of which `valid` belong to this block of `group`."""

    def __init__(self, index: jax.Array, sizes_E: jax.Array, rows: int, total: int):
        blocks_E = -(-sizes_E // rows)
        last_E, stop_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
        self.group = jnp.searchsorted(last_E, index, side="right", method="compare_all").astype(jnp.int32)
        stop = stop_E[self.group]
        start = stop - sizes_E[self.group] + (index - last_E[self.group] + blocks_E[self.group]) * rows
        self.first = jnp.minimum(start, total - rows)  # a slice never leaves the array
        row_R = self.first + jnp.arange(rows)
        self.valid_R1 = ((row_R >= start) & (row_R < stop))[:, None]
        self.rows = rows

    def read(self, x_MK: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x_MK, self.first, self.rows)

    def write(self, y_MN: jax.Array, new_RN: jax.Array) -> jax.Array:
        """Rows of other blocks, before or after, are left as they are."""
        merged_RN = jnp.where(self.valid_R1, new_RN, self.read(y_MN))
        return jax.lax.dynamic_update_slice_in_dim(y_MN, merged_RN, self.first, axis=0)


def _blocked(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    total, rows = x_MK.shape[0], min(BLOCK, x_MK.shape[0])

    def body(index: jax.Array, y_MN: jax.Array) -> jax.Array:
        block = _Block(index, sizes_E, rows, total)
        w_KN = jax.lax.dynamic_index_in_dim(w_EKN, block.group, keepdims=False)
        return block.write(y_MN, block.read(x_MK) @ w_KN)

    zeros_MN = vary(jnp.zeros((total, w_EKN.shape[2]), x_MK.dtype), varying_axes(x_MK))
    return jax.lax.fori_loop(0, (-(-sizes_E // rows)).sum(), body, zeros_MN)


def _blocked_outer(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    total, rows = x_MK.shape[0], min(BLOCK, x_MK.shape[0])

    def body(index: jax.Array, dw_EKN: jax.Array) -> jax.Array:
        block = _Block(index, sizes_E, rows, total)
        masked_RN = jnp.where(block.valid_R1, block.read(dy_MN), 0)
        dw_KN = jnp.einsum("rk,rn->kn", block.read(x_MK), masked_RN, preferred_element_type=jnp.float32)
        return dw_EKN.at[block.group].add(dw_KN)

    shape = (sizes_E.shape[0], x_MK.shape[1], dy_MN.shape[1])
    zeros_EKN = vary(jnp.zeros(shape, jnp.float32), varying_axes(x_MK))
    return jax.lax.fori_loop(0, (-(-sizes_E // rows)).sum(), body, zeros_EKN).astype(x_MK.dtype)


# jax.lax.ragged_dot: native on some platforms.


def _ragged_dot(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    y_MN = jax.lax.ragged_dot(x_MK, w_EKN, sizes_E, preferred_element_type=jnp.float32)
    inside_M1 = jnp.arange(x_MK.shape[0])[:, None] < sizes_E.sum()  # what stands beyond is not the same everywhere
    return jnp.where(inside_M1, y_MN, 0).astype(x_MK.dtype)


def _ragged_dot_outer(x_MK: jax.Array, dy_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
    dw_EKN = jax.lax.ragged_dot_general(x_MK, dy_MN, sizes_E, dims, preferred_element_type=jnp.float32)
    return dw_EKN.astype(x_MK.dtype)
