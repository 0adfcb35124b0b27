"""A pair of a block of queries and a block of keys (see block_pairs.py) by JAX's splash kernels, for TPUs.

Dims as in block_pairs.py; N = K G heads.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.attention import MASKED
from maxtext.kernels.block_pairs import Keys, Queries, Saved, State
from maxtext.kernels.splash import BLOCKS, LANES, Blocks, flops_scope, kernel_of
from maxtext.parallel.collectives import untyped

SMALLEST = 512  # tokens of a block that a window cuts a chunk into: smaller kernels do not pay


def splash_block(chunk: int, window: int | None) -> int:
    """Tokens of a block: a whole chunk, filled up to a multiple of 128, or a part that holds the window."""
    block = -(-chunk // LANES) * LANES
    while window is not None and chunk % block == 0 and block % (2 * LANES) == 0 and (
            block // 2 >= max(window - 1, SMALLEST)):
        block //= 2
    return block


@dataclasses.dataclass(frozen=True)
class SplashPair:
    """Pairs whose queries stand `offset` after their keys; the queries come scaled, and so does their gradient.

    `offset` None: every query sees every key.
    """

    block: int
    window: int | None
    offset: int | None
    interpret: bool = False
    blocks: Blocks = BLOCKS

    def read(self, query: Queries, key: Keys, pair_4: jax.Array) -> State:
        del pair_4
        q_BKGTH, v_BKSW = query.q_NBKGTH, key.v_NBKSW
        kernels, call, masks = self._kernel(q_BKGTH)

        def row(q_NTH: jax.Array, k_KSH: jax.Array, v_KSW: jax.Array, documents: Any) -> tuple[jax.Array, jax.Array]:
            out_NTW, (log_sum_NT,) = kernels._splash_attention_forward(
                masks[0], q_NTH, k_KSH, v_KSW, _segments(kernels, documents), None, save_residuals=True, **call)
            return out_NTW, log_sum_NT

        def rows(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            with flops_scope(self._pairs(q_BKGTH) * 2 * (q_BKGTH.shape[-1] + v_BKSW.shape[-1])):
                return jax.vmap(row)(*arrays)

        out_BNTW, log_sum_BNT = untyped(rows)(_heads(q_BKGTH), key.k_NBKSH, v_BKSW, _documents(query, key))
        read_BKGTW = out_BNTW.reshape(*q_BKGTH.shape[:-1], -1).astype(jnp.float32)
        log_sum_BKGT = log_sum_BNT.reshape(q_BKGTH.shape[:-1])
        # A query that sees none of these keys read nothing or noise, and its sum is 0 or beyond all bounds.
        some_BKGT = log_sum_BKGT > MASKED
        return State(jnp.where(some_BKGT, log_sum_BKGT, MASKED), some_BKGT.astype(jnp.float32),
                     jnp.where(some_BKGT[..., None], read_BKGTW, 0))

    def gradients(self, query: Queries, saved: Saved, key: Keys,
                  pair_4: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        del pair_4
        log_sum_BKGT = saved.peak_NBKGT + jnp.log(saved.sum_NBKGT)
        q_BKGTH, v_BKSW = query.q_NBKGTH, key.v_NBKSW
        kernels, call, masks = self._kernel(q_BKGTH)
        sizes = call["block_sizes"]
        settings = {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
        settings |= {name: call[name] for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function",
                                                   "interpret")}

        def row(q_NTH: jax.Array, k_KSH: jax.Array, v_KSW: jax.Array, documents: Any, *saved_N: jax.Array) -> tuple:
            dy_NTW, log_sum_NT, product_NT = saved_N
            arrays = (q_NTH, k_KSH, v_KSW, _segments(kernels, documents), None, log_sum_NT, dy_NTW, product_NT)
            _, dk_KSH, dv_KSW = kernels._splash_attention_bwd_dkv(
                *arrays, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv, bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=masks[1], use_fused_bwd_kernel=False, **settings)
            dq_NTH = kernels._splash_attention_bwd_dq(*arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq,
                                                      mask_info=masks[2], **settings)
            return dq_NTH, dk_KSH, dv_KSW

        def rows(*arrays: Any) -> tuple:
            # Of each of the two kernels; both make the scores and their gradients again, of seven matmuls in all.
            with flops_scope(self._pairs(q_BKGTH) * (4 * q_BKGTH.shape[-1] + 3 * v_BKSW.shape[-1])):
                return jax.vmap(row)(*arrays)

        of_rows = map(_heads, (saved.dy_NBKGTW, log_sum_BKGT, saved.product_NBKGT))
        grads = untyped(rows)(_heads(q_BKGTH), key.k_NBKSH, v_BKSW, _documents(query, key), *of_rows)
        dq, dk_BKSH, dv_BKSW = (x.astype(jnp.float32) for x in grads)
        return dq.reshape(q_BKGTH.shape), dk_BKSH, dv_BKSW

    def _kernel(self, q_BKGTH: jax.Array) -> tuple[ModuleType, dict[str, Any], tuple[Any, Any, Any]]:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        shape = (self.block, self.block)
        if self.offset is None:
            mask = masks.FullMask(shape)
        elif self.window is None:
            mask = masks.CausalMask(shape, self.offset)
        else:
            mask = masks.LocalMask(shape, (self.window - 1, 0), self.offset)
        return kernel_of(mask, q_BKGTH.shape[1] * q_BKGTH.shape[2], self.block, self.blocks, self.interpret)

    def _pairs(self, q_BKGTH: jax.Array) -> int:
        """Pairs of a query and a key that it sees, over all heads."""
        heads, t = q_BKGTH.shape[0] * q_BKGTH.shape[1] * q_BKGTH.shape[2], np.arange(self.block)
        if self.offset is None:
            return heads * self.block ** 2
        last = np.minimum(t + self.offset, self.block - 1)
        first = np.zeros_like(t) if self.window is None else np.maximum(t + self.offset - self.window + 1, 0)
        return heads * int(np.maximum(last - first + 1, 0).sum())


def kind_of(offset: int, block: int, window: int | None) -> int | None:
    """The `offset` of the kernel for pairs of this offset: None when all is seen."""
    farthest = offset + block - 1
    return None if offset >= block - 1 and (window is None or farthest < window) else offset


def _heads(x_BKGT: jax.Array) -> jax.Array:
    batch, heads, group, *rest = x_BKGT.shape
    return x_BKGT.reshape(batch, heads * group, *rest)


def _documents(query: Queries, key: Keys) -> Any:
    return None if query.segments_NBT is None else (query.segments_NBT, key.segments_NBS)


def _segments(kernels: ModuleType, documents: Any) -> Any:
    return None if documents is None else kernels.SegmentIds(*documents)
