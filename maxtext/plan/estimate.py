"""How long a compiled step would take: a simple model whose every assumption is written out."""

from __future__ import annotations

import dataclasses

from maxtext.config.schema import Config
from maxtext.model.cost import flops_per_token
from maxtext.model.prediction import attention_efficiency
from maxtext.parallel.chips import MATMUL_EFFICIENCY
from maxtext.parallel.network import LATENCIES, SWITCH_EFFICIENCY, spread
from maxtext.plan.collectives import UNKNOWN, Traffic
from maxtext.plan.program import Program
from maxtext.plan.topology import Target

# FLOPs that the matrix units of one device do in a cycle; with the peak this gives the clock. Not documented for all.
FLOPS_PER_CYCLE = {"tpu7x": 524_288, "v6e": 524_288, "v5p": 262_144, "v5e": 131_072}
DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step and what follows from them; None of a chip without published numbers."""

    model_flops: float  # of one device and step, by the model's count
    matmul_seconds: float | None
    cycle_seconds: float | None
    hidden_seconds: float | None  # collectives that other work may overlap
    exposed_seconds: float | None  # collectives that it may not
    step_seconds: float | None
    mfu: float | None  # percent
    assumptions: tuple[str, ...]


def estimate(cfg: Config, target: Target, program: Program) -> Estimate:
    """Predicts the step: the longer of computing and overlapped collectives, and then the collectives that block."""
    model_flops = flops_per_token(cfg.model, cfg.data.sequence_length) * cfg.batch_tokens / target.n_devices
    chip = target.chip
    if chip is None:
        return Estimate(model_flops, *[None] * 6, assumptions=("the peak of this CPU is not known: no time, no MFU",))
    rate = MATMUL_EFFICIENCY[chip.platform] * chip.peak_flops
    attention_rate = attention_efficiency(chip, cfg.model.head_width) * chip.peak_flops
    kernel_seconds = ((program.kernel_flops - program.attention_flops) / rate
                      + program.attention_flops / attention_rate)
    matmul_seconds = program.matmul_flops / rate + kernel_seconds
    clock = chip.peak_flops / FLOPS_PER_CYCLE[chip.name] if program.cycles else None
    cycle_seconds = program.cycles / clock + kernel_seconds if clock else None
    hidden, exposed = (collective_seconds(target, program, overlapped) for overlapped in (True, False))
    step = max(matmul_seconds, cycle_seconds or 0.0, hidden) + exposed
    return Estimate(model_flops, matmul_seconds, cycle_seconds, hidden, exposed, step,
                    100 * model_flops / (step * chip.peak_flops), _assumptions(cfg, target, program, clock))


def collective_seconds(target: Target, program: Program, asynchronous: bool) -> float:
    """Time of the collectives that may, or may not, overlap other work, one after another."""
    return sum(_seconds(target, program, row) for row in program.traffic if row.asynchronous == asynchronous)


def _seconds(target: Target, program: Program, row: Traffic) -> float:
    """By the dims of the torus that the compiled groups span; between slices and for GPUs by the network's model."""
    assert target.chip is not None
    network, mesh = target.network, program.mesh
    axes = list(mesh) if row.axes == UNKNOWN else row.axes.removesuffix(" in part").split("+")
    near, far = spread(axes, mesh, network.domain)
    if row.axes.endswith(" in part") and row.devices <= near:
        near, far = row.devices, 1  # XLA splits what crosses slices into a part inside each and one between them
    if far == 1 and network.torus:
        return row.bytes_sent / axis_bandwidth(target, program.torus_dims[row.axes])
    passes = {"all-reduce": 2, "collective-permute": row.devices / (row.devices - 1)}.get(row.kind, 1)
    array = row.bytes_sent / row.count * row.devices / (row.devices - 1) / passes
    kind = row.kind.removeprefix("ragged-").replace("collective-broadcast", "collective-permute")
    return network.seconds(kind, array, near, far, row.count)  # type: ignore[arg-type]


def axis_bandwidth(target: Target, torus_dims: int) -> float:
    """Bytes a second that one device sends along so many dims of the torus, both ways round each."""
    assert target.chip is not None
    return 2 * max(torus_dims, 1) * target.chip.link_bytes / target.chip.devices


def _assumptions(cfg: Config, target: Target, program: Program, clock: float | None) -> tuple[str, ...]:
    chip = target.chip
    assert chip is not None
    lines = [f"peak {chip.peak_flops / 1e12:,.1f} TFLOP/s a device in bfloat16; matmuls reach "
             f"{MATMUL_EFFICIENCY[chip.platform]:.0%} of it"]
    if clock:
        lines.append(f"XLA's estimated cycles at {clock / 1e9:.2f} GHz (the peak over "
                     f"{FLOPS_PER_CYCLE[chip.name]:,} FLOPs a cycle)")
    if program.attention_flops:
        width, share = cfg.model.head_width, attention_efficiency(chip, cfg.model.head_width)
        lines.append(f"attention kernels with heads of {width} reach {share:.0%} of the peak")
    lines += [*link_assumptions(target),
              "asynchronous collectives overlap computing fully, synchronous ones not at all",
              "no time for the host, the data or stalls of memory that XLA does not see"]
    if chip.platform == "cuda":
        lines.append("kernels are not chosen by timing, and XLA estimates no cycles: everything but matmuls is free")
    if program.silent_kernels:
        lines.append(f"{program.silent_kernels:,} kernel calls declare no FLOPs and count as no time")
    if program.named_loops:
        lines.append(f"{program.named_loops:,} loops over blocks of rows count as if experts shared all rows evenly")
    if program.unknown_loops:
        lines.append(f"{len(program.unknown_loops)} loops of unknown length count once")
    if program.branches:
        lines.append(f"all branches of {program.branches} conditionals count")
    return tuple(lines)


def link_assumptions(target: Target) -> list[str]:
    """What is taken for granted about the links of a target."""
    chip = target.chip
    assert chip is not None
    latency = LATENCIES[chip.platform]
    if chip.platform == "cuda":
        return [f"NVLink {chip.link_bytes / 1e9:.0f} GB/s and between nodes {chip.network_bytes / 1e9:.0f} GB/s a GPU, "
                f"one way, of which rings reach {SWITCH_EFFICIENCY:.0%}; {1e6 * latency.near:.1f} and "
                f"{1e6 * latency.far:.1f} us a step"]
    shared = f", shared by the chip's {chip.devices} devices" if chip.devices > 1 else ""
    lines = [f"links of {chip.link_bytes / 1e9:.0f} GB/s one way, two for each torus dim that a mesh axis spans"
             f"{shared}; every ring is closed, nothing else uses them, collectives follow one another"]
    if target.slices > 1:
        lines.append(f"between slices {chip.network_bytes / 1e9:.2f} GB/s a device one way, {1e6 * latency.far:.0f} "
                     "us a step")
    return lines
