"""What a step would take on a machine, from shapes alone: no compiler, no device.

It serves to choose a mesh, to leave hopeless candidates of a search uncompiled, and to say something of runs that are
too large to compile. The parts: matmuls and attention at a share of the peak, all else at the rate of the memory, the
bubbles of a pipeline, and the collectives that the sharding rules imply, at the network's rates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from maxtext.config.schema import Config, ModelConfig
from maxtext.config.validate import BATCH_AXES
from maxtext.model.cost import Memory, declared_params, flops_per_token, memory_per_device
from maxtext.parallel.chips import ATTENTION_EFFICIENCY, MATMUL_EFFICIENCY, Chip
from maxtext.parallel.network import Kind, Network, spread
from maxtext.parallel.sharding import RULES, Param, is_param

UNKNOWN_PEAK = 1e12  # of a device that nothing is published of: only ratios matter then
UNKNOWN_MEMORY_RATE = 50e9
# How much more a compiled step takes than shapes say: two layers of OLMo 3 7B on tpu7x 1.11 times, OLMo 3 7B and 32B on
# H100 1.94 and 1.68 times, where XLA frees less early; a little more on TPUs, as that is one program alone.
COMPILED_OVER_SHAPES = {"tpu": 1.2, "cuda": 1.95}
OPTIMIZER_BYTES = 28  # a parameter: gradient, weight and two moments are read, all but the gradient are written


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one purpose in a step, of one device."""

    what: str
    kind: Kind
    axes: tuple[str, ...]
    array: float  # bytes of one call's whole array
    calls: int
    hidden: bool  # other work does not wait for it


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step and what makes them up; `mfu` in percent, None where no peak is published."""

    memory: Memory
    matmul: float
    attention: float
    elementwise: float  # with the optimizer
    optimizer: float  # of it, which does not shrink with the batch
    bubble: float  # share of a pipeline's time in which a stage waits
    hidden: float
    exposed: float
    ends: float  # of the hidden ones, the first layer's gather and the last gradient, which nothing can hide
    parts: tuple[tuple[Exchange, float], ...]  # collectives that take time, with their seconds
    mfu: float | None

    @property
    def compute(self) -> float:
        return (self.matmul + self.attention + self.elementwise) / (1 - self.bubble)

    def memory_on(self, chip: Chip | None) -> int:
        """Bytes that a compiled step is likely to need on a device."""
        return int(self.memory.total * (1.0 if chip is None else COMPILED_OVER_SHAPES[chip.platform]))

    @property
    def waiting(self) -> float:
        """Seconds in which a device does nothing but wait for others."""
        return self.step - self.compute * (1 - self.bubble)

    @property
    def step(self) -> float:
        return max(self.compute, self.hidden) + self.exposed + self.ends


def predict(cfg: Config, sizes: Mapping[str, int], network: Network, repeats: int | None = None) -> Prediction:
    """Predicts the step of a run on a mesh.

    Args:
      sizes: size of each mesh axis, the last one varying fastest over the devices.
      network: chip and links.
      repeats: parts of the model that each pipeline stage holds, of a circular schedule; None: as configured.
    """
    chip, devices = network.chip, math.prod(sizes.values())
    memory = memory_per_device(cfg, dict(sizes))
    tokens = cfg.batch_tokens / devices
    matmul, attention = (tokens * flops for flops in _flops(cfg))
    peak = UNKNOWN_PEAK if chip is None else chip.peak_flops
    efficiency = 1.0 if chip is None else MATMUL_EFFICIENCY[chip.platform]
    rate, optimizer = _memory_rate(chip), OPTIMIZER_BYTES * memory.weights / 4 / _memory_rate(chip)
    parts = tuple((one, network.seconds(one.kind, one.array, *spread(one.axes, sizes, network.domain), one.calls))
                  for one in exchanges(cfg, sizes))
    stages, repeats = sizes.get("pipeline", 1), repeats or cfg.mesh.pipeline_rounds
    made = Prediction(
        memory=memory, matmul=matmul / (efficiency * peak),
        attention=attention / (attention_efficiency(chip, cfg.model.head_width) * peak),
        elementwise=tokens * _bytes_per_token(cfg) / rate + optimizer, optimizer=optimizer,
        bubble=(stages - 1) / (cfg.train.gradient_accumulation_steps * repeats + stages - 1),
        hidden=sum(seconds for one, seconds in parts if one.hidden),
        exposed=sum(seconds for one, seconds in parts if not one.hidden),
        ends=sum(seconds / max(1, one.calls) for one, seconds in parts if one.hidden), parts=parts, mfu=None)
    if chip is None:
        return made
    model_flops = flops_per_token(cfg.model, cfg.data.sequence_length) * tokens
    return dataclasses.replace(made, mfu=100 * model_flops / (made.step * peak))


def optimizer_seconds(cfg: Config, sizes: Mapping[str, int], chip: Chip | None) -> float:
    """Time in which the optimizer reads and writes what a device holds of weights and moments."""
    return OPTIMIZER_BYTES * memory_per_device(cfg, dict(sizes)).weights / 4 / _memory_rate(chip)


def _memory_rate(chip: Chip | None) -> float:
    return UNKNOWN_MEMORY_RATE if chip is None else chip.memory_rate


def attention_efficiency(chip: Chip | None, width: int) -> float:
    """Share of the peak of an attention kernel with heads of a width; narrow ones leave a TPU's matrix units empty."""
    if chip is None:
        return 1.0
    narrow, wide = ATTENTION_EFFICIENCY[chip.name]
    if width < 128:  # FlashAttention 3 reaches about three quarters with heads of 64
        return narrow * (width / 128 if chip.dims else (1 + width / 128) / 2)
    return narrow + (wide - narrow) * (min(width, 256) - 128) / 128


