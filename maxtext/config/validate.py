"""Rules that relate several fields, and whether a mesh fits a model and a batch. Pure: no devices, files, environment.

One rule is deliberately absent: `train.steps` may exceed `schedule.total_steps`. The rate then stays at its final
value, so that a finished run can be continued without changing what it has already done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from maxtext.config.data_rules import DATA_RULES
from maxtext.config.determinism_rules import DETERMINISM_RULES, fixed_misfits
from maxtext.config.layers import segments
from maxtext.config.logs import profile_problems
from maxtext.config.model_rules import MODEL_RULES
from maxtext.config.optimizer_rules import OPTIMIZER_RULES
from maxtext.config.quant_rules import QUANT_RULES, block_misfits
from maxtext.config.schema import Config, MeshConfig
from maxtext.config.wording import Problem, default_of, division, either, multiples

AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "pipeline", "fsdp", "expert")  # the axes that split the batch
WEIGHT_AXES = ("pipeline", "fsdp", "expert", "context")  # the axes that split the width of weights
SPECIAL_AXES = ("pipeline", "expert", "context")  # named in messages only where they are used
RESERVED_SETS = ("macro", "micro")  # names of the averages over held-out sets in the metrics


class ConfigError(ValueError):
    """A configuration that cannot be run.

    Attributes:
      problems: one line for each fault, all that were found.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class _UnknownValueUsed(Exception):
    """A rule needs a value that could not be read."""


def _refuse(*_: Any) -> NoReturn:
    raise _UnknownValueUsed


class Unknown:
    """Stands in a Config for a value that could not be read, so that all rules that do not need it still run."""

    __slots__ = ()
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = _refuse  # type: ignore[assignment]
    __iter__ = __len__ = __contains__ = __getitem__ = __format__ = __str__ = __repr__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __index__ = __int__ = __float__ = _refuse
    __getattr__ = _refuse


def problems(cfg: Config) -> list[Problem]:
    """Checks the rules between fields.

    Args:
      cfg: a configuration whose single values are already typed and in range (as `load` makes them).

    Returns:
      (dotted key, message) of every rule broken; the message names both keys and both numbers.
    """
    found = []
    for rule in _RULES:
        try:
            for problem in rule(cfg):
                found.append(problem)
        except _UnknownValueUsed:
            continue
    return found


def resolve_mesh(mesh: MeshConfig, n_devices: int) -> dict[str, int]:
    """Size of each axis on `n_devices`, with -1 resolved, in the order of AXES; ConfigError when they do not fit."""
    shape = _resolve(mesh, n_devices)
    if isinstance(shape, dict):
        return shape
    raise ConfigError(f"{key}: {message}" for key, message in shape)


def least_devices(mesh: MeshConfig) -> int:
    """Devices that the sizes ask for; an axis of -1 takes one."""
    return math.prod(max(1, getattr(mesh, axis)) for axis in AXES)


def mesh_problems(cfg: Config, n_devices: int) -> list[Problem]:
    """Checks that the mesh fits the devices, and that heads, widths, vocabulary and batch divide over it.

    Args:
      cfg: a valid configuration.
      n_devices: devices in the whole job.

    Returns:
      (dotted key, message) of every misfit, with the arithmetic.
    """
    shape = _resolve(cfg.mesh, n_devices)
    if not isinstance(shape, dict):
        return shape
    model, mesh = cfg.model, cfg.mesh
    found = [*_misfits(_over_tensor(cfg), "tensor", mesh.tensor, shape["tensor"], n_devices),
             *_misfits([("model.d_model", model.d_model)], "fsdp", mesh.fsdp, shape["fsdp"], n_devices)]
    if model.moe.experts:
        found += _misfits([("model.moe.experts", model.moe.experts)], "expert", mesh.expert, shape["expert"], n_devices)
    return [*found, *_widths(cfg, shape), *_micro_batches(cfg, shape), *_positions(cfg, shape), *_stages(cfg, shape),
            *block_misfits(cfg, shape), *fixed_misfits(cfg, shape)]


