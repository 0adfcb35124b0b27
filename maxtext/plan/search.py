"""`maxtext plan --search`: tries settings of remat, accumulation, mesh and head shape, and ranks those that fit.

All combinations are predicted from shapes. The ones that should fit are compiled, the fastest first, up to a number of
compiles that the user sets; what counts in the end is what the compiler laid out.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxtext.config.schema import Config, RematConfig, RematMode
from maxtext.config.validate import AXES, problems, resolve_mesh
from maxtext.model.choose_mesh import valid_meshes, with_mesh
from maxtext.model.prediction import Prediction, predict
from maxtext.plan.estimate import Estimate, estimate
from maxtext.plan.program import Program, Refusal
from maxtext.plan.report import size_text
from maxtext.plan.topology import PlanError, Target
from maxtext.plan.verdict import Verdict, judge

# Every mode, and names from the least memory to the least recomputation.
NAMES = ("qkv", "attention"), ("qkv", "attention", "attention_out"), ("qkv", "attention", "attention_out", "gate_up")
REMAT = (*(RematConfig(mode=mode) for mode in typing.get_args(RematMode) if mode != "names"),
         RematConfig(mode="names", save=("attention",)), *(RematConfig(mode="names", save=save) for save in NAMES))
ACCUMULATION = (1, 2, 4, 8)
HOPE = 1.25  # shapes may claim this much more than a device has before a candidate is given up uncompiled
SHOWN_UNCOMPILED = 5

Compile = Callable[[Config], "Program | Refusal"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate: what shapes say and, when it was compiled, what the compiler says."""

    overrides: tuple[str, ...]  # of the config as it was given; none: as it is
    cfg: Config
    predicted: Prediction
    program: Program | Refusal | None = None
    failure: str | None = None  # the compiler, or the mesh over the links, for another reason than memory
    verdict: Verdict | None = None
    guess: Estimate | None = None

    @property
    def step(self) -> float:
        """Seconds, as compiled where that is known."""
        compiled = self.guess.step_seconds if self.guess is not None else None
        return self.predicted.step if compiled is None else compiled

    @property
    def rank(self) -> tuple[bool, bool, float]:
        fits = self.verdict is not None and self.verdict.fits
        return (not fits, self.verdict is None, self.step if fits or self.verdict is None else self.verdict.needed)


def search(cfg: Config, target: Target, limit: int, compile_one: Compile, heads: bool = False) -> list[Trial]:
    """The candidates in order: those that fit by compiled step time, those that do not, those left uncompiled.

    Args:
      limit: most compiles; the config as it is comes first.
      compile_one: compiles a config for the target, or takes it from a cache.
      heads: whether other head shapes of the same width are tried; they make another model.
    """
    room = HOPE * target.memory_bytes
    trials = sorted(candidates(cfg, target, heads), key=lambda one: (bool(one.overrides), one.predicted.step))
    done, left = [], []
    for one in trials:
        if len(done) < limit and (not one.overrides or one.predicted.memory_on(target.chip) <= room):
            done.append(_compiled(one, target, compile_one))
        else:
            left.append(one)
    return sorted(done, key=lambda one: one.rank) + left


def _compiled(trial: Trial, target: Target, compile_one: Compile) -> Trial:
    try:
        program = compile_one(trial.cfg)
    except PlanError as error:
        return dataclasses.replace(trial, failure=str(error))
    guess = None if isinstance(program, Refusal) else estimate(trial.cfg, target, program)
    return dataclasses.replace(trial, program=program, verdict=judge(trial.cfg, target, program), guess=guess)


def candidates(cfg: Config, target: Target, heads: bool = False) -> Iterator[Trial]:
    """Every combination that is valid, predicted from shapes; the config as it is first."""
    network, given = target.network, resolve_mesh(cfg.mesh, target.n_devices)
    cfg = with_mesh(cfg, given)
    seen = set[Config | Any]()
    models = [cfg, *(_with_heads(cfg) if heads else ())]
    counts = [count for count in ACCUMULATION if cfg.train.global_batch % count == 0]
    yield Trial((), cfg, predict(cfg, given, network))
    seen.add(_key(cfg))
    for model, remat, count in itertools.product(models, REMAT, {*counts, cfg.train.gradient_accumulation_steps}):
        train = dataclasses.replace(model.train, remat=remat, gradient_accumulation_steps=count)
        changed = dataclasses.replace(model, train=train)
        if problems(changed):
            continue
        for sizes in itertools.chain([given], valid_meshes(changed, target.n_devices, network)):
            one = with_mesh(changed, sizes)
            if _key(one) not in seen:
                seen.add(_key(one))
                yield Trial(tuple(_overrides(cfg, one)), one, predict(one, sizes, network))