@functools.lru_cache(maxsize=64)
def _weights(cfg: ModelConfig) -> tuple[float, float, float, int]:
    """Numbers in blocks outside experts, in experts, in embedding and head; and arrays that are gathered a step."""
    declared = declared_params(cfg)
    found = [p for p in _params(declared.segments) if p.trained]
    experts = sum(math.prod(p.shape) for p in found if "expert" in p.dims)
    dense = sum(math.prod(p.shape) for p in found) - experts
    ends = sum(math.prod(p.shape) for p in _params(declared)) - dense - experts
    arrays = sum(p.shape[0] if p.dims[0] == "layers" else 1 for p in found if {"embed", "expert_embed"} & set(p.dims))
    return dense, experts, ends, arrays


def _params(tree: object) -> list[Param]:
    import jax

    return jax.tree.leaves(tree, is_leaf=is_param)


def _flops(cfg: Config) -> tuple[float, float]:
    """FLOPs a token of matmuls and of attention kernels that a step computes, recomputation included."""
    model, length = cfg.model, cfg.data.sequence_length
    dense, experts, _, _ = _weights(cfg.model)
    active = experts * model.moe.top_k / model.moe.experts if model.moe.experts else 0
    head = model.d_model * model.vocab_size
    counted = flops_per_token(model, length)
    pairs = max(0.0, counted - 6 * (dense + active + head))  # of attention, by the model's count: 2 forward, 4 backward
    again = _recomputed(cfg)
    # A kernel that keeps no scores computes them again backward: 5 matmuls instead of 4 of the count.
    kernel_again = 0.0 if cfg.train.remat.mode == "none" or "attention" in _kept(cfg) else 1.0
    return (6 + 2 * again) * (dense + active) + 6 * head, pairs / 6 * (2 + 5 + 2 * kernel_again)


def _kept(cfg: Config) -> set[str]:
    """Names of the values of a block that need not be computed again."""
    return {*cfg.train.remat.kept, *cfg.train.remat.offloaded}


def _recomputed(cfg: Config) -> float:
    """Share of the matmuls of the blocks that the backward pass computes again."""
    model, kept = cfg.model, _kept(cfg)
    if cfg.train.remat.mode == "none":
        return 0.0
    queries, attended = model.n_heads * model.head_width, model.n_heads * model.value_width
    hidden = model.d_ff or 0
    if model.moe.experts:
        hidden = (model.moe.d_expert or 0) * (model.moe.top_k + model.moe.shared_experts)
    sizes = {"qkv": queries + 2 * model.kv_heads * model.head_width, "attention_out": attended, "gate_up": 2 * hidden,
             "mlp_out": hidden}
    return sum(size for name, size in sizes.items() if name not in kept) / sum(sizes.values())