def _widths(cfg: Config, shape: dict[str, int]) -> Iterator[Problem]:
    """What all axes that split the width of weights must divide together."""
    latent, ways, d_model = cfg.model.latent, math.prod(shape[axis] for axis in WEIGHT_AXES), cfg.model.d_model
    sizes = [("model.d_model", d_model if not d_model % shape["fsdp"] else ways)]  # else fsdp alone was named already
    if latent.kv_rank is not None:
        sizes += [(f"model.latent.{name}", getattr(latent, name) or ways) for name in ("q_rank", "kv_rank")]
    axes = [axis for axis in WEIGHT_AXES if axis == "fsdp" or shape[axis] > 1]
    for key, size in sizes:
        if size % ways:
            yield f"mesh.{axes[-1]}", (f"{key} {size} is not divisible by {_product(axes, shape)} = {ways} "
                                       f"{division(size, ways)}; change those sizes")


def _product(axes: Iterable[str], shape: Mapping[str, int]) -> str:
    return " x ".join(f"mesh.{axis} {shape[axis]}" for axis in axes)


def _micro_batches(cfg: Config, shape: dict[str, int]) -> Iterator[Problem]:
    spread = [axis for axis in BATCH_AXES if axis != "pipeline"]  # a micro-batch passes all stages of a pipeline
    train, ways = cfg.train, math.prod(shape[axis] for axis in spread)
    steps = train.gradient_accumulation_steps
    micro, rest = divmod(train.global_batch, steps)
    if not rest and micro % ways:  # an accumulation that does not divide the batch is a rule of `problems`
        axes = [axis for axis in spread if axis not in SPECIAL_AXES or shape[axis] > 1]
        yield "train.global_batch", (
            f"train.global_batch {train.global_batch} / train.gradient_accumulation_steps {steps} = {micro} sequences "
            f"a micro-batch, which {_product(axes, shape)} = {ways} does not divide {division(micro, ways)}; set "
            f"train.global_batch to {multiples(train.global_batch, steps * ways)}, or other mesh sizes")


def _positions(cfg: Config, shape: dict[str, int]) -> Iterator[Problem]:
    """Each device of the context axis holds two equal chunks of a sequence."""
    length, devices, heads, tensor = cfg.data.sequence_length, shape["context"], cfg.model.kv_heads, shape["tensor"]
    if devices > 1 and length % (2 * devices):
        yield "mesh.context", (f"data.sequence_length {length} is not divisible by 2 x mesh.context {devices} = "
                               f"{2 * devices} {division(length, 2 * devices)}; change one of them")
    if devices > 1 and cfg.mesh.context_strategy == "ulysses" and not heads % tensor:
        group, copies = cfg.model.n_heads // heads, devices // math.gcd(heads // tensor, devices)
        if group % copies:  # each copy of a key/value head takes whole query heads
            yield "mesh.context_strategy", (
                f"ulysses shares heads: {heads} key/value heads / mesh.tensor {tensor} = {heads // tensor}, each with "
                f"{group} query head{'s' * (group > 1)}, cannot be split over mesh.context {devices}; write all_gather "
                "or ring, or change those sizes")
    if devices > 1 and cfg.model.moe.capacity_factor is not None:
        yield "mesh.context", ("model.moe.capacity_factor drops tokens in the order of the batch, which mesh.context "
                               f"{devices} splits; set model.moe.capacity_factor to null, or mesh.context to 1")


