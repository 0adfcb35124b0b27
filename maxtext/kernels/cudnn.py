"""Causal attention on NVIDIA GPUs: cuDNN's fused kernel, through JAX.

Dims: B batch, T position, K key/value head, G query heads of one key/value head, N = K G, H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MOST_WIDTH, OLDER_WIDTH, WIDTH_STEP = 256, 128, 8  # of a head: on Hopper (9.0) and later, before it, and its divisor


def causal_attention(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: None = None,
                     sinks_KG: None = None, window: int | None = None, scale: float | None = None,
                     implementation: str = "cudnn") -> jax.Array:
    """As `kernels.attention.causal_attention`, for what `refusal` lets through: one document a row and no sinks.

    Args:
      implementation: what `jax.nn.dot_product_attention` runs: "cudnn", or "xla" for tests on other platforms.
    """
    assert segments_BT is None
    assert sinks_KG is None
    batch, length, heads, group, width = q_BTKGH.shape
    out_BTNH = jax.nn.dot_product_attention(
        q_BTKGH.reshape(batch, length, heads * group, width), k_BTKH, v_BTKH, is_causal=True, scale=scale,
        local_window_size=None if window is None or window >= length else (window - 1, 0),
        implementation=implementation)
    return out_BTNH.reshape(batch, length, heads, group, v_BTKH.shape[-1]).astype(v_BTKH.dtype)


def refusal(dtype: jnp.dtype, width: int, value_width: int, documents: bool, sinks: bool) -> str | None:
    """Why the kernel cannot take these, or None."""
    if documents:
        return "it has no mask of documents (data.document_masking or packing best_fit)"
    if sinks:
        return "it has no attention sinks (model.attention_sinks)"
    if jnp.dtype(dtype).itemsize != 2:
        return f"it computes in bfloat16, not in {jnp.dtype(dtype).name} (train.compute_dtype)"
    most = OLDER_WIDTH if _older_gpu() else MOST_WIDTH
    if width != value_width or width % WIDTH_STEP or width > most:
        return (f"it trains heads up to {most} wide here, in steps of {WIDTH_STEP} and as wide as their values, not "
                f"{width} with values of {value_width}")
    return None


def _older_gpu() -> bool:
    """Whether this process has a GPU from before Hopper; False when it only compiles for one."""
    if jax.default_backend() != "gpu":
        return False
    return float(jax.devices()[0].compute_capability) < 9.0
