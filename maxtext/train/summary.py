"""What a run is, in a few lines: shown at the start and by a dry run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from maxtext.config.layers import Layer, segments
from maxtext.config.schema import Config, ModelConfig
from maxtext.config.validate import SPECIAL_AXES
from maxtext.config.wording import counted
from maxtext.kernels.choice import choose_attention, choose_grouped_matmul, problem_of
from maxtext.model.cost import count_non_embedding, count_params, flops_per_token, memory_per_device, state_bytes
from maxtext.model.decoder import decoder_params
from maxtext.model.matrices import matrices_of
from maxtext.parallel.mesh import sizes_of
from maxtext.parallel.sharding import is_param
from maxtext.parallel.show import size_text
from maxtext.train.schedule import learning_rate

Rows = list[tuple[str, str]]


def model_rows(cfg: Config) -> Rows:
    """The architecture, its parameters and its FLOPs."""
    m = cfg.model
    layers = " + ".join(f"{s.repeats} x [{', '.join(_layer(layer) for layer in s.layers)}]" for s in segments(m))
    flops = flops_per_token(m, cfg.data.sequence_length)
    return [
        ("model", f"{m.n_layers} layers, width {m.d_model}, {_heads(m)}, {_feed_forward(m)}, "
                  f"vocabulary {m.vocab_size:,}"),
        ("layers", layers),
        ("parameters", _parameters(m)),
        ("FLOPs", f"{flops / 1e9:,.3f} GFLOP/token at sequence {cfg.data.sequence_length:,}; "
                  f"{flops * cfg.batch_tokens * cfg.train.steps:.3g} FLOP in all"),
    ]


def _heads(m: ModelConfig) -> str:
    heads = f"{m.n_heads} heads of {m.head_width}"
    if m.latent.kv_rank is not None:
        return f"{heads}, keys and values of {m.value_width} from {m.latent.kv_rank} latent"
    return heads + (f", {m.kv_heads} key/value heads" if m.n_kv_heads else "")


def _feed_forward(m: ModelConfig) -> str:
    dense, moe = m.routed_layers.count(False), m.moe
    shared = f" and {moe.shared_experts} shared" if moe.shared_experts else ""
    where = f" in the first {dense}" if moe.experts else ""
    parts = [f"feed-forward {m.d_ff}{where}"] if dense else []
    parts += [f"{moe.experts} experts of {moe.d_expert}, {moe.top_k} a token{shared}"] if moe.experts else []
    return ", ".join(parts)


def _parameters(m: ModelConfig) -> str:
    """All of them and, where there are experts, those that one token uses."""
    rest = f"{count_non_embedding(m):,} without the embedding"
    if not m.moe.experts:
        return f"{count_params(m):,} ({rest})"
    active = f"{count_params(m, active=True):,} active"
    return f"{count_params(m):,} ({active}); {rest} ({count_non_embedding(m, active=True):,} active)"


def _layer(layer: Layer) -> str:
    kind = "full" if layer.window is None else f"window {layer.window}"
    return f"{kind} routed" if layer.routed else kind


def run_rows(cfg: Config) -> Rows:
    """Batch, tokens and schedule."""
    t, s = cfg.train, cfg.schedule
    split = f" in {t.gradient_accumulation_steps} micro-batches" if t.gradient_accumulation_steps > 1 else ""
    steps = sorted({1, max(1, s.warmup_steps), max(1, t.steps // 2), t.steps})
    rates = ", ".join(f"{learning_rate(cfg, step):.4g} at {step:,}" for step in steps)
    return [
        ("batch", f"{t.global_batch:,} sequences x {cfg.data.sequence_length:,} = {cfg.batch_tokens:,} tokens{split}"),
        ("updates", f"{t.steps:,} updates, {t.steps * cfg.batch_tokens:,} tokens"),
        ("schedule", f"{s.kind}, warm-up {s.warmup_steps:,}, ends at {cfg.schedule_steps:,}; lr {rates}"),
        ("precision", f"compute {t.compute_dtype}, weights float32, moments {cfg.optim.moments_dtype}" + (
            ", gradients rounded to bfloat16 for the log" if cfg.checkpoint.gradient_log else "")),
        ("determinism", determinism_row(cfg)),
        ("quantised", quantised_row(cfg)),
        ("optimizer", optimizer_row(cfg)),
    ]


def determinism_row(cfg: Config) -> str:
    """What keeps every bit of the run."""
    kind, shards = cfg.train.determinism, cfg.virtual_shards
    if kind != "any_mesh":
        return {"none": "CPUs and TPUs keep a resume's bits; for GPUs set train.determinism=same_mesh",
                "same_mesh": "same bits on the same devices and versions"}[kind]
    return (f"same bits on up to {shards:,} devices: {shards:,} virtual shards of "
            f"{cfg.train.global_batch // shards:,} sequences, one after another on each device")


def quantised_row(cfg: Config) -> str:
    """Which matmuls run in eight bits, and how."""
    quant = cfg.quant
    if quant.kind == "none":
        return "nothing"
    parts = [part for part in quant.parts if part == "dense" or cfg.model.moe.experts]
    whole = "" if quant.weight_gradients else f", gradients of weights in {cfg.train.compute_dtype}"
    random = ", gradients rounded at random" if quant.stochastic_rounding else ""
    return f"{' and '.join(parts)} matmuls in {quant.kind}{whole}{random}; embeddings, norms, routers, scores, head not"


def optimizer_row(cfg: Config) -> str:
    """The kind of optimizer, and which weights Muon updates at which peak rate."""
    if not cfg.optim.uses_muon:
        return cfg.optim.kind
    declared = decoder_params(cfg.model)
    leaves = jax.tree.leaves(declared, is_leaf=is_param)
    shared = [(math.prod(p.shape), how is not None) for p, how in zip(leaves, matrices_of(declared), strict=True)]
    part = sum(size for size, is_matrix in shared if is_matrix) / sum(size for size, _ in shared)
    lr = cfg.optim.lr if cfg.optim.muon.matrix_lr is None else cfg.optim.muon.matrix_lr
    return f"{cfg.optim.kind}: Muon for {part:.1%} of the weights at peak lr {lr:g}, AdamW for the others"


def data_rows(description: Mapping[str, Any], sets: Collection[str]) -> Rows:
    """Sources and epochs, from `GlobalBatches.describe()`, and the held-out sets."""
    if "stream" in description:
        return [("data", description["stream"]), ("held out", ", ".join(sets) or "none")]
    sources = ", ".join(
        f"{name} {source['share']:.1%} ({source['tokens']:,} tokens an epoch, in {counted(source['files'], 'file')})"
        for name, source in description["sources"].items()
    )
    read, passes = description["reading"], description["passes"]
    how_often = (f"{description['epochs']:.2f} epochs of {description['batches_per_epoch']:,} batches" if passes is None
                 else "passes " + ", ".join(f"{name} {count:.2f}" for name, count in passes.items()))
    return [
        ("data", f"{sources}; {how_often}"),
        ("an epoch", f"{read['tokens']:,} tokens: {read['trained']:,} trained, {read['dropped']:,} dropped; "
                     f"{read['padding']:.1%} of positions are padding"),
        ("held out", ", ".join(sets) or "none"),
    ]


def start_summary(cfg: Config, mesh: Mesh, description: Mapping[str, Any], sets: Collection[str],
                  why_mesh: Sequence[str] = ()) -> Rows:
    """All that a person should know before the first update."""
    processes = len({device.process_index for device in mesh.devices.flat})
    kind = f"{mesh.size} x {mesh.devices.flat[0].device_kind}" + (f" in {processes} processes" * (processes > 1))
    tasks = [("tasks", ", ".join(cfg.eval.tasks))] if cfg.eval.tasks else []
    data = data_rows(description, sets) + tasks
    kernels = [("kernels", kernels_in_use(cfg, mesh.devices.flat[0].platform))]
    return model_rows(cfg) + data + run_rows(cfg) + kernels + device_rows(cfg, sizes_of(mesh), kind, why_mesh)


def kernels_in_use(cfg: Config, platform: str) -> str:
    """What computes attention, and experts if there are any, on a platform; and why."""
    parts = [f"attention {choose_attention(cfg.kernels.attention, platform, problem_of(cfg))}"]
    if any(cfg.model.routed_layers):
        parts.append(f"experts {choose_grouped_matmul(cfg.kernels.grouped_matmul, platform)}")
    return ", ".join(parts)


def device_rows(cfg: Config, mesh_shape: Mapping[str, int], kind: str, why_mesh: Sequence[str] = ()) -> Rows:
    """Mesh and why `mesh: auto` chose it, estimated memory on one device, and checkpoint size."""
    memory = memory_per_device(cfg, dict(mesh_shape))
    parts = ("weights", "moments", "gradients", "activations", "logits")
    split = ", ".join(f"{part} {size_text(getattr(memory, part))}" for part in parts)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh_shape.items() if axis not in SPECIAL_AXES or size > 1)
    every = "only at the end" if cfg.checkpoint.every is None else f"every {cfg.checkpoint.every:,} updates"
    kept = "all kept" if cfg.checkpoint.keep_last is None else f"last {cfg.checkpoint.keep_last} kept"
    return [
        ("mesh", f"{axes} ({kind})"),
        *([("mesh: auto", "; ".join(why_mesh))] if why_mesh else []),
        ("memory", f"about {size_text(memory.total)} a device: {split}"),
        ("checkpoint", f"{size_text(state_bytes(cfg))} each, {every}, {kept}"),
        *([("snapshots", f"every {cfg.checkpoint.snapshot_every:,} updates, two in the hosts' memory; they survive the "
                         f"death of a process, not of its machine")] if cfg.checkpoint.snapshots else []),
        *([("gradient log", f"{size_text(2 * count_params(cfg.model))} for each update since the last snapshot, in the "
                            f"hosts' memory too")] if cfg.checkpoint.gradient_log else []),
        ("outputs", cfg.run_dir),
    ]
