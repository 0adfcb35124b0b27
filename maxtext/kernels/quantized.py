"""Matmuls in eight bits: int8, fp8 and MXFP8, forward and backward, with scales taken from the values at hand.

Each operand of each matmul is quantised along the dims that this matmul sums over, so that its scales can be taken out
of the sum. A weight is therefore quantised twice, along its width in and along its width out, and so are activations
and gradients. Products are exact and sums are int32 or float32.

- int8: one float32 scale for all that is summed together, the largest magnitude over 127.
- fp8: one scale likewise, the smallest power of two that brings the largest magnitude to at most 448 (float8_e4m3fn),
  or 57344 for gradients, which are float8_e5m2 (Micikevicius et al. 2022, "FP8 formats for deep learning").
- mxfp8: a power of two for each block of 32 along the last dim of the sum (OCP Microscaling Formats 1.0), rounded up so
  that nothing saturates; float8_e4m3fn for gradients too (Mishra et al. 2025, "Recipes for pre-training LLMs with
  MXFP8"). The scales stand between the terms of the sum, so operands are multiplied out: exact in bfloat16.

Powers of two stay within the normal numbers of float32 and within float8_e8m0fnu.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.config.quant_rules import INT8_PRODUCTS, MX_BLOCK
from maxtext.config.schema import QuantConfig, QuantKind
from maxtext.kernels.random_bits import GOLDEN, mixed
from maxtext.parallel.collectives import platform, vary, varying_axes

SMALLEST = 2.0**-126  # scale: the least normal float32
OF_DX, OF_DW = 1, 2  # the two matmuls of a gradient: they tell the random numbers of each apart


class Quantized(NamedTuple):
    """values * scales is what was quantised, up to rounding."""

    values: jax.Array  # int8, float8_e4m3fn or float8_e5m2
    scales: jax.Array  # float32; 1 or, in mxfp8, blocks in place of the dims that share a scale


def quantize(x: jax.Array, kind: QuantKind, axes: Sequence[int], gradient: bool = False,
             salt: int | None = None) -> Quantized:
    """Rounds x to eight bits, with a scale for all values that differ in `axes` only.

    The error of a value is at most half the distance between the neighbours that it lies between after scaling: for
    int8 scale / 2, for fp8 a 16th of the value (an 8th in float8_e5m2) or, near zero, scale * 2^-10 (2^-17).

    Args:
      x: float32 or bfloat16. Where one value is not finite, the scale it shares is not, and so no result made with it.
      axes: the dims that a matmul sums over. In mxfp8 scales are shared along the last of them only, by blocks.
      gradient: whether x is a gradient, for which fp8 has another format.
      salt: None rounds to the nearest; a number rounds up or down at random, with the value as the mean. The random
        numbers are a hash of the value, its place and this number: the same in a repeated step, on any mesh.

    Returns:
      Values in the shape of x, and scales.
    """
    bits = magnitude_bits(x)
    if kind == "mxfp8":
        top = _blocks(bits, axes[-1], block_size(x, axes[-1])).max(axes[-1] + 1)
    else:
        top = bits.max(tuple(axes), keepdims=True)
    scales = scales_of(top, kind, gradient)
    return Quantized(rounded(times(x.astype(jnp.float32), 1 / scales), kind, gradient, salt), scales)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """|x| as the bits of a float32: in the order of magnitudes, nan above all, which a maximum of floats may drop."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & jnp.uint32(0x7FFFFFFF)


def scales_of(top: jax.Array, kind: QuantKind, gradient: bool) -> jax.Array:
    """Scales, float32, that bring magnitudes up to `top`, given as bits, into the format; nan where not finite."""
    ratio = jnp.maximum(jax.lax.bitcast_convert_type(top, jnp.float32) / _format(kind, gradient)[1], SMALLEST)
    scales = ratio if kind == "int8" else _power_of_two(ratio)
    return jnp.where(top < jnp.uint32(0xFF << 23), scales, jnp.nan)


def rounded(scaled: jax.Array, kind: QuantKind, gradient: bool, salt: int | None) -> jax.Array:
    """Values over their scale, in eight bits."""
    dtype, largest = _format(kind, gradient)
    if salt is not None:
        scaled = _random_rounding(scaled, dtype, _hash(scaled, salt))
    elif dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def dequantize(q: Quantized, dtype: Any = jnp.float32) -> jax.Array:
    """What the eight bits stand for."""
    return times(q.values.astype(jnp.float32), q.scales).astype(dtype)


