"""`maxtext eval MODEL`: held-out sets and downstream tasks on a checkpoint, or on a transformers folder.

What is evaluated is only read.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from maxtext.checkpoint.manager import CheckpointError
from maxtext.config.load import ConfigError
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.tokens import ResolvedData, resolve
from maxtext.eval.catalogue import TaskError
from maxtext.eval.evaluations import Evaluations
from maxtext.eval.opened import NoModelError, Subject, Weights, config_over, on_these_devices, open_subject
from maxtext.parallel.mesh import MeshError, make_mesh
from maxtext.parallel.runtime import prepare_runtime


class EvaluationError(ValueError):
    """What was asked for cannot be evaluated; the message says why and what to do."""


def run(argv: Sequence[str], open_transformers: Callable[[str], Weights]) -> int:
    """The verb. Returns the exit status: 0 done, 2 a mistake in what was asked for.

    Args:
      open_transformers: opens a transformers folder. It comes from the caller, as conversion is no part of evaluation;
        its errors pass through.
    """
    parser = argparse.ArgumentParser(prog="maxtext eval", description=__doc__)
    parser.add_argument("run", metavar="MODEL", help="a run, an imported model, a folder of checkpoints, one step's, "
                        "or a transformers folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the run's own config, such as "
                        "eval.rows=truncated eval.batch=64 mesh.fsdp=8")
    parser.add_argument("--step", type=int, help="this step; the newest good one by default")
    parser.add_argument("--config", metavar="CONFIG", help="settings over the run's own, such as eval/olmo3_downstream")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these held-out sets (with --tasks alone: none)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks (with --sets alone: none)")
    parser.add_argument("--output", metavar="FILE.json", help="where the numbers go (eval_<run>_<step>.json, or "
                        "eval_<folder>.json)")
    options = parser.parse_intermixed_args(argv)
    # `--tasks a b eval.batch=4`: an option that takes several words takes the overrides too.
    options.overrides += _take_overrides(options.sets) + _take_overrides(options.tasks)
    prepare_runtime()
    try:
        with open_subject(options.run, options.step, open_transformers) as subject:
            _evaluate(options, subject)
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2
    except (EvaluationError, NoModelError, CheckpointError, DataError, TaskError, MeshError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _take_overrides(words: list[str] | None) -> list[str]:
    taken = [word for word in words or () if "=" in word]
    for word in taken:
        assert words is not None
        words.remove(word)
    return taken


def _evaluate(options: argparse.Namespace, subject: Subject) -> None:
    cfg = on_these_devices(config_over(subject.config_text, options.overrides, options.config), options.overrides)
    tasks = cfg.eval.tasks if options.tasks is None and options.sets is None else tuple(options.tasks or ())
    cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, tasks=tasks))
    mesh = make_mesh(cfg)
    with jax.set_mesh(mesh):
        evaluate = Evaluations(cfg, _held_out(cfg, options, subject.tokenizer), mesh)
        if not evaluate:
            raise EvaluationError("nothing to evaluate: this model has no held-out sets; give --tasks, or a set as "
                                  "eval.sets.NAME.paths=[FILES]")
        params = subject.params(cfg.model, mesh)
        called = cfg.run_name if subject.step is None else f"{cfg.run_name}_{subject.step}"
        output = Path(options.output or f"eval_{called}.json")
        if jax.process_index() == 0:
            _check_writable(output)
        began = time.perf_counter()
        metrics = evaluate(params)
    if jax.process_index() == 0:
        result = {"checkpoint": subject.where, "step": subject.step, "run_name": cfg.run_name, "rows": cfg.eval.rows,
                  "batch": cfg.eval.batch, "compute_dtype": cfg.train.compute_dtype,
                  "seconds": round(time.perf_counter() - began, 3), "metrics": _plain(metrics)}
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(subject.where if subject.step is None else f"{subject.where} update {subject.step}")
        print(table(metrics))
        print(f"written to {output}")


def _check_writable(output: Path) -> None:
    """Raises EvaluationError, before the long part, where the numbers could not be written after it."""
    try:
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise EvaluationError(f"{output}: cannot be written ({error.strerror}); give --output another file") from error


def _held_out(cfg: Config, options: argparse.Namespace, own: Path | None) -> ResolvedData | None:
    """The chosen held-out sets; None when only tasks were asked for and their tokenizer needs no data."""
    tokenizer = cfg.eval.tokenizer
    if options.sets is None and options.tasks is not None and tokenizer is not None:
        return None
    data = resolve(cfg, training=False)
    if data.tokenizer is None and own is not None:
        data = dataclasses.replace(data, tokenizer=str(own))
    wanted = data.eval_sets if options.sets is None and options.tasks is None else options.sets or ()
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