def _bytes_per_token(cfg: Config) -> float:
    """Bytes a token that everything but matmuls and attention reads and writes.

    A block forward: two norms, two additions, the norms and rotations of queries and keys, the gate; backward twice
    that, and again what is recomputed. The loss passes over float32 logits six times.
    """
    model, width = cfg.model, 2 if cfg.train.compute_dtype == "bfloat16" else 4
    rotated = (model.n_heads + model.kv_heads) * model.head_width
    passes, total = 3 + _recomputed(cfg), 0.0
    for routed in model.routed_layers:
        hidden, sent = model.d_ff or 0, 0
        if routed:
            hidden = (model.moe.d_expert or 0) * (model.moe.top_k + model.moe.shared_experts)
            sent = 4 * model.moe.top_k * model.d_model  # to the order of experts and back
        total += (10 * model.d_model + 4 * rotated + 3 * hidden + sent) * width * passes
    return total + 6 * 4 * model.vocab_size


def _weight_axes(dim: str) -> tuple[str, ...]:
    """The axes over which a width of weights is gathered; the stages of a pipeline hold layers of their own."""
    return tuple(axis for axis in RULES[dim] if axis != "pipeline")


def exchanges(cfg: Config, sizes: Mapping[str, int]) -> Iterator[Exchange]:
    """The collectives that the sharding rules imply, leaving out those of one device."""
    model, width = cfg.model, 2 if cfg.train.compute_dtype == "bfloat16" else 4
    size = {axis: sizes.get(axis, 1) for axis in ("data", "pipeline", "fsdp", "expert", "context", "tensor")}
    dense, experts, ends, arrays = _weights(cfg.model)
    inner, steps = size["tensor"] * size["pipeline"], cfg.train.gradient_accumulation_steps
    layers = -(-model.n_layers // size["pipeline"])
    shared, routed = dense / inner + ends / size["tensor"], experts / inner / size["expert"]
    arrays = -(-arrays // size["pipeline"])
    # With a pipeline the micro-batches pass through the stages between one gather and one reduction.
    rounds = 1 if size["pipeline"] > 1 else steps
    calls, mine = arrays * rounds, 0.0
    for dim, numbers in (("embed", shared), ("expert_embed", routed)):
        axes = _weight_axes(dim)
        ways = math.prod(size[axis] for axis in axes)
        mine += numbers / ways
        if numbers and ways > 1:
            array = width * numbers / arrays
            yield Exchange("weights", "all-gather", axes, array, 2 * calls, True)
            yield Exchange("gradients", "reduce-scatter", axes, array, calls, True)
    if size["data"] > 1:
        yield Exchange("gradients", "all-reduce", ("data",), width * mine / arrays, calls, True)
    ways = math.prod(size[axis] for axis in BATCH_AXES if axis not in ("context", "pipeline"))
    tokens = cfg.batch_tokens / steps / ways / size["context"]  # of the devices of a tensor group together
    again = 2 if cfg.train.remat.mode == "none" else 3  # forward, backward, and once more when recomputed
    if size["tensor"] > 1:
        array = tokens * model.d_model * width
        for kind in ("all-gather", "reduce-scatter"):
            yield Exchange("activations", kind, ("tensor",), array, 2 * again * layers * steps, False)  # type: ignore
    if size["expert"] > 1 and model.moe.experts:
        array = tokens * model.moe.top_k * model.d_model * width / size["tensor"]
        routed_layers = -(-sum(model.routed_layers) // size["pipeline"])
        yield Exchange("tokens", "all-to-all", ("expert",), array, 2 * again * routed_layers * steps, False)
    if size["context"] > 1:
        keys = 2 * model.kv_heads * model.head_width / size["tensor"] * tokens * size["context"] * width
        length = cfg.data.sequence_length
        seen = sum(min(length, (window or length) + length // size["context"]) / length
                   for window in model.layer_windows) / size["pipeline"]
        calls = again * layers * steps
        yield Exchange("keys and values", "all-gather", ("context",), keys * seen / layers, calls, False)
    if size["pipeline"] > 1:
        array = tokens * model.d_model * width / size["tensor"]
        yield Exchange("activations", "collective-permute", ("pipeline",), array, 2 * steps, True)
