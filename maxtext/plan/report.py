"""A plan as a table for people and as JSON for programs, with the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from maxtext.config.schema import Config
from maxtext.model.cost import count_params
from maxtext.plan.estimate import DAY, Estimate, estimate
from maxtext.plan.program import Program
from maxtext.plan.topology import GIB, Target
from maxtext.plan.verdict import Verdict, judge
from maxtext.train.summary import Rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is known of one config on one target."""

    cfg: Config
    target: Target
    program: Program
    estimate: Estimate
    verdict: Verdict

    @property
    def flops_ratio(self) -> float:
        """What the compiled step computes over what the model's count says it must."""
        return (self.program.matmul_flops + self.program.kernel_flops) / self.estimate.model_flops


def make_plan(cfg: Config, target: Target, program: Program) -> Plan:
    return Plan(cfg, target, program, estimate(cfg, target, program), judge(cfg, target, program))


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a tree of numbers; memory in bytes, FLOPs of one device and step, times in seconds."""
    program, guess, verdict, cfg = plan.program, plan.estimate, plan.verdict, plan.cfg
    return {
        "run_name": cfg.run_name,
        "topology": plan.target.name,
        "devices": plan.target.n_devices,
        "parameters": count_params(cfg.model),
        "tokens_per_step": cfg.batch_tokens,
        "steps": cfg.train.steps,
        "program": program.to_json(),
        "memory": {"needed": verdict.needed, "capacity": verdict.capacity, "source": plan.target.memory_source},
        "fits": verdict.fits,
        "suggestions": [dataclasses.asdict(one) for one in verdict.suggestions],
        "flops": {"model": guess.model_flops, "compiled": program.matmul_flops + program.kernel_flops,
                  "ratio": plan.flops_ratio},
        "estimate": dataclasses.asdict(guess) | {
            "tokens_per_day": _tokens_per_day(plan), "days": _days(plan)},
    }


def to_rows(plan: Plan, from_cache: bool) -> Rows:
    """The plan as labelled lines."""
    cfg, program = plan.cfg, plan.program
    axes = ", ".join(f"{axis} {size}" for axis, size in program.mesh.items() if axis != "expert" or size > 1)
    seconds = f"{program.trace_seconds:.1f} s to trace, {program.compile_seconds:.1f} s to compile"
    made = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    return [
        ("target", f"{plan.target.name}: {plan.target.n_devices} devices; mesh {axes}"),
        ("parameters", f"{count_params(cfg.model):,}"),
        ("batch", f"{cfg.batch_tokens:,} tokens a step, {cfg.train.steps:,} steps"),
        ("memory", _memory(plan)),
        ("verdict", _verdict(plan.verdict)),
        *[("  try", _suggestion(one.overrides, one.saves)) for one in plan.verdict.suggestions],
        ("FLOPs", _flops(plan)),
        *_traffic_rows(program),
        *_time_rows(plan),
        ("compiled", f"{seconds}{', earlier (cached)' if from_cache else ''}; {made}"),
        *[("assumed" if number == 0 else "", line) for number, line in enumerate(plan.estimate.assumptions)],
    ]


def _memory(plan: Plan) -> str:
    m, target = plan.program.memory, plan.target
    parts = {"arguments": m.arguments, "outputs": m.outputs, "of them in place": -m.aliased,
             "temporaries": m.temporaries, "code": m.code}
    shown = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    return f"{_size(m.total)} a device: {shown}; it has {_size(target.memory_bytes)} ({target.memory_source})"


def _verdict(verdict: Verdict) -> str:
    share = f"{verdict.needed / verdict.capacity:.1%} of a device's memory"
    if verdict.fits:
        return f"fits: {share}"
    if verdict.suggestions:
        return f"does not fit: {share}, {_size(verdict.needed - verdict.capacity)} too much"
    return (f"does not fit: {share}, and no setting of remat, mesh or accumulation would help; use more devices, or "
            "lower train.global_batch or data.sequence_length")


def _suggestion(overrides: Iterable[str], saves: int) -> str:
    return f"{' '.join(overrides)} (saves about {_size(saves)} a device, by shapes)"


def _flops(plan: Plan) -> str:
    program, guess = plan.program, plan.estimate
    text = (f"{guess.model_flops / 1e12:,.3f} TFLOP a device and step by the model's count; compiled "
            f"{(program.matmul_flops + program.kernel_flops) / 1e12:,.3f}, {plan.flops_ratio:.2f} times as much")
    if program.kernels:
        text += f"; {program.kernels:,} kernel calls, {program.silent_kernels:,} of which declare none"
    return text + (f"; {program.cycles / 1e6:,.1f} M cycles by XLA's estimate" if program.cycles else "")


def _traffic_rows(program: Program) -> Rows:
    rows = [f"{row.count:,} {row.kind} over {row.axes} ({row.devices}): {_size(row.bytes_sent)} sent by each device, "
            f"{'asynchronous' if row.asynchronous else 'synchronous'}" for row in program.traffic]
    return [("collectives" if number == 0 else "", row) for number, row in enumerate(rows or ["none"])]


def _time_rows(plan: Plan) -> Rows:
    guess = plan.estimate
    if guess.step_seconds is None or guess.mfu is None:
        return [("step", "n/a"), ("MFU", "n/a")]
    cycles = "" if guess.cycle_seconds is None else f", XLA's cycles {guess.cycle_seconds:.4g} s"
    return [
        ("step", f"about {guess.step_seconds:.4g} s: matmuls {guess.matmul_seconds:.4g} s{cycles}, overlapped "
                 f"collectives {guess.hidden_seconds:.4g} s, blocking ones {guess.exposed_seconds:.4g} s"),
        ("MFU", f"about {guess.mfu:.1f}%"),
        ("run", f"{_tokens_per_day(plan):.3g} tokens a day, {_days(plan):,.1f} days to the last update"),
    ]


def _tokens_per_day(plan: Plan) -> float | None:
    seconds = plan.estimate.step_seconds
    return None if seconds is None else plan.cfg.batch_tokens * DAY / seconds


def _days(plan: Plan) -> float | None:
    seconds = plan.estimate.step_seconds
    return None if seconds is None else plan.cfg.train.steps * seconds / DAY


def _size(count: int) -> str:
    """Bytes with a sign and a unit, such as `1.5 GiB`."""
    if abs(count) >= GIB // 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / (1 << 20):,.2f} MiB"
