"""Causal attention on TPUs: JAX's own Pallas kernels ("splash attention") with block sizes of ours.

Dims: B batch, T position, K key/value head, G query heads of one key/value head, N = K G, H head width, W width of a
value.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxtext.parallel.collectives import untyped, vary, varying_axes

LANES = 128  # blocks are whole multiples of it
SAVED = "attention"  # name, for rematerialisation, of what the backward pass needs of the forward pass


class Blocks(NamedTuple):
    """Most positions in one step of the kernels: queries and keys, forward and backward."""

    queries: int
    keys: int
    queries_backward: int
    keys_backward: int


BLOCKS = Blocks(1024, 1024, 1024, 1024)


def causal_attention(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKW: jax.Array, segments_BT: jax.Array | None = None,
                     sinks_KG: jax.Array | None = None, window: int | None = None, scale: float | None = None,
                     blocks: Blocks = BLOCKS, interpret: bool = False) -> jax.Array:
    """As `kernels.attention.causal_attention`, by kernels that only a TPU runs.

    Lengths that are no whole number of blocks are filled up: no real query sees a position after it.

    Args:
      blocks: largest blocks, multiples of 128. The result depends on them by rounding only.
      interpret: runs the kernels as plain JAX, for tests on other platforms.

    Returns:
      (B, T, K, G, W) in the dtype of the queries. Its backward pass needs it and what is named `SAVED`.
    """
    length, heads, group, width = q_BTKGH.shape[1:]
    scale = width ** -0.5 if scale is None else scale
    size = padded_length(length, blocks)

    def padded(x_BTH: jax.Array) -> jax.Array:
        return jnp.pad(x_BTH, ((0, 0), (0, size - length), *((0, 0),) * (x_BTH.ndim - 2)))

    q_BNTH = padded((q_BTKGH * scale).astype(q_BTKGH.dtype)).transpose(0, 2, 3, 1, 4)
    q_BNTH = q_BNTH.reshape(-1, heads * group, size, width)
    k_BKTH, v_BKTW = padded(k_BTKH).transpose(0, 2, 1, 3), padded(v_BTKW).transpose(0, 2, 1, 3)
    arrays = (q_BNTH, k_BKTH, v_BKTW, None if segments_BT is None else padded(segments_BT),
              None if sinks_KG is None else sinks_KG.reshape(-1))
    arrays = vary(arrays, varying_axes(*jax.tree.leaves(arrays)))
    out_BNTW = _attend(_Plan(length, size, window, blocks, interpret), *arrays)
    return out_BNTW[:, :, :length].reshape(-1, heads, group, length, v_BTKW.shape[-1]).transpose(0, 3, 1, 2, 4)


class _Plan(NamedTuple):
    """What is known before any value."""

    length: int
    size: int  # filled up
    window: int | None
    blocks: Blocks
    interpret: bool

    def flops(self, q_BNTH: jax.Array, v_BKTW: jax.Array) -> tuple[int, int]:
        """Of the kernel forward, and of each of the two backward, over the pairs of real positions that see each other.

        Forward are two matmuls; backward seven, because scores and their gradients are made for either kernel.
        """
        seen = int(np.minimum(np.arange(1, self.length + 1), self.window or self.length).sum())
        rows, heads, _, width = q_BNTH.shape
        pairs, value_width = 2 * rows * heads * seen, v_BKTW.shape[-1]
        return pairs * (width + value_width), pairs * (4 * width + 3 * value_width) // 2


# The kernels' own rule of differentiation knows nothing of a mesh, so this file has one around their two passes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, *arrays: jax.Array | None) -> jax.Array:
    return _forward(plan, *arrays)[0]


def _forward(plan: _Plan, *arrays: jax.Array | None) -> tuple[jax.Array, tuple]:
    kernels, call, masks = _kernel(plan, arrays[0].shape[1])

    def row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTW: jax.Array, segments_T: jax.Array | None,
            sinks_N: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        documents = None if segments_T is None else kernels.SegmentIds(segments_T, segments_T)
        out_NTW, (log_z_NT,) = kernels._splash_attention_forward(
            masks[0], q_NTH, k_KTH, v_KTW, documents, sinks_N, save_residuals=True, **call)
        return out_NTW, log_z_NT

    def rows(*arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        with flops_scope(plan.flops(arrays[0], arrays[2])[0]):
            return jax.vmap(row, in_axes=(0, 0, 0, 0, None))(*arrays)

    # The kernel writes each log-partition 128 times. What reads the output waits until one of them is cut out, so that
    # the rest is not kept for the backward pass.
    out_BNTW, log_z_BNT = jax.lax.optimization_barrier(untyped(rows)(*arrays))
    # Named out here: kept, they spare the backward pass this kernel, and are no larger than the queries.
    out_BNTW, log_z_BNT = checkpoint_name(out_BNTW, SAVED), checkpoint_name(log_z_BNT, SAVED)
    return out_BNTW, (*arrays, out_BNTW, log_z_BNT)


def _backward(plan: _Plan, saved: tuple, dout_BNTW: jax.Array) -> tuple:
    kernels, call, masks = _kernel(plan, saved[0].shape[1])

    def row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTW: jax.Array, segments_T: jax.Array | None,
            sinks_N: jax.Array | None, out_NTW: jax.Array, log_z_NT: jax.Array, dout_NTW: jax.Array) -> tuple:
        documents = None if segments_T is None else kernels.SegmentIds(segments_T, segments_T)
        residuals = q_NTH, k_KTH, v_KTW, documents, sinks_N, out_NTW, log_z_NT, masks[2], masks[1]
        grads = kernels._splash_attention_bwd(res=residuals, do=dout_NTW, save_residuals=True, **call)
        return *grads[3:6], grads[7]

    def rows(*arrays: jax.Array | None) -> tuple:
        with flops_scope(plan.flops(arrays[0], arrays[2])[1]):
            return jax.vmap(row, in_axes=(0, 0, 0, 0, None, 0, 0, 0))(*arrays)

    dq_BNTH, dk_BKTH, dv_BKTW, dsinks_BN = untyped(rows)(*saved, dout_BNTW)
    return dq_BNTH, dk_BKTH, dv_BKTW, None, None if dsinks_BN is None else dsinks_BN.sum(0)


_attend.defvjp(_forward, _backward)


def padded_length(length: int, blocks: Blocks) -> int:
    """The shortest length of whole blocks that are no larger than `blocks`, and whole multiples of 128."""
    count = -(-length // max(blocks))
    return -(-length // (count * LANES)) * count * LANES


def _kernel(plan: _Plan, heads: int) -> tuple[ModuleType, dict[str, Any], tuple[Any, Any, Any]]:
    """JAX's module, settings of a call and what its passes know of the mask."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape, window = (plan.size, plan.size), plan.window
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    return kernel_of(mask, heads, plan.size, plan.blocks, plan.interpret)


