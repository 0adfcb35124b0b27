"""What a model costs: parameters, FLOPs, memory. All derived from the declaration of its arrays.

Dims: T sequence length.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from maxtext.config.schema import Config, ModelConfig
from maxtext.config.validate import BATCH_AXES
from maxtext.model.attention import attention_params
from maxtext.model.decoder import decoder_params
from maxtext.model.layers import mlp_params
from maxtext.parallel.sharding import Param, is_param, spec

STATE_BYTES = 12  # a parameter and its two moments, float32

# Dense bfloat16 FLOP/s of one JAX device, by a substring of its `device_kind`; data sheets of Google Cloud and NVIDIA.
# TPU v4, v5p: one device a chip. tpu7x: two devices a chip, half of its 2307 TFLOP/s each.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,
    "A100": 312e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "B200": 2.25e15,
}


def _params(tree: object) -> list[Param]:
    return jax.tree.leaves(tree, is_leaf=is_param)


def count_params(cfg: ModelConfig) -> int:
    """All trainable parameters."""
    return sum(math.prod(p.shape) for p in _params(decoder_params(cfg)))


def count_non_embedding(cfg: ModelConfig) -> int:
    """Parameters without the input embedding; the LM head counts."""
    return count_params(cfg) - math.prod(decoder_params(cfg).embed.shape)


def flops_per_token(cfg: ModelConfig, length: int) -> int:
    """Training FLOPs (forward and backward) of one token in a sequence of `length`, by OLMo-core's count.

    Six a weight of each matmul, QK-norm gains and the final norm included, other norms and the embedding not; attention
    is charged the positions that a query sees on average, w - w (w - 1) / 2T with w = min(window, T); no recomputation
    (OLMo-core 3.0.0 `num_flops_per_token`).
    """
    attention = sum(math.prod(p.shape) for p in _params(attention_params(cfg)))
    feed_forward = sum(math.prod(p.shape) for p in _params(mlp_params(cfg)))
    head = cfg.d_model * cfg.vocab_size + cfg.d_model
    seen = [min(window or length, length) for window in cfg.layer_windows]
    pairs = sum(w * (2 * length - w + 1) for w in seen)  # 2 T times the sum over layers of visible positions
    return 6 * (cfg.n_layers * (attention + feed_forward) + head) + 6 * cfg.n_heads * cfg.head_width * pairs // length


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None when it is not known (then there is no MFU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device while training; an estimate from shapes, before any compiler."""

    weights: int
    moments: int
    gradients: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.moments + self.gradients + self.activations + self.logits


def memory_per_device(cfg: Config, mesh_shape: dict[str, int]) -> Memory:
    """Estimates the training memory of one device.

    Activations are what the backward pass keeps of each block under `train.remat`, plus one block's full set of
    intermediates, which is alive while that block is differentiated.

    Args:
      mesh_shape: size of each mesh axis.
    """
    sharded = sum(_shard_bytes(p, mesh_shape) for p in _params(decoder_params(cfg.model)))
    batch_ways = math.prod(mesh_shape[axis] for axis in BATCH_AXES)
    tokens = cfg.batch_tokens // cfg.train.gradient_accumulation_steps // batch_ways
    width = 2 if cfg.train.compute_dtype == "bfloat16" else 4
    tags, everything = _block_activations(cfg.model, mesh_shape["tensor"])
    remat = cfg.train.remat
    kept = {"none": everything, "full": 0, "names": sum(tags[name] for name in remat.save)}[remat.mode]
    per_token = cfg.model.n_layers * (kept + cfg.model.d_model) + everything
    chunk = min(cfg.train.loss_chunk_tokens, tokens)
    return Memory(
        weights=sharded,
        moments=2 * sharded,
        gradients=sharded * (2 if cfg.train.gradient_accumulation_steps > 1 else 1),
        activations=tokens * per_token * width,
        logits=2 * chunk * cfg.model.vocab_size // mesh_shape["tensor"] * 4,
    )


def _shard_bytes(p: Param, mesh_shape: dict[str, int]) -> int:
    """Float32 bytes of one device's piece of a parameter."""
    ways = 1
    for axes in spec(*p.dims):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            ways *= mesh_shape[axis]
    return 4 * -(-math.prod(p.shape) // ways)


def _block_activations(cfg: ModelConfig, tensor: int) -> tuple[dict[str, int], int]:
    """Values a token that each tagged activation of a block holds on one device, and those of the whole block."""
    queries, keys = cfg.n_heads * cfg.head_width // tensor, cfg.kv_heads * cfg.head_width // tensor
    hidden = cfg.d_ff // tensor
    tags = {
        "qkv": queries + 2 * keys,
        "attention": queries,
        "attention_out": cfg.d_model,
        "gate_up": 2 * hidden,
        "mlp_out": cfg.d_model,
    }
    rotated, normed_branches, activated = queries + keys, 3 * cfg.d_model, hidden
    return tags, sum(tags.values()) + rotated + normed_branches + activated
