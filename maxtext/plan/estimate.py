"""How long a compiled step would take: a simple model whose every assumption is written out."""

from __future__ import annotations

import dataclasses

from maxtext.config.schema import Config
from maxtext.model.cost import flops_per_token
from maxtext.plan.program import Program
from maxtext.plan.topology import Target

# XLA's own cycle estimates put one large bfloat16 matmul at 82 to 87% of the peak on v5p, v6e and tpu7x.
MATMUL_EFFICIENCY = 0.83
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
    rate = MATMUL_EFFICIENCY * chip.peak_flops
    kernel_seconds = program.kernel_flops / rate
    matmul_seconds = program.matmul_flops / rate + kernel_seconds
    clock = chip.peak_flops / FLOPS_PER_CYCLE[chip.name]
    cycle_seconds = program.cycles / clock + kernel_seconds if program.cycles else None
    hidden, exposed = (collective_seconds(target, program, overlapped) for overlapped in (True, False))
    step = max(matmul_seconds, cycle_seconds or 0.0, hidden) + exposed
    return Estimate(model_flops, matmul_seconds, cycle_seconds, hidden, exposed, step,
                    100 * model_flops / (step * chip.peak_flops), _assumptions(target, program, clock))


def collective_seconds(target: Target, program: Program, asynchronous: bool) -> float:
    """Time of the collectives that may, or may not, overlap other work, one after another."""
    assert target.chip is not None
    return sum(row.bytes_sent / axis_bandwidth(target, program.torus_dims[row.axes])
               for row in program.traffic if row.asynchronous == asynchronous)


def axis_bandwidth(target: Target, torus_dims: int) -> float:
    """Bytes a second that one device sends along so many dims of the torus, both ways round each."""
    assert target.chip is not None
    return 2 * max(torus_dims, 1) * target.chip.link_bytes / target.chip.devices


def _assumptions(target: Target, program: Program, clock: float) -> tuple[str, ...]:
    chip = target.chip
    assert chip is not None
    shared = f", shared by the chip's {chip.devices} devices" if chip.devices > 1 else ""
    lines = [
        f"peak {chip.peak_flops / 1e12:,.1f} TFLOP/s a device in bfloat16; matmuls reach {MATMUL_EFFICIENCY:.0%} of it",
        f"links of {chip.link_bytes / 1e9:.0f} GB/s one way, two for each torus dim that a mesh axis spans{shared}; "
        "every ring is closed, nothing else uses them, collectives follow one another",
        "asynchronous collectives overlap computing fully, synchronous ones not at all",
        "no time for the host, the data or stalls of memory that XLA does not see",
    ]
    if program.cycles:
        lines.insert(1, f"XLA's estimated cycles at {clock / 1e9:.2f} GHz (the peak over "
                        f"{FLOPS_PER_CYCLE[chip.name]:,} FLOPs a cycle)")
    if program.silent_kernels:
        lines.append(f"{program.silent_kernels:,} kernel calls declare no FLOPs and count as no time")
    if program.unknown_loops:
        lines.append(f"{len(program.unknown_loops)} loops of unknown length count once")
    if program.branches:
        lines.append(f"all branches of {program.branches} conditionals count")
    return tuple(lines)
