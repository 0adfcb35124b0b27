"""The LM head fused with its cross-entropy: logits of a few tokens at a time, never all of them.

The gradient is made in the forward pass, from logits that are at hand, so training costs the three matmuls of a plain
head and no recomputation (Wijmans et al. 2024, "Cut Your Losses", uses the same identity with a second pass).

All functions work on one device's own tokens and its own slice of the vocabulary; the mesh axes that the tokens, the
vocabulary and the rows of `w` are split over are given by name.

Dims: N tokens of this device, C tokens in a chunk, D model width, V vocabulary (this device's slice).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.parallel.collectives import all_gather, barrier, platform, psum_scatter


class Axes(NamedTuple):
    """Mesh axes that the arguments are split over."""

    tokens: tuple[str, ...] = ()
    width: tuple[str, ...] = ()  # rows of w: axes that are also among `tokens`
    vocab: str | None = None


class Losses(NamedTuple):
    """Weighted sums over tokens of the whole batch."""

    cross_entropy: jax.Array
    squared_log_z: jax.Array  # sum of weight * logsumexp(logits)^2, without the multiplier


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(x_ND: jax.Array, w_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array,
                  z_loss: float | jax.Array, chunk: int, axes: Axes) -> tuple[jax.Array, Losses]:
    """Sum over tokens of weight * (cross-entropy + z_loss * logsumexp^2).

    Logits are a matmul in the dtype of `x`, rounded to it and then raised to float32, as in the reference
    (OLMo-core nn/functional/cross_entropy_loss.py).

    Args:
      x_ND: final hidden states.
      w_DV: head weights, float32 at rest, this device's rows and columns.
      targets_N: int32 ids in the whole vocabulary.
      weights_N: float32 weight of each token, already divided by the sum over the batch.
      z_loss: multiplier of the squared log-partition, a number or a scalar.
      chunk: most tokens whose logits exist at one time.

    Returns:
      (total, Losses). Only `total` carries a gradient, to `x` and `w`.
    """
    total, losses, _ = _forward(x_ND, w_DV, targets_N, weights_N, z_loss, chunk, axes, with_gradient=False)
    return total, losses


def token_nll(x_ND: jax.Array, w_DV: jax.Array, targets_N: jax.Array, chunk: int, vocab: str | None) -> jax.Array:
    """Negative log-likelihood in nats of each target, (N,) float32. No gradient.

    Args:
      w_DV: all rows of the head in the dtype of `x`, and this device's columns.
      vocab: mesh axis that the columns are split over. The others are as in `cross_entropy`.
    """

    def body(carry: None, chunk_of: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x_CD, targets_C = chunk_of
        parts = _log_partition(x_CD @ w_DV, targets_C, vocab)
        return carry, parts.log_z - parts.target

    x, targets = _chunks((x_ND, targets_N), chunk)
    return jax.lax.scan(body, None, (x, targets))[1].reshape(-1)[: x_ND.shape[0]]


class _Partition(NamedTuple):
    exp_CV: jax.Array  # exp(logits - peak)
    sum_C: jax.Array
    log_z: jax.Array
    target: jax.Array  # logit of the target
    is_target_CV: jax.Array


def _log_partition(logits_CV: jax.Array, targets_C: jax.Array, vocab: str | None) -> _Partition:
    if logits_CV.dtype == jnp.bfloat16:  # explicit: the compiler may drop a rounding that is undone
        logits_CV = jax.lax.reduce_precision(logits_CV, exponent_bits=8, mantissa_bits=7)
    logits_CV = logits_CV.astype(jnp.float32)
    first = jax.lax.axis_index(vocab) * logits_CV.shape[1] if vocab else 0
    is_target_CV = jnp.arange(logits_CV.shape[1])[None] + first == targets_C[:, None]
    peak_C = logits_CV.max(-1)
    if vocab:
        peak_C = jax.lax.pmax(peak_C, vocab)
    exp_CV = jnp.exp(logits_CV - peak_C[:, None])
    sum_C, target_C = exp_CV.sum(-1), _target_logit(logits_CV, targets_C - first, is_target_CV)
    if vocab:
        sum_C, target_C = jax.lax.psum((sum_C, target_C), vocab)
    return _Partition(exp_CV, sum_C, jnp.log(sum_C) + peak_C, target_C, is_target_CV)


def _target_logit(logits_CV: jax.Array, targets_C: jax.Array, is_target_CV: jax.Array) -> jax.Array:
    """The logit of each target, 0 where it is not in this slice of the vocabulary.

    A sum over the row joins the other sums there, but not on a CPU: its compiler writes all that is summed to memory.
    """
    if platform() != "cpu":
        return jnp.where(is_target_CV, logits_CV, 0).sum(-1)
    found_C1 = jnp.take_along_axis(logits_CV, jnp.clip(targets_C, 0, logits_CV.shape[1] - 1)[:, None], axis=-1)
    return jnp.where((targets_C >= 0) & (targets_C < logits_CV.shape[1]), found_C1[:, 0], 0)


def _whole(w_DV: jax.Array, dtype: jnp.dtype, axes: Axes) -> jax.Array:
    """All rows of the head, in the dtype of the matmul."""
    return all_gather(w_DV.astype(dtype), axes.width, 0)


def _chunks(arrays: tuple[jax.Array, ...], chunk: int) -> tuple[jax.Array, ...]:
    """Splits the token dim into equal chunks of at most `chunk`; zeros fill the last (their weight is 0)."""
    tokens = arrays[0].shape[0]
    count = -(-tokens // chunk)
    size = -(-tokens // count)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, count * size - tokens)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(count, size, *array.shape[1:])

    return tuple(split(array) for array in arrays)


def _forward(x_ND: jax.Array, w_DV: jax.Array, targets_N: jax.Array, weights_N: jax.Array,
             z_loss: float | jax.Array, chunk: int, axes: Axes, with_gradient: bool
             ) -> tuple[jax.Array, Losses, tuple[jax.Array, jax.Array] | None]:
    rows, w_DV = w_DV.shape[0], _whole(w_DV, x_ND.dtype, axes)

    def body(dw_DV: jax.Array | None, chunk_of: tuple[jax.Array, ...]) -> tuple[jax.Array | None, tuple]:
        x_CD, targets_C, weights_C = chunk_of
        part = _log_partition(x_CD @ w_DV, targets_C, axes.vocab)
        losses = Losses((weights_C * (part.log_z - part.target)).sum(), (weights_C * part.log_z**2).sum())
        if not with_gradient:
            return None, (losses, None)
        softmax_scale_C = weights_C * (1 + 2 * z_loss * part.log_z) / part.sum_C
        dlogits_CV = part.exp_CV * softmax_scale_C[:, None] - jnp.where(part.is_target_CV, weights_C[:, None], 0)
        dlogits_CV = dlogits_CV.astype(x_CD.dtype)
        dw_DV = dw_DV + jnp.einsum("cd,cv->dv", x_CD, dlogits_CV, preferred_element_type=jnp.float32)
        return dw_DV, (losses, dlogits_CV @ w_DV.T)

    carry = jnp.zeros(w_DV.shape, jnp.float32) if with_gradient else None
    if with_gradient and (varying := (*axes.tokens, *filter(None, [axes.vocab]))):
        carry = jax.lax.pcast(carry, varying, to="varying")
    dw_DV, (losses, dx) = jax.lax.scan(body, carry, _chunks((x_ND, targets_N, weights_N), chunk))
    losses = Losses(*(loss.sum() for loss in losses))
    if axes.tokens:
        losses = Losses(*jax.lax.psum(tuple(losses), axes.tokens))
    total = losses.cross_entropy + z_loss * losses.squared_log_z
    if not with_gradient:
        return total, losses, None
    dx_ND = dx.reshape(-1, dx.shape[-1])[: x_ND.shape[0]]
    if axes.vocab:
        dx_ND = jax.lax.psum(dx_ND, axes.vocab)
    dw_DV = psum_scatter(dw_DV, axes.width, 0)
    if replicated := tuple(axis for axis in axes.tokens if axis not in axes.width):
        dw_DV = jax.lax.psum(dw_DV, replicated)
    assert dw_DV.shape[0] == rows
    if platform() == "tpu":  # else its compiler scatters the gradient of w last, and keeps all rows of it until then
        dx_ND, dw_DV = barrier(dx_ND, dw_DV)
    return total, losses, (dx_ND, dw_DV)


def _vjp_forward(x_ND, w_DV, targets_N, weights_N, z_loss, chunk, axes):
    total, losses, gradient = _forward(x_ND, w_DV, targets_N, weights_N, z_loss, chunk, axes, with_gradient=True)
    return (total, losses), gradient


def _vjp_backward(chunk, axes, gradient, cotangents):
    dx_ND, dw_DV = gradient
    dtotal = cotangents[0]
    return (dtotal * dx_ND).astype(dx_ND.dtype), dtotal * dw_DV, None, None, None


cross_entropy.defvjp(_vjp_forward, _vjp_backward)
