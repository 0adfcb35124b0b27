"""What a model costs: parameters, FLOPs, memory. All derived from the declaration of its arrays.

Dims: T sequence length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from maxtext.config.schema import Config, ModelConfig, RematConfig
from maxtext.config.validate import AXES, BATCH_AXES
from maxtext.model.decoder import decoder_params
from maxtext.model.matrices import matrices_of
from maxtext.parallel.sharding import Param, is_param, spec

# Dense bfloat16 FLOP/s of one JAX device, by a substring of its `device_kind`; data sheets of Google Cloud and NVIDIA.
# TPU v4, v5p: one device a chip. tpu7x: two devices a chip, half of its 2307 TFLOP/s each.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # how libtpu names v5p; after the names that begin with it
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,
    "A100": 312e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "GB200": 2.5e15,
    "B200": 2.25e15,
}


@functools.lru_cache(maxsize=64)
def declared_params(cfg: ModelConfig) -> Any:
    """`decoder_params`, once a model: a search asks for it thousands of times."""
    return decoder_params(cfg)


def _params(tree: object) -> list[Param]:
    return jax.tree.leaves(tree, is_leaf=is_param)


def _size(p: Param, cfg: ModelConfig, active: bool) -> int:
    """Numbers of an array that gradients train; with `active` those that one token uses."""
    size = math.prod(p.shape) if p.trained else 0
    return size // cfg.moe.experts * cfg.moe.top_k if active and "expert" in p.dims else size


def count_params(cfg: ModelConfig, active: bool = False) -> int:
    """All trainable parameters; with `active` those that one token uses: `moe.top_k` of the experts, and all else."""
    return sum(_size(p, cfg, active) for p in _params(declared_params(cfg)))


def count_non_embedding(cfg: ModelConfig, active: bool = False) -> int:
    """`count_params` without the input embedding; the LM head counts, unless it is the embedding."""
    return count_params(cfg, active) - math.prod(declared_params(cfg).embed.shape)


def flops_per_token(cfg: ModelConfig, length: int) -> int:
    """Training FLOPs (forward and backward) of one token in a sequence of `length`, by OLMo-core's count.

    Six a parameter of attention, feed-forward, final norm and LM head, of experts only for those that the token uses;
    norms of blocks and the embedding are not counted. Attention is charged the positions that a query sees on average,
    w - w (w - 1) / 2T with w = min(window, T), with six for each number of the key and of the value there; no
    recomputation (OLMo-core 3.0.0 `num_flops_per_token`).
    """
    blocks = [block for segment in declared_params(cfg).segments for block in segment]
    weights = sum(_size(p, cfg, active=True) for block in blocks for p in _params((block.attention, block.mlp)))
    head = cfg.d_model * cfg.vocab_size + cfg.d_model
    seen = [min(window or length, length) for window in cfg.layer_windows]
    pairs = sum(w * (2 * length - w + 1) for w in seen)  # 2 T times the sum over layers of visible positions
    return 6 * (weights + head) + 3 * cfg.n_heads * (cfg.head_width + cfg.value_width) * pairs // length


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


def state_bytes(cfg: Config) -> int:
    """Bytes of all weights and moments, on all devices that hold them together."""
    whole = dict.fromkeys(AXES, 1)
    return sum(_shard_bytes(p, whole) for p in _params(declared_params(cfg.model))) + _moments(cfg, whole)


def _moments(cfg: Config, mesh_shape: dict[str, int]) -> int:
    """Bytes of one device's moments, wherever they lie: two of each array, one where Muon serves."""
    declared = declared_params(cfg.model)
    found = 0
    for p, how in zip(_params(declared), matrices_of(declared), strict=True):
        count = 1 if how is not None and cfg.optim.uses_muon else 2
        found += count * _shard_bytes(p, mesh_shape) // (2 if cfg.optim.moments_dtype == "bfloat16" else 1)
    return found