def _stages(cfg: Config, shape: dict[str, int]) -> Iterator[Problem]:
    """A pipeline needs layers that its stages can share, and a micro-batch for each stage."""
    stages, rounds, steps = shape["pipeline"], cfg.mesh.pipeline_rounds, cfg.train.gradient_accumulation_steps
    if stages == 1:
        if rounds > 1:
            yield "mesh.pipeline_rounds", (f"mesh.pipeline_rounds {rounds} needs stages, but mesh.pipeline is 1; set "
                                           "mesh.pipeline, or remove it")
        return
    if steps < stages or steps % stages:
        yield "train.gradient_accumulation_steps", (
            f"train.gradient_accumulation_steps {steps} is not a multiple of mesh.pipeline {stages}: the micro-batches "
            f"of an update fill the stages; set it to {multiples(steps, stages)}")
    stacks = [segment.repeats for segment in segments(cfg.model)]
    if not any(repeats % (stages * rounds) == 0 for repeats in stacks):
        needs = f"mesh.pipeline {stages}" + (f" x mesh.pipeline_rounds {rounds}" if rounds > 1 else "")
        yield "mesh.pipeline", (
            f"the {cfg.model.n_layers} layers of model.n_layers repeat model.layer_pattern, of "
            f"{len(cfg.model.layer_pattern)}, {' and '.join(map(str, stacks))} times, which {needs} does not divide; "
            "change one of them, so that each stage has the same layers")
    if cfg.model.moe.experts and cfg.model.moe.load_statistics == "batch":
        yield "mesh.pipeline", ("model.moe.load_statistics batch counts over one micro-batch after another, but "
                                f"mesh.pipeline {stages} runs them together; write micro_batch or sequence")


def _over_tensor(cfg: Config) -> list[tuple[str, int]]:
    """The sizes that the tensor axis splits."""
    model = cfg.model
    sizes = [("model.n_heads", model.n_heads), ("model.n_kv_heads", model.n_kv_heads), ("model.d_ff", model.d_ff),
             ("model.moe.d_expert", model.moe.d_expert if model.moe.experts else None),
             ("model.vocab_size", model.vocab_size)]
    return [(key, size) for key, size in sizes if size is not None]


def _resolve(mesh: MeshConfig, n_devices: int) -> dict[str, int] | list[Problem]:
    wrong = list(_mesh(mesh))
    if wrong:
        return wrong
    if mesh.auto:
        return [("mesh", "mesh: auto has not been settled for these devices")]
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    free = next((axis for axis in AXES if sizes[axis] == -1), None)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = [axis for axis, size in sizes.items() if size != -1 and (axis not in SPECIAL_AXES or size > 1)]
    names = _product(shown, sizes)
    if free is None and fixed != n_devices:
        return [("mesh", f"{names} = {fixed} devices, but there are {n_devices}; set one axis to -1 to use them all")]
    if free is not None:
        if n_devices % fixed:
            return [(f"mesh.{free}", f"mesh.{free} -1 takes the devices that are left, but {n_devices} devices are not "
                     f"divisible by {names} = {fixed} {division(n_devices, fixed)}; change those sizes")]
        sizes[free] = n_devices // fixed
    return sizes


def _misfits(shared: list[tuple[str, int]], axis: str, asked: int, size: int, n_devices: int) -> Iterator[Problem]:
    origin = f" (-1 on {n_devices} devices)" if asked == -1 else ""
    for key, number in shared:
        if number % size:
            # Sizes past the device count cannot be used, and the list must stay short.
            fits = [str(n) for n in range(1, min(number, n_devices) + 1) if number % n == 0][-8:]
            yield f"mesh.{axis}", (f"{key} {number} is not divisible by mesh.{axis} {size}{origin} "
                                   f"{division(number, size)}; set mesh.{axis} to {either(fits)}, or change {key}")


def _mesh(mesh: MeshConfig) -> Iterator[Problem]:
    if mesh.auto:
        for axis in AXES:
            if getattr(mesh, axis) != default_of(mesh, axis):
                yield f"mesh.{axis}", (f"mesh.auto chooses the sizes, but mesh.{axis} {getattr(mesh, axis)} is set; "
                                       "remove one of them, or write mesh: auto, which forgets earlier sizes")
    free = [axis for axis in AXES if getattr(mesh, axis) == -1]
    if len(free) > 1:
        yield f"mesh.{free[1]}", (f"only one axis may be -1, but {' and '.join(f'mesh.{axis}' for axis in free)} are; "
                                  "set all but one to 1 or more")
    for axis in AXES:
        size = getattr(mesh, axis)
        if size == 0 or size < -1:
            yield f"mesh.{axis}", f"{size} is not a size; write 1 or more, or -1 for the devices that are left"