def _key(cfg: Config) -> tuple[Any, ...]:
    return (cfg.mesh, cfg.train.remat, cfg.train.gradient_accumulation_steps, cfg.model.n_heads, cfg.model.head_dim)


def _with_heads(cfg: Config) -> Iterator[Config]:
    """Half as many heads of twice the width, and the reverse."""
    model = cfg.model
    if model.latent.kv_rank is not None:
        return  # there the width of heads is made of several parts
    for times, over in ((1, 2), (2, 1)):
        n_heads, left = divmod(model.n_heads * times, over)
        kv_heads, kv_left = divmod(model.kv_heads * times, over)
        width, rest = divmod(model.head_width * over, times)
        if not (left or kv_left or rest) and 64 <= width <= 256:
            changed = {"n_heads": n_heads, "head_dim": width}
            if model.n_kv_heads is not None:
                changed["n_kv_heads"] = kv_heads
            yield dataclasses.replace(cfg, model=dataclasses.replace(model, **changed))


def _overrides(given: Config, one: Config) -> Iterator[str]:
    """What to write on the command line to come from one config to the other."""
    for name in ("n_heads", "n_kv_heads", "head_dim"):
        if getattr(one.model, name) != getattr(given.model, name):
            yield f"model.{name}={getattr(one.model, name)}"
    if one.train.remat != given.train.remat:
        yield f"train.remat.mode={one.train.remat.mode}"
        if one.train.remat.save != given.train.remat.save:
            yield f"train.remat.save=[{','.join(one.train.remat.save)}]"
    if one.train.gradient_accumulation_steps != given.train.gradient_accumulation_steps:
        yield f"train.gradient_accumulation_steps={one.train.gradient_accumulation_steps}"
    for axis in AXES:
        if getattr(one.mesh, axis) != getattr(given.mesh, axis):
            yield f"mesh.{axis}={getattr(one.mesh, axis)}"


def reason(trial: Trial, best: Trial | None, target: Target) -> str:
    """Why a trial stands where it stands."""
    if trial.failure is not None:
        return f"the compiler failed: {trial.failure.splitlines()[0][:100]}"
    if trial.verdict is None:
        if trial.predicted.memory_on(target.chip) > HOPE * target.memory_bytes:
            return "not compiled: too large by shapes"
        return "not compiled: --limit"
    if not trial.verdict.fits:
        return f"does not fit: {size_text(trial.verdict.needed - trial.verdict.capacity)} too much"
    if trial is best or best is None:
        return "fastest that fits"
    return f"fits, {trial.step / best.step - 1:.1%} slower" if trial.guess and trial.guess.step_seconds else "fits"


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The first that was compiled and fits."""
    return next((one for one in trials if one.verdict is not None and one.verdict.fits), None)


def to_table(trials: Sequence[Trial], target: Target) -> list[tuple[str, ...]]:
    """Head and rows: all that were compiled, and the fastest few that were not."""
    best, compiled = best_of(trials), [one for one in trials if one.verdict or one.failure]
    rows = [("rank", "settings", "memory by shapes", "step by shapes", "memory", "step", "MFU", "why")]
    for number, one in enumerate([*compiled, *trials[len(compiled):][:SHOWN_UNCOMPILED]], 1):
        needed = "-" if one.verdict is None else size_text(one.verdict.needed)
        guess = one.guess if one.guess is not None and one.guess.step_seconds is not None else None
        rows.append((str(number), " ".join(one.overrides) or "as given", size_text(one.predicted.memory.total),
                     f"{one.predicted.step:.3g} s" if target.chip else "-", needed,
                     "-" if guess is None else f"{guess.step_seconds:.3g} s",
                     "-" if guess is None else f"{guess.mfu:.1f}%", reason(one, best, target)))
    return rows


def to_json(trials: Sequence[Trial], target: Target) -> list[dict[str, Any]]:
    """All trials with the numbers of the table, in its order."""
    best = best_of(trials)
    return [{"overrides": list(one.overrides), "why": reason(one, best, target),
             "shapes": {"memory": one.predicted.memory.total, "step_seconds": one.predicted.step},
             "memory": None if one.verdict is None else one.verdict.needed,
             "fits": None if one.verdict is None else one.verdict.fits,
             "step_seconds": None if one.guess is None else one.guess.step_seconds,
             "mfu": None if one.guess is None else one.guess.mfu} for one in trials]