def memory_per_device(cfg: Config, mesh_shape: dict[str, int]) -> Memory:
    """Estimates the training memory of one device.

    Activations are what the backward pass keeps of each block under `train.remat`, plus the largest block's full set of
    intermediates, which is alive while that block is differentiated. Experts are taken to be evenly loaded.

    Args:
      mesh_shape: size of each mesh axis; 1 of those left out.
    """
    sharded = sum(_shard_bytes(p, mesh_shape) for p in _params(declared_params(cfg.model)))
    ways = math.prod(mesh_shape.get(axis, 1) for axis in {*BATCH_AXES, "context"} - {"pipeline"})
    tokens = cfg.batch_tokens // cfg.train.gradient_accumulation_steps // ways
    width = 2 if cfg.train.compute_dtype == "bfloat16" else 4
    routed, tensor = cfg.model.routed_layers, mesh_shape.get("tensor", 1)
    per_token = max(_block_activations(cfg.model, tensor, one)[1] for one in set(routed))
    kept = sum(kept_values(cfg.model, cfg.train.remat, tensor, one)[0] for one in routed)
    stages = mesh_shape.get("pipeline", 1)
    # A stage keeps its layers' values of all micro-batches, which pass forward before the first comes back.
    per_token += kept if stages == 1 else kept * cfg.train.gradient_accumulation_steps // stages
    chunk = min(cfg.train.loss_chunk_tokens, tokens)
    return Memory(
        # In the host's memory: what is held while they are used is a copy in the compute type.
        weights=sharded if cfg.optim.offload_weights != "host" else sharded * width // 4,
        moments=0 if cfg.optim.offload == "host" else _moments(cfg, mesh_shape),
        gradients=sharded * (2 if cfg.train.gradient_accumulation_steps > 1 else 1),
        activations=tokens * per_token * width,
        logits=2 * chunk * cfg.model.vocab_size // tensor * 4,
    )


def kept_values(cfg: ModelConfig, remat: RematConfig, tensor: int = 1, routed: bool = False) -> tuple[int, int]:
    """Values a token that one layer keeps for the backward pass: in a device's memory, and in its host's.

    Its input, of the model's width, is among them. `tensor` is the size of that mesh axis.
    """
    tags, everything = _block_activations(cfg, tensor, routed)
    tags["block"] = cfg.d_model // tensor
    if remat.mode == "none":
        return everything + tags["block"], 0
    here = {*remat.kept, "block"} - {*remat.offloaded}
    return sum(tags[name] for name in here), sum(tags[name] for name in remat.offloaded)


def _shard_bytes(p: Param, mesh_shape: dict[str, int]) -> int:
    """Float32 bytes of one device's piece of a parameter."""
    ways = 1
    for axes in spec(*p.dims):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            ways *= mesh_shape.get(axis, 1)
    return 4 * -(-math.prod(p.shape) // ways)


def _block_activations(cfg: ModelConfig, tensor: int, routed: bool) -> tuple[dict[str, int], int]:
    """Values a token that each tagged activation of a block holds on one device, and those of the whole block."""
    queries, attended, latent = cfg.n_heads * cfg.head_width, cfg.n_heads * cfg.value_width, cfg.latent
    keys = cfg.kv_heads * cfg.head_width
    if latent.kv_rank is None:
        projected, compressed = queries + 2 * keys, 0
    else:
        projected = queries + cfg.n_heads * (latent.nope_dim + latent.value_dim)
        compressed = latent.kv_rank + latent.rope_dim + (latent.q_rank or 0)
    hidden, exchanged = cfg.d_ff or 0, 0
    if routed:
        hidden = (cfg.moe.d_expert or 0) * (cfg.moe.top_k + cfg.moe.shared_experts)
        exchanged = 2 * cfg.moe.top_k * cfg.d_model + cfg.moe.experts  # inputs and outputs of experts, scores
    tags = {
        "qkv": projected // tensor,
        "attention": attended // tensor,
        "attention_out": cfg.d_model // tensor,  # positions are split over the axis between layers
        "gate_up": 2 * hidden // tensor,
        "mlp_out": cfg.d_model // tensor,
    }
    rotated, normed_branches, activated = (queries + keys) // tensor, 3 * cfg.d_model, hidden // tensor
    return tags, sum(tags.values()) + rotated + normed_branches + activated + compressed + exchanged
