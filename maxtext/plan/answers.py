"""What `maxtext plan` answers to each way of asking: rows and tables for people, a tree for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.config.schema import Config
from maxtext.config.validate import resolve_mesh
from maxtext.config.wording import counted
from maxtext.model.prediction import optimizer_seconds, predict
from maxtext.plan import search, simulate
from maxtext.plan.estimate import link_assumptions
from maxtext.plan.program import Program, Refusal
from maxtext.plan.published import accuracy
from maxtext.plan.report import (
    head_json,
    make_plan,
    prediction_json,
    prediction_rows,
    refusal_json,
    refusal_rows,
    to_json,
    to_rows,
)
from maxtext.plan.topology import Target
from maxtext.plan.verdict import judge
from maxtext.train.console import Console
from maxtext.train.summary import Rows


@dataclasses.dataclass
class Answer:
    """What is shown and written."""

    title: str
    rows: Rows
    tree: dict[str, Any]
    fits: bool
    tables: list[list[tuple[str, ...]]] = dataclasses.field(default_factory=list)
    base: simulate.Base | None = None  # of one replica, where a step time is known
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)


def planned(cfg: Config, target: Target, program: Program | Refusal, cached: bool) -> Answer:
    """One compiled config."""
    title, mesh = f"Plan of {cfg.run_name}: compiled, not run", resolve_mesh(cfg.mesh, target.n_devices)
    if isinstance(program, Refusal):
        return Answer(title, refusal_rows(cfg, target, program), refusal_json(cfg, target, program), False, mesh=mesh)
    plan = make_plan(cfg, target, program)
    base = None
    if plan.estimate.step_seconds is not None:
        base = simulate.Base.of_estimate(plan.estimate, optimizer_seconds(cfg, mesh, target.chip))
    return Answer(title, to_rows(plan, cached), to_json(plan), judge(cfg, target, program).fits, base=base, mesh=mesh)


def estimated(cfg: Config, target: Target) -> Answer:
    """One config from shapes alone."""
    mesh = resolve_mesh(cfg.mesh, target.n_devices)
    made = predict(cfg, mesh, target.network)
    rows, tree = prediction_rows(cfg, target, mesh, made), prediction_json(cfg, target, mesh, made)
    if target.chip is not None:
        rows.append(("error", _error(target.chip.platform)))
        rows += [("assumed" if number == 0 else "", line) for number, line in enumerate(link_assumptions(target))]
    return Answer(f"Plan of {cfg.run_name}: from shapes, not compiled", rows, tree, bool(tree["fits"]),
                  base=simulate.Base.of_prediction(made), mesh=mesh)


def searched(cfg: Config, target: Target, limit: int, compile_one: search.Compile, heads: bool) -> Answer:
    """Many configs, ranked."""
    trials = search.search(cfg, target, limit, compile_one, heads)
    best = search.best_of(trials)
    compiled = sum(one.verdict is not None or one.failure is not None for one in trials)
    said = "none of those that were compiled fits" if best is None else " ".join(best.overrides) or "as given"
    rows = [("target", f"{target.name}: {counted(target.n_devices, 'device')}"),
            ("tried", f"{len(trials):,} combinations by shapes, {compiled:,} of them compiled"), ("best", said)]
    tree = head_json(cfg, target) | {"fits": best is not None, "trials": search.to_json(trials, target)}
    return Answer(f"Search for {cfg.run_name}", rows, tree, best is not None, [search.to_table(trials, target)])


def add_scale(answer: Answer, cfg: Config, target: Target, largest: int, strong: bool, plot: str | None) -> None:
    """What more of the same machine would take, in a table, a tree and a drawing."""
    assert target.chip is not None
    if answer.base is None:
        answer.rows.append(("scale", "n/a: the step does not compile"))
        return
    rows = simulate.scales(cfg, target, answer.mesh, answer.base, largest, strong)
    grows = "the same batch" if strong else "the batch grows with the devices"
    answer.rows.append(("scale", f"1 to {rows[-1].replicas:,} times {target.name}, {answer.base.source}; {grows}; "
                                 "gradients between them hide behind the backward pass as far as it lasts"))
    if answer.base.source == "compiled":
        answer.rows.append(("error", f"of predictions from shapes: {_error(target.chip.platform)}"))
    answer.tables.append(simulate.to_table(rows))
    answer.tree["scale"] = {"rows": simulate.to_json(rows), "same_batch": strong, "base": answer.base.source,
                            "mean_error": accuracy().mean_error}
    if plot is not None:
        from maxtext.plan.plot import draw_scale

        draw_scale(rows, f"{cfg.run_name} on {target.name} and more, {grows}", Path(plot))


def _error(platform: str) -> str:
    found = accuracy()
    return f"mean {found.mean_error:.0%} on published runs; {found.sentence(platform)}"


def show(answer: Answer, json_file: str | None) -> None:
    """Prints the answer, and writes its tree; with `-` the tree is all that is printed."""
    if json_file != "-":
        console = Console()
        console.table(answer.title, answer.rows)
        for table in answer.tables:
            console.note(columns(table))
    if json_file is None:
        return
    text = json.dumps(answer.tree, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text)


def columns(table: Sequence[tuple[str, ...]]) -> str:
    """A head and rows in columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right
                               in zip(row, widths, numbers, strict=True)).rstrip() for row in table)