def times(x: jax.Array, scales: jax.Array) -> jax.Array:
    """x times scales, whose dims are as those of x, or 1, or count equal blocks of them."""
    for axis, (size, count) in enumerate(zip(x.shape, scales.shape, strict=True)):
        if count not in (1, size):
            split = _blocks(x, axis, size // count) * jnp.expand_dims(scales, axis + 1)
            return _reshaped(split, x.shape, jax.typeof(x).sharding.spec, x)
    return x * scales


def block_size(x: jax.Array, axis: int) -> int:
    """Values of a block of mxfp8 along a dim: 32, and never of two devices.

    Raises:
      ValueError: when 32 does not divide what one device holds of the dim.
    """
    sharding, size = jax.typeof(x).sharding, x.shape[axis]
    axes = sharding.spec[axis] or ()
    ways = math.prod(sharding.mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))
    if size // ways % MX_BLOCK:
        raise ValueError(f"mxfp8 has blocks of {MX_BLOCK}, which do not divide a dim of {size} on {ways} devices, "
                         f"{size // ways} each; set quant.kind to fp8, or other sizes")
    return MX_BLOCK


def matmul(x: jax.Array, w: jax.Array, quant: QuantConfig, contract: int = 1, out_sharding: Any = None) -> jax.Array:
    """The last `contract` dims of x times the first ones of w, in eight bits, in value and gradients.

    Where dims of the sum are split over devices, scales are taken over all of them: the result is that of one device,
    up to the order of float32 sums. Inside `per_device`, they are of the device's own part.

    Args:
      x, w: float32 or bfloat16, of one dtype.
      out_sharding: of the result, needed when dims of the sum are sharded.

    Returns:
      (*x's other dims, *w's other dims) in their dtype.
    """
    assert x.dtype == w.dtype, (x.dtype, w.dtype)
    return _matmul(quant, contract, out_sharding, *vary((x, w), varying_axes(x, w)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul(quant: QuantConfig, contract: int, out_sharding: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    quantized = (quantize(x, quant.kind, _last(x, contract)), quantize(w, quant.kind, range(contract)))
    y = _product(*quantized, quant, _last(x, contract), range(contract), out_sharding)
    return y.astype(x.dtype)


def _backward(quant: QuantConfig, contract: int, out_sharding: Any, saved: tuple, dy: jax.Array) -> tuple:
    x, w = saved
    rows, columns = x.ndim - contract, w.ndim - contract
    # The result may be split in ways in which x is not; its gradient is gathered once, for both matmuls.
    spec = (*jax.typeof(x).sharding.spec[:rows], *jax.typeof(w).sharding.spec[contract:])
    if tuple(jax.typeof(dy).sharding.spec) != spec:
        dy = jax.sharding.reshard(dy, _named(dy, spec))
    salts = (OF_DX, OF_DW) if quant.stochastic_rounding else (None, None)
    quantized = (quantize(dy, quant.kind, _last(dy, columns), True, salts[0]),
                 quantize(w, quant.kind, _last(w, columns)))
    dx = _product(*quantized, quant, _last(dy, columns), _last(w, columns), jax.typeof(x).sharding)
    if quant.weight_gradients:
        quantized = (quantize(x, quant.kind, range(rows)), quantize(dy, quant.kind, range(rows), True, salts[1]))
        dw = _product(*quantized, quant, range(rows), range(rows), jax.typeof(w).sharding)
    else:
        dw = _dot(x, dy, range(rows), range(rows), jnp.float32, jax.typeof(w).sharding)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(lambda quant, contract, out_sharding, x, w: (_matmul(quant, contract, out_sharding, x, w), (x, w)),
               _backward)


def check_sum(kind: QuantKind, count: int) -> None:
    """Refuses int8 sums of so many products that an int32 may not hold them."""
    if kind == "int8" and count > INT8_PRODUCTS:
        raise ValueError(f"quant.kind int8 sums {count:,} products in an int32, which surely holds {INT8_PRODUCTS:,}; "
                         "set quant.weight_gradients: false, or more train.gradient_accumulation_steps")


def carrier(dtype: Any) -> Any:
    """The dtype in which the eight-bit values of a dtype are multiplied on this platform, exactly.

    CPUs have no fp8: there XLA would convert too, but it does not say to what.
    """
    if platform() == "cpu" and dtype != jnp.int8:
        return jnp.float32
    return dtype


def _product(a: Quantized, b: Quantized, quant: QuantConfig, a_axes: Sequence[int], b_axes: Sequence[int],
             out_sharding: Any) -> jax.Array:
    """Sum over `a_axes` and `b_axes` of a times b, float32: a's other dims, then b's."""
    if quant.kind == "mxfp8":
        dtype = jnp.float32 if platform() == "cpu" else jnp.bfloat16
        return _dot(dequantize(a, dtype), dequantize(b, dtype), a_axes, b_axes, jnp.float32, out_sharding)
    sums = jnp.int32 if quant.kind == "int8" else jnp.float32
    check_sum(quant.kind, math.prod(a.values.shape[axis] for axis in a_axes))
    a_values, b_values = (q.values.astype(carrier(q.values.dtype)) for q in (a, b))
    y = _dot(a_values, b_values, a_axes, b_axes, sums, out_sharding).astype(jnp.float32)
    a_scales, b_scales = (jnp.squeeze(q.scales, tuple(axes)) for q, axes in ((a, a_axes), (b, b_axes)))
    # Scales first: 127 x 127 times the scale of a huge value would leave float32 before the other scale is applied.
    return y * (jnp.expand_dims(a_scales, tuple(range(a_scales.ndim, y.ndim))) * b_scales)


def _dot(a: jax.Array, b: jax.Array, a_axes: Sequence[int], b_axes: Sequence[int], sums: Any,
         out_sharding: Any) -> jax.Array:
    dims = ((tuple(a_axes), tuple(b_axes)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=sums, out_sharding=out_sharding)


def _last(x: jax.Array, count: int) -> range:
    return range(x.ndim - count, x.ndim)


def _format(kind: QuantKind, gradient: bool) -> tuple[Any, float]:
    """Dtype, and the largest magnitude used of it."""
    assert kind != "none"
    if kind == "int8":
        return jnp.int8, 127.0
    dtype = jnp.float8_e5m2 if gradient and kind == "fp8" else jnp.float8_e4m3fn
    return dtype, float(jnp.finfo(dtype).max)


def _blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """One dim as two: blocks, and the values of one."""
    spec = jax.typeof(x).sharding.spec
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1:])
    return _reshaped(x, shape, (*spec[:axis + 1], None, *spec[axis + 1:]), x)


def _reshaped(x: jax.Array, shape: Sequence[int], spec: Sequence[Any], like: jax.Array) -> jax.Array:
    """A reshape that keeps also the shardings of dims of one element, which reshape alone drops."""
    return jax.lax.reshape(x, shape, out_sharding=_named(like, spec))


def _named(like: jax.Array, spec: Sequence[Any]) -> jax.sharding.NamedSharding | None:
    """A sharding on the mesh of `like`; None where there is no mesh."""
    mesh = jax.typeof(like).sharding.mesh
    return None if mesh.empty else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _power_of_two(x: jax.Array) -> jax.Array:
    """The least power of two that is not below x, a positive normal float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    exponent = (bits + jnp.uint32((1 << 23) - 1)) & jnp.uint32(0xFF << 23)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def _random_rounding(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """x rounded to a neighbour in dtype, as float32: up with the probability of how near that one is.

    The mean is x up to 2^-16 of the distance between neighbours.
    """
    uniform = ((bits >> 16).astype(jnp.float32) + 0.5) * 2.0**-16  # 127 + it still is a float32
    if dtype == jnp.int8:
        return jnp.floor(x + uniform)
    info = jnp.finfo(dtype)
    exponent = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFF << 23),
                                            jnp.float32)
    step = jnp.maximum(exponent, float(info.smallest_normal)) * 2.0**-info.nmant
    return jnp.floor(x / step + uniform) * step


def _hash(x: jax.Array, salt: int) -> jax.Array:
    """32 random bits for each value, of its own bits and its place."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.uint32(salt * GOLDEN & 0xFFFFFFFF)
    for axis in range(x.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=jax.typeof(x).sharding)
        bits = mixed(bits + place * jnp.uint32(0x9E3779B1))
    return bits