def _batch(cfg: Config) -> Iterator[Problem]:
    train = cfg.train
    if train.global_batch % train.gradient_accumulation_steps:
        yield "train.global_batch", (
            f"train.global_batch {train.global_batch} is not divisible by train.gradient_accumulation_steps "
            f"{train.gradient_accumulation_steps} {division(train.global_batch, train.gradient_accumulation_steps)}; "
            f"set train.global_batch to {multiples(train.global_batch, train.gradient_accumulation_steps)}")


def _remat(cfg: Config) -> Iterator[Problem]:
    remat = cfg.train.remat
    if remat.mode == "names" and not remat.save and not remat.offload:
        yield "train.remat.save", ("train.remat.mode names keeps the values in train.remat.save and in "
                                   "train.remat.offload, but both are empty; list some, or write "
                                   "train.remat.mode: full")
    for key, names in (("save", remat.save), ("offload", remat.offload)):
        if remat.mode != "names" and names:
            yield f"train.remat.{key}", (f"train.remat.{key} is set, but train.remat.mode is {remat.mode}; write "
                                         f"train.remat.mode: names, or remove train.remat.{key}")
    listed = (*remat.save, *remat.offload)
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if twice:
        where = "train.remat.save" if not remat.offload else "train.remat.save and train.remat.offload"
        yield "train.remat.save", f"{', '.join(twice)} is listed twice in {where}; list each name once"
    if "block" in remat.save:
        yield "train.remat.save", ("block, the input of a layer, is always kept; remove it, or list it in "
                                   "train.remat.offload")


def _schedule_kind(cfg: Config) -> Iterator[Problem]:
    schedule = cfg.schedule
    if schedule.kind == "wsd" and schedule.decay_steps is None:
        yield "schedule.decay_steps", ("schedule.kind wsd ends in a decay, but schedule.decay_steps is null; set it, "
                                       "for instance to a tenth of the run")
    if schedule.kind != "wsd" and schedule.decay_steps is not None:
        yield "schedule.decay_steps", (f"schedule.decay_steps {schedule.decay_steps} is read by schedule.kind wsd only,"
                                       f" but the kind is {schedule.kind}; remove one of them")
    if schedule.kind == "constant" and schedule.min_ratio != default_of(schedule, "min_ratio"):
        yield "schedule.min_ratio", (f"schedule.min_ratio {schedule.min_ratio} is set, but schedule.kind constant "
                                     "never falls; remove one of them")


def _schedule_length(cfg: Config) -> Iterator[Problem]:
    schedule, end = cfg.schedule, cfg.schedule_steps
    name = "train.steps" if schedule.total_steps is None else "schedule.total_steps"
    if schedule.warmup_steps > end:
        yield "schedule.warmup_steps", (f"schedule.warmup_steps {schedule.warmup_steps} is longer than the schedule, "
                                        f"which ends at {name} {end}; the peak rate would never be reached; set "
                                        f"schedule.warmup_steps to {end} or less")
        return
    if schedule.kind != "wsd" or schedule.decay_steps is None:
        return
    ramps = schedule.warmup_steps + schedule.decay_steps
    if ramps > end:
        yield "schedule.decay_steps", (
            f"schedule.warmup_steps {schedule.warmup_steps} + schedule.decay_steps {schedule.decay_steps} = {ramps} is "
            f"longer than the schedule, which ends at {name} {end}; "
            "shorten one of them")


def _checkpoints(cfg: Config) -> Iterator[Problem]:
    every, keep = cfg.checkpoint.every, cfg.checkpoint.keep_every
    if keep is not None and every is None:
        yield "checkpoint.keep_every", (f"checkpoint.keep_every {keep} keeps checkpoints that checkpoint.every null "
                                        "never makes; set checkpoint.every")
    elif keep is not None and every is not None and keep % every:
        yield "checkpoint.keep_every", (
            f"checkpoint.keep_every {keep} is not a multiple of checkpoint.every {every} {division(keep, every)}, so "
            f"most of its checkpoints would never be made; set it to {multiples(keep, every)}")


