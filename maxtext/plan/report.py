"""A plan as a table for people and as JSON for programs, with the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from maxtext.config.schema import Config
from maxtext.model.cost import count_params
from maxtext.plan.estimate import DAY, Estimate, estimate
from maxtext.plan.program import Program, Refusal
from maxtext.plan.topology import GIB, Target
from maxtext.plan.verdict import Verdict, judge
from maxtext.train.console import duration
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


def refusal_json(cfg: Config, target: Target, refusal: Refusal) -> dict[str, Any]:
    """What is known of a step that the compiler refused, under the names of `to_json`."""
    verdict = judge(cfg, target, refusal)
    return _head_json(cfg, target) | {"program": None} | _verdict_json(target, verdict)


def refusal_rows(cfg: Config, target: Target, refusal: Refusal) -> Rows:
    """What is known of a step that the compiler refused."""
    gave_up = (f"the compiler needs {_size(refusal.needed)} a device and may use {_size(refusal.available)} of "
               f"{_size(target.memory_bytes)} ({target.memory_source}), and gave up")
    return [("target", f"{target.name}: {target.n_devices} devices"), *_size_rows(cfg), ("memory", gave_up),
            *_verdict_rows(judge(cfg, target, refusal))]


def _head_json(cfg: Config, target: Target) -> dict[str, Any]:
    return {"run_name": cfg.run_name, "topology": target.name, "devices": target.n_devices,
            "parameters": count_params(cfg.model), "tokens_per_step": cfg.batch_tokens, "steps": cfg.train.steps,
            "sequence_length": cfg.data.sequence_length, "remat": dataclasses.asdict(cfg.train.remat),
            "gradient_accumulation_steps": cfg.train.gradient_accumulation_steps,
            "compute_dtype": cfg.train.compute_dtype}


def _verdict_json(target: Target, verdict: Verdict) -> dict[str, Any]:
    return {"memory": {"needed": verdict.needed, "capacity": verdict.capacity, "source": target.memory_source},
            "fits": verdict.fits, "suggestions": [dataclasses.asdict(one) for one in verdict.suggestions]}


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a tree of numbers; memory in bytes, FLOPs of one device and step, times in seconds."""
    program, guess = plan.program, plan.estimate
    return _head_json(plan.cfg, plan.target) | {"program": program.to_json()} | _verdict_json(
        plan.target, plan.verdict) | {
        "flops": {"model": guess.model_flops, "compiled": program.matmul_flops + program.kernel_flops,
                  "ratio": plan.flops_ratio},
        "estimate": dataclasses.asdict(guess) | {
            "tokens_per_day": _tokens_per_day(plan), "days": _days(plan)},
    }


def to_rows(plan: Plan, from_cache: bool) -> Rows:
    """The plan as labelled lines."""
    program = plan.program
    axes = ", ".join(f"{axis} {size}" for axis, size in program.mesh.items() if axis != "expert" or size > 1)
    seconds = f"{program.trace_seconds:.1f} s to trace, {program.compile_seconds:.1f} s to compile"
    made = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    return [
        ("target", f"{plan.target.name}: {plan.target.n_devices} devices; mesh {axes}"),
        *_size_rows(plan.cfg),
        ("memory", _memory(plan)),
        *_verdict_rows(plan.verdict),
        ("FLOPs", _flops(plan)),
        *_traffic_rows(program),
        *_time_rows(plan),
        ("compiled", f"{seconds}{f', on {program.date} (cached)' if from_cache else ''}; {made}"),
        *([("flags", " ".join(program.flags))] if program.flags else []),
        *[("assumed" if number == 0 else "", line) for number, line in enumerate(plan.estimate.assumptions)],
    ]


def _size_rows(cfg: Config) -> Rows:
    return [("parameters", f"{count_params(cfg.model):,}"),
            ("batch", f"{cfg.batch_tokens:,} tokens a step, {cfg.train.steps:,} steps")]


def _verdict_rows(verdict: Verdict) -> Rows:
    tries = [("  try", _suggestion(one.overrides, one.saves)) for one in verdict.suggestions]
    return [("verdict", _verdict(verdict)), *tries]


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
    if program.cycles:
        text += (f"; {program.cycles / 1e6:,.1f} M cycles by XLA's estimate, "
                 f"{program.matmul_cycles / program.cycles:.0%} of them in matmuls")
    return text


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
        ("run", f"{_tokens_per_day(plan):.3g} tokens a day, "
                f"{duration(plan.cfg.train.steps * guess.step_seconds)} to the last update"),
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
