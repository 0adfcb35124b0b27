"""A plan as a table for people and as JSON for programs, with the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from maxtext.config.schema import Config
from maxtext.config.wording import counted
from maxtext.model.cost import count_params
from maxtext.model.prediction import Prediction
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
    return head_json(cfg, target) | {"program": None} | _verdict_json(target, verdict)


def refusal_rows(cfg: Config, target: Target, refusal: Refusal) -> Rows:
    """What is known of a step that the compiler refused."""
    gave_up = (f"the compiler needs {size_text(refusal.needed)} a device and may use {size_text(refusal.available)} of "
               f"{size_text(target.memory_bytes)} ({target.memory_source}), and gave up")
    return [("target", f"{target.name}: {counted(target.n_devices, 'device')}"), *_size_rows(cfg), ("memory", gave_up),
            *_verdict_rows(judge(cfg, target, refusal))]


def head_json(cfg: Config, target: Target) -> dict[str, Any]:
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
    return head_json(plan.cfg, plan.target) | {"program": program.to_json()} | _verdict_json(
        plan.target, plan.verdict) | {
        "flops": {"model": guess.model_flops, "compiled": program.matmul_flops + program.kernel_flops,
                  "ratio": plan.flops_ratio},
        "estimate": dataclasses.asdict(guess) | {
            "tokens_per_day": _tokens_per_day(plan), "days": _days(plan)},
    }


def to_rows(plan: Plan, from_cache: bool) -> Rows:
    """The plan as labelled lines."""
    program = plan.program
    seconds = f"{program.trace_seconds:.1f} s to trace, {program.compile_seconds:.1f} s to compile"
    made = ", ".join(f"{name} {version}" for name, version in program.versions.items())
    return [
        ("target", f"{plan.target.name}: {counted(plan.target.n_devices, 'device')}; mesh {_axes(program.mesh)}"
                   f"{'; --topology names another machine' * (plan.target.chip is None)}"),
        *_size_rows(plan.cfg),
        ("memory", _memory(plan)),
        *_verdict_rows(plan.verdict),
        ("FLOPs", _flops(plan)),
        ("kernels", kernels_text(program.kernel_names)),
        *_traffic_rows(program),
        *_time_rows(plan),
        ("compiled", f"{seconds}{f', on {program.date} (cached)' if from_cache else ''}; {made}"),
        *([("flags", " ".join(program.flags))] if program.flags else []),
        *[("assumed" if number == 0 else "", line) for number, line in enumerate(plan.estimate.assumptions)],
    ]


def prediction_rows(cfg: Config, target: Target, mesh: Mapping[str, int], made: Prediction) -> Rows:
    """What shapes say, as labelled lines."""
    memory = made.memory
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in dataclasses.asdict(memory).items())
    likely = made.memory_on(target.chip)
    fits = "should fit" if likely <= target.memory_bytes else "should not fit"
    rows = [("target", f"{target.name}: {counted(target.n_devices, 'device')}; mesh {_axes(mesh)}"), *_size_rows(cfg),
            ("memory", f"about {size_text(memory.total)} a device: {parts}; it has {size_text(target.memory_bytes)} "
                       f"({target.memory_source})"),
            ("verdict", f"{fits}: {memory.total / target.memory_bytes:.1%} of a device's memory by shapes, and about "
                        f"{likely / target.memory_bytes:.1%} as compilers lay steps out")]
    if target.chip is None or made.mfu is None:
        return [*rows, ("step", "n/a"), ("MFU", "n/a")]
    bubbles = f", {made.bubble:.0%} of a pipeline's time empty" if made.bubble else ""
    sent = [f"{one.calls:,} {one.kind} of {one.what} over {'+'.join(one.axes)}: {seconds:.3g} s, "
            f"{'overlapped' if one.hidden else 'blocking'}" for one, seconds in made.parts]
    return [
        *rows, *[("collectives" if number == 0 else "", row) for number, row in enumerate(sent or ["none"])],
        ("step", f"about {made.step:.4g} s: matmuls {made.matmul:.4g} s, attention {made.attention:.4g} s, all else at "
                 f"the rate of the memory {made.elementwise:.4g} s{bubbles}, overlapped collectives {made.hidden:.4g} "
                 f"s, blocking ones {made.exposed:.4g} s"),
        ("MFU", f"about {made.mfu:.1f}%"), _run_row(cfg, made.step)]


def prediction_json(cfg: Config, target: Target, mesh: Mapping[str, int], made: Prediction) -> dict[str, Any]:
    """What shapes say, under the names of `to_json` where they are the same."""
    known = target.chip is not None
    return head_json(cfg, target) | {
        "program": None, "mesh": dict(mesh), "fits": made.memory_on(target.chip) <= target.memory_bytes,
        "memory": {"needed": made.memory_on(target.chip), "shapes": made.memory.total,
                   "capacity": target.memory_bytes, "source": target.memory_source,
                   "parts": dataclasses.asdict(made.memory)},
        "estimate": {"step_seconds": made.step if known else None, "mfu": made.mfu, "from": "shapes",
                     "matmul_seconds": made.matmul, "attention_seconds": made.attention,
                     "elementwise_seconds": made.elementwise, "hidden_seconds": made.hidden,
                     "exposed_seconds": made.exposed, "bubble": made.bubble,
                     "tokens_per_day": cfg.batch_tokens * DAY / made.step if known else None,
                     "days": cfg.train.steps * made.step / DAY if known else None}}


def _axes(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.items() if axis in ("data", "fsdp", "tensor") or size > 1)


def _run_row(cfg: Config, step: float) -> tuple[str, str]:
    return ("run", f"{cfg.batch_tokens * DAY / step:.3g} tokens a day, {duration(cfg.train.steps * step)} to the last "
                   "update")


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
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    return f"{size_text(m.total)} a device: {shown}; it has {size_text(target.memory_bytes)} ({target.memory_source})"


def _verdict(verdict: Verdict) -> str:
    share = f"{verdict.needed / verdict.capacity:.1%} of a device's memory"
    if verdict.fits:
        return f"fits: {share}"
    if verdict.suggestions:
        return f"does not fit: {share}, {size_text(verdict.needed - verdict.capacity)} too much"
    return (f"does not fit: {share}, and no setting of remat, mesh, optimizer or accumulation would help; use more "
            "devices, or lower train.global_batch or data.sequence_length")


def _suggestion(overrides: Iterable[str], saves: int) -> str:
    return f"{' '.join(overrides)} (saves about {size_text(saves)} a device, by shapes)"


def _flops(plan: Plan) -> str:
    program, guess = plan.program, plan.estimate
    text = (f"{guess.model_flops / 1e12:,.3f} TFLOP a device and step by the model's count; compiled "
            f"{(program.matmul_flops + program.kernel_flops) / 1e12:,.3f}, {plan.flops_ratio:.2f} times as much")
    if program.kernels:
        text += f"; {program.kernels:,} kernel calls, {program.silent_kernels:,} of which say none"
    if program.cycles:
        text += (f"; {program.cycles / 1e6:,.1f} M cycles by XLA's estimate, "
                 f"{program.matmul_cycles / program.cycles:.0%} of them in matmuls")
    return text


def kernels_text(names: Mapping[str, int]) -> str:
    """Custom kernels and how often a step runs each, such as `64 splash_mha_fwd`."""
    return ", ".join(f"{count:,} {name}" for name, count in names.items()) or "none beside what XLA makes itself"


def _traffic_rows(program: Program) -> Rows:
    rows = [f"{row.count:,} {row.kind} over {row.axes} ({row.devices}): {size_text(row.bytes_sent)} sent by each "
            f"device, {'asynchronous' if row.asynchronous else 'synchronous'}" for row in program.traffic]
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
        _run_row(plan.cfg, guess.step_seconds),
    ]


def _tokens_per_day(plan: Plan) -> float | None:
    seconds = plan.estimate.step_seconds
    return None if seconds is None else plan.cfg.batch_tokens * DAY / seconds


def _days(plan: Plan) -> float | None:
    seconds = plan.estimate.step_seconds
    return None if seconds is None else plan.cfg.train.steps * seconds / DAY


def size_text(count: int) -> str:
    """Bytes with a sign and a unit, such as `1.5 GiB`."""
    if abs(count) >= GIB // 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / (1 << 20):,.2f} MiB"
