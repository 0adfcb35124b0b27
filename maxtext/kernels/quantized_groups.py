"""The grouped matmul in eight bits, with scales that belong to one group.

As `quantized.matmul` for each group on its own: the rows of another group, and how many groups are empty, change
nothing. Forward, a row has its scale and each column of each matrix has one; in the gradient of a matrix, each column
of its group's rows, in mxfp8 each column of each 32 rows, counted from the group's first.

Dims: M row, K width in, N width out, E group, P block of 32 rows of one group, R row of a block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.config.quant_rules import MX_BLOCK
from maxtext.config.schema import QuantConfig
from maxtext.kernels.grouped_matmul import Backend, default_backend, multiply, outer
from maxtext.kernels.quantized import (
    OF_DW,
    OF_DX,
    Quantized,
    check_sum,
    dequantize,
    magnitude_bits,
    quantize,
    rounded,
    scales_of,
)
from maxtext.parallel.collectives import platform, vary, varying_axes


def quantized_grouped_matmul(x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, quant: QuantConfig,
                             backend: Backend | None = None) -> jax.Array:
    """`grouped_matmul` in eight bits, in value and gradients.

    Every back end multiplies the same eight-bit values. The blocked one sums int8 in int32; the others take values as
    bfloat16, which holds them exactly, and sum in float32.
    """
    backend = backend or default_backend(platform())
    return _grouped(quant, backend, *vary((x_MK, w_EKN, sizes_E), varying_axes(x_MK, w_EKN, sizes_E)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(quant: QuantConfig, backend: Backend, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    quantized = quantize(x_MK, quant.kind, (1,)), quantize(w_EKN, quant.kind, (1,))
    return _by_rows(quant, backend, *quantized, sizes_E).astype(x_MK.dtype)


def _backward(quant: QuantConfig, backend: Backend, saved: tuple, dy_MN: jax.Array) -> tuple:
    x_MK, w_EKN, sizes_E = saved
    salts = (OF_DX, OF_DW) if quant.stochastic_rounding else (None, None)
    quantized = quantize(dy_MN, quant.kind, (1,), True, salts[0]), quantize(w_EKN, quant.kind, (2,))
    dx_MK = _by_rows(quant, backend, *quantized, sizes_E, transposed=True).astype(x_MK.dtype)
    if not quant.weight_gradients:
        return dx_MK, outer(backend, x_MK, dy_MN, sizes_E).astype(w_EKN.dtype), None
    places, groups = _places(sizes_E, x_MK.shape[0]), sizes_E.shape[0]
    x = _over_rows(x_MK, places, quant, groups, gradient=False, salt=None)
    dy = _over_rows(dy_MN, places, quant, groups, gradient=True, salt=salts[1])
    return dx_MK, _of_matrices(quant, backend, x, dy, places, sizes_E).astype(w_EKN.dtype), None


_grouped.defvjp(lambda quant, backend, x, w, sizes: (_grouped(quant, backend, x, w, sizes), (x, w, sizes)), _backward)


def _by_rows(quant: QuantConfig, backend: Backend, x: Quantized, w: Quantized, sizes_E: jax.Array,
             transposed: bool = False) -> jax.Array:
    """Rows times the matrices of their groups, float32; with `transposed`, w is (E, N, K)."""
    dtype, sums = _carrier(quant, backend)
    run = functools.partial(multiply, backend, sizes_E=sizes_E, transposed=transposed, dtype=sums)
    if quant.kind == "mxfp8":
        return run(dequantize(x, dtype), dequantize(w, dtype))
    y_MN = run(x.values.astype(dtype), w.values.astype(dtype)).astype(jnp.float32)
    w_scales_EN = jnp.squeeze(w.scales, 2 if transposed else 1)
    scaled_MN = y_MN * (x.scales * w_scales_EN.at[_group(jnp.arange(y_MN.shape[0]), sizes_E)].get(mode="clip"))
    return jnp.where(jnp.arange(y_MN.shape[0])[:, None] < sizes_E.sum(), scaled_MN, 0)


class _Places(NamedTuple):
    """Which rows make a block of 32 of one group; the last of a group may have fewer."""

    row_PR: jax.Array
    valid_PR: jax.Array
    group_P: jax.Array
    group_M: jax.Array  # from E on for rows in no group
    block_M: jax.Array


def _places(sizes_E: jax.Array, rows: int) -> _Places:
    blocks_E = -(-sizes_E // MX_BLOCK)
    block_stop_E, stop_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    block_P = jnp.arange(rows // MX_BLOCK + sizes_E.shape[0])
    group_P, group_M = _group(block_P, blocks_E), _group(jnp.arange(rows), sizes_E)

    def first(values_E: jax.Array, stop_E: jax.Array, groups: jax.Array) -> jax.Array:
        return (stop_E - values_E).at[groups].get(mode="clip")

    start_P = first(sizes_E, stop_E, group_P) + (block_P - first(blocks_E, block_stop_E, group_P)) * MX_BLOCK
    row_PR = start_P[:, None] + jnp.arange(MX_BLOCK)
    valid_PR = (row_PR < stop_E.at[group_P].get(mode="clip")[:, None]) & (group_P < sizes_E.shape[0])[:, None]
    block_M = (jnp.arange(rows) - first(sizes_E, stop_E, group_M)) // MX_BLOCK + first(blocks_E, block_stop_E, group_M)
    return _Places(row_PR, valid_PR, group_P, group_M, block_M)


def _over_rows(x_MK: jax.Array, places: _Places, quant: QuantConfig, groups: int, gradient: bool,
               salt: int | None) -> Quantized:
    """Values (M, K) in eight bits, zeros in rows of no group; scales (E, K), or in mxfp8 (P, K)."""
    bits_PRK = magnitude_bits(x_MK.at[places.row_PR].get(mode="clip"))
    top_PK = jnp.where(places.valid_PR[..., None], bits_PRK, 0).max(1)
    if quant.kind == "mxfp8":
        scales, place_M = scales_of(top_PK, quant.kind, gradient), places.block_M
    else:
        top_EK = jax.ops.segment_max(top_PK, places.group_P, groups, indices_are_sorted=True)
        scales, place_M = scales_of(top_EK, quant.kind, gradient), places.group_M
    scaled_MK = x_MK.astype(jnp.float32) / scales.at[place_M].get(mode="clip")
    scaled_MK = jnp.where(places.group_M[:, None] < groups, scaled_MK, 0)
    return Quantized(rounded(scaled_MK, quant.kind, gradient, salt), scales)


def _of_matrices(quant: QuantConfig, backend: Backend, x: Quantized, dy: Quantized, places: _Places,
                 sizes_E: jax.Array) -> jax.Array:
    """(E, K, N) float32: for each group, the sum over its rows of x times dy."""
    dtype, sums = _carrier(quant, backend)
    if quant.kind == "mxfp8":
        whole = (q.values.astype(jnp.float32) * q.scales.at[places.block_M].get(mode="clip") for q in (x, dy))
        return outer(backend, *(array.astype(dtype) for array in whole), sizes_E, sums)
    if sums == jnp.int32:
        check_sum(quant.kind, x.values.shape[0])
    sums_EKN = outer(backend, x.values.astype(dtype), dy.values.astype(dtype), sizes_E, sums)
    return sums_EKN.astype(jnp.float32) * (x.scales[:, :, None] * dy.scales[:, None])


def _group(index: jax.Array, counts_E: jax.Array) -> jax.Array:
    """The group of each index, when the first counts[0] are of group 0, and so on."""
    return (index[:, None] >= jnp.cumsum(counts_E)).sum(1, dtype=jnp.int32)


def _carrier(quant: QuantConfig, backend: Backend) -> tuple[Any, Any]:
    """Dtypes of operands and of the sums."""
    if backend == "blocked" and quant.kind == "int8":
        return jnp.int8, jnp.int32
    # Both hold eight-bit floats exactly; a CPU multiplies float32 faster.
    return jnp.float32 if backend == "blocked" and platform() == "cpu" else jnp.bfloat16, jnp.float32