def kernel_of(mask: Any, heads: int, size: int, blocks: Blocks,
              interpret: bool) -> tuple[ModuleType, dict[str, Any], tuple[Any, Any, Any]]:
    """What `_kernel` gives, for any mask of (size, size).

    JAX's fused backward kernel, not used here, writes a part of dq for each block of keys: its memory grows with the
    square of the length, and XLA gives the sum of those parts more cycles than the two matmuls that a second kernel
    makes again.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    queries, keys, queries_backward, keys_backward = (_divisor(size, most) for most in blocks)
    sizes = kernels.BlockSizes(
        block_q=queries, block_kv=keys, block_kv_compute=keys, block_q_dkv=queries_backward,
        block_kv_dkv=keys_backward, block_kv_dkv_compute=keys_backward, block_q_dq=queries_backward,
        block_kv_dq=keys_backward, use_fused_bwd_kernel=False)
    made = kernels.make_splash_mha(masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1,
                                   q_seq_shards=1, interpret=interpret)
    call = {name: value for name, value in made.kwargs.items() if name != "save_residuals"}
    return kernels, call, (made.fwd_mask_info, made.dkv_mask_info, made.dq_mask_info)


def _divisor(size: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides `size`."""
    return max(part for part in range(LANES, min(size, most) + 1, LANES) if size % part == 0)


def flops_scope(flops: int) -> Any:
    """Tells a reader of the compiled program what the kernel inside costs; JAX's kernels declare nothing."""
    return jax.named_scope(f"kernel_flops_{flops}")
