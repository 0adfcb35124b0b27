"""Held-out sets and downstream tasks on a checkpoint, or on a transformers folder: `maxtext eval`, `maxtext.evaluate`.

What is evaluated is only read.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from maxtext.config.schema import Config
from maxtext.data.tokens import ResolvedData, resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.eval.opened import Weights, config_over, on_these_devices, open_subject
from maxtext.parallel.mesh import make_mesh


class EvaluationError(ValueError):
    """What was asked for cannot be evaluated; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model scores.

    Attributes:
      where: its folder.
      step: of the run; None for a model in another format.
      cfg: what it was evaluated with.
      metrics: by the names that metrics.jsonl has.
      seconds: that it took, compilation included.
    """

    where: str
    step: int | None
    cfg: Config
    metrics: dict[str, float]
    seconds: float

    def __str__(self) -> str:
        return table(self.metrics)

    def __repr__(self) -> str:
        return f"{self.where}{'' if self.step is None else f' update {self.step}'}\n{self}"


def evaluate(model: str, open_transformers: Callable[[str], Weights], *, overrides: Sequence[str] = (),
             step: int | None = None, config: str | None = None, sets: Sequence[str] | None = None,
             tasks: Sequence[str] | None = None, known: Callable[[str], None] = lambda called: None) -> Evaluation:
    """Evaluates what `model` names on every device of the job.

    Args:
      model, step, open_transformers: as of `open_subject`.
      overrides: `key=value`, over the model's own config.
      config: settings over its own, below the overrides.
      sets, tasks: only these; None: all of the config, or none where the other is given.
      known: in process 0 it is told what the model is called, before the long part.

    Raises:
      ConfigError, EvaluationError, NoModelError, CheckpointError, DataError, TaskError, MeshError: for what was asked.
    """
    with open_subject(model, step, open_transformers) as subject:
        cfg = on_these_devices(config_over(subject.config_text, overrides, config), overrides)
        chosen = cfg.eval.tasks if tasks is None and sets is None else tuple(tasks or ())
        cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, tasks=chosen))
        mesh = make_mesh(cfg)
        with jax.set_mesh(mesh):
            scores = Evaluations(cfg, _held_out(cfg, sets, tasks, subject.tokenizer), mesh)
            if not scores:
                raise EvaluationError("nothing to evaluate: this model has no held-out sets; give data.prepared=DIR, "
                                      "whose held-out texts are taken, --tasks, or eval.sets.NAME.paths=[FILES]")
            params = subject.params(cfg.model, mesh)
            if jax.process_index() == 0:
                known(cfg.run_name if subject.step is None else f"{cfg.run_name}_{subject.step}")
            began = time.perf_counter()
            metrics = scores(params)
        return Evaluation(subject.where, subject.step, cfg, metrics, time.perf_counter() - began)


def record(found: Evaluation) -> dict[str, Any]:
    """The numbers with what they were measured with, for a JSON file."""
    cfg = found.cfg
    return {"checkpoint": found.where, "step": found.step, "run_name": cfg.run_name, "rows": cfg.eval.rows,
            "batch": cfg.eval.batch, "compute_dtype": cfg.train.compute_dtype, "seconds": round(found.seconds, 3),
            "metrics": _plain(found.metrics)}


def output_file(asked: str | None, called: str) -> Path:
    """Where the numbers go. Raises EvaluationError, before the long part, where they could not be written after it."""
    output = Path(asked or f"eval_{called}.json")
    try:
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise EvaluationError(f"{output}: cannot be written ({error.strerror}); give --output another file") from error
    return output


def _held_out(cfg: Config, sets: Sequence[str] | None, tasks: Sequence[str] | None,
              own: Path | None) -> ResolvedData | None:
    """The chosen held-out sets; None when only tasks were asked for and their tokenizer needs no data."""
    tokenizer = cfg.eval.tokenizer
    if sets is None and tasks is not None and tokenizer is not None:
        return None
    data = resolve(cfg, training=False)
    if data.tokenizer is None and own is not None:
        data = dataclasses.replace(data, tokenizer=str(own))
    wanted = data.eval_sets if sets is None and tasks is None else sets or ()
    if unknown := [name for name in wanted if name not in data.eval_sets]:
        raise EvaluationError(f"--sets: {', '.join(unknown)} is no held-out set of this run; it has "
                              f"{', '.join(data.eval_sets) or 'none'}")
    return dataclasses.replace(data, eval_sets={name: data.eval_sets[name] for name in wanted})


def table(metrics: dict[str, float]) -> str:
    """Sets with their averages, then tasks with the metrics that count whole answers (v2), aligned."""
    sets: dict[str, dict[str, float]] = {}
    tasks: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith("eval/lm/"):
            label, kind = name.removeprefix("eval/lm/").rsplit("/", 1)
            sets.setdefault(label, {})[kind] = value
        elif name.endswith(" v2)"):
            label, kind = name.removeprefix("eval/downstream/").removesuffix(" v2)").split(" (", 1)
            tasks.setdefault(label, {})[kind.replace("length-normalized", "normalized")] = value
    blocks = []
    if sets:
        blocks.append(_aligned("held-out set", sets, {"CE loss": ".6f", "PPL": ",.4f", "BPB": ".6f", "tokens": ",.0f"}))
    if tasks:
        kinds = ("BPB", "CE loss", "accuracy", "normalized accuracy", "soft loss")
        blocks.append(_aligned("task", tasks, dict.fromkeys(kinds, ".6f")))
    return "\n\n".join(blocks)


def _aligned(title: str, rows: dict[str, dict[str, float]], forms: dict[str, str]) -> str:
    """Names to the left, numbers to the right; a dash where there is none, and no column without any number."""
    forms = {kind: form for kind, form in forms.items() if any(kind in values for values in rows.values())}
    cells = [[title, *forms]] + [
        [label, *(format(values[kind], form) if kind in values else "-" for kind, form in forms.items())]
        for label, values in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width)
                               for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in cells)


def _plain(metrics: dict[str, float]) -> dict[str, float | str]:
    """JSON has no NaN or infinity: they stand as words, as in metrics.jsonl."""
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {name: value if math.isfinite(value) else words.get(value, "NaN") for name, value in metrics.items()}