def _gradient_log(cfg: Config) -> Iterator[Problem]:
    if cfg.checkpoint.gradient_log and not cfg.checkpoint.snapshots:
        yield "checkpoint.gradient_log", ("checkpoint.gradient_log true leads on from snapshots, but checkpoint."
                                          "snapshots is false; set checkpoint.snapshots to true, or "
                                          "checkpoint.gradient_log to false")


def _held_out(cfg: Config) -> Iterator[Problem]:
    if cfg.eval.every is not None and not cfg.eval.sets and not cfg.eval.tasks and cfg.data.prepared is None:
        yield "eval.every", (f"eval.every {cfg.eval.every} is set, but there is nothing to evaluate: give eval.sets, "
                             "eval.tasks, or data.prepared with held-out sets")
    if cfg.eval.tasks and cfg.eval.tokenizer is None and cfg.data.prepared is None:
        yield "eval.tokenizer", ("eval.tasks are text, which needs a tokenizer; set eval.tokenizer to the file that "
                                 "the token files were made with, or give data.prepared")
    if cfg.generate.prompts and cfg.eval.tokenizer is None and cfg.data.prepared is None:
        yield "generate.prompts", ("generate.prompts are text, which needs a tokenizer; set eval.tokenizer to the file "
                                   "that the token files were made with, or give data.prepared")
    if cfg.generate.every is not None and not cfg.generate.prompts:
        yield "generate.every", (f"generate.every {cfg.generate.every} is set, but there is nothing to go on from; "
                                 "give generate.prompts, or remove it")
    if cfg.generate.prompts and cfg.generate.every is None and cfg.eval.every is None:
        yield "generate.prompts", ("generate.prompts are completed with each evaluation, and eval.every is null; set "
                                   "generate.every")
    for name in ("top_k", "top_p"):
        value = getattr(cfg.generate, name)
        if cfg.generate.temperature == 0 and value != default_of(cfg.generate, name):
            yield f"generate.{name}", (f"generate.{name} {value} chooses among samples, but generate.temperature 0 "
                                       "takes the likeliest token; set generate.temperature, for instance to 1")
    twice = sorted({name for name in cfg.eval.tasks if cfg.eval.tasks.count(name) > 1})
    if twice:
        yield "eval.tasks", f"{', '.join(twice)} is listed twice; list each task once"
    for name, one in cfg.eval.sets.items():
        if name in RESERVED_SETS:
            yield f"eval.sets.{name}", f"{name} is the name of an average over all sets; give the set another name"
        if not one.paths:
            yield f"eval.sets.{name}.paths", "an empty list; give the token files of this set"


def _names(cfg: Config) -> Iterator[Problem]:
    name = cfg.run_name
    if not name.strip() or name in (".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
        yield "run_name", f"run_name {name!r} is not the name of one folder; it stands under output_dir"


def _empty_texts(cfg: Config) -> Iterator[Problem]:
    texts: list[tuple[str, Callable[[], str | None]]] = [
        ("output_dir", lambda: cfg.output_dir), ("data.prepared", lambda: cfg.data.prepared)]
    for key, text in texts:
        try:
            if text() == "":
                yield key, f"{key} is empty; write a folder"
        except _UnknownValueUsed:
            continue


_RULES: tuple[Callable[[Config], Iterable[Problem]], ...] = (
    *MODEL_RULES, _batch, _remat, _schedule_kind, _schedule_length, *OPTIMIZER_RULES, *DATA_RULES, *QUANT_RULES,
    *DETERMINISM_RULES, lambda cfg: _mesh(cfg.mesh), _checkpoints, _gradient_log, _held_out, _names, _empty_texts,
    profile_problems)
