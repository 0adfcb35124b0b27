"""`maxtext compare A B`: whether two configs, or two commits, compute the same numbers on the same batches."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maxtext.config.load import ConfigError, find_config, load
from maxtext.config.reason import placed

if TYPE_CHECKING:
    import numpy as np

PROJECT = Path(__file__).resolve().parents[2]
GROUPS = ("layer", "logits", "gradient", "update", "weight")


class CompareError(ValueError):
    """A side cannot be measured; the message says why."""


class Row(NamedTuple):
    """How far one array of B is from that of A."""

    name: str
    relative: float  # norm of the difference over the norm of A's
    largest: float
    identical: bool  # byte by byte


def compare(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[Row]:
    """Rows of all arrays that both have, in the order of a forward and backward pass.

    Raises CompareError when they have unlike names or shapes, such as those of unlike models.
    """
    import numpy as np  # here and below, so that --help does without

    shapes_a, shapes_b = ({name: array.shape for name, array in side.items()} for side in (a, b))
    if shapes_a != shapes_b:
        unlike = sorted({name for name, _ in shapes_a.items() ^ shapes_b.items()})
        raise CompareError(f"A and B are unlike models or batches: {', '.join(unlike[:4])} ({len(unlike)} in all) "
                           "differ in shape or are on one side only; compare configs that differ in how they run alone")
    rows = []
    for name in sorted(a, key=lambda name: GROUPS.index(name.split(" ")[0])):
        x, y = a[name], b[name]
        gap, norm = (x.astype(np.float64) - y.astype(np.float64)), np.linalg.norm(x.astype(np.float64))
        relative = 0.0 if not gap.any() else float(np.linalg.norm(gap) / norm) if norm else float("inf")
        rows.append(Row(name, relative, float(np.abs(gap).max(initial=0)), x.tobytes() == y.tobytes()))
    return rows


def verdict(rows: list[Row], bound: float) -> tuple[str, bool]:
    """One sentence, and whether all is within the bound. What is not finite is beyond every bound."""
    if all(row.identical for row in rows):
        return f"byte-identical: {len(rows)} arrays", True
    beyond = [row for row in rows if not row.relative <= bound]
    worst = max(rows, key=_distance)
    if not beyond:
        return (f"within {bound:g}: the largest relative difference is {worst.relative:.2e}, of {worst.name}; "
                f"{sum(row.identical for row in rows)} of {len(rows)} arrays are byte-identical"), True
    return (f"not within {bound:g}: {len(beyond)} of {len(rows)} arrays are beyond it; the first in the order of "
            f"computing is {beyond[0].name} ({beyond[0].relative:.2e}), the worst {worst.name} "
            f"({worst.relative:.2e})"), False


def _distance(row: Row) -> float:
    return row.relative if math.isfinite(row.relative) else math.inf


def run(argv: list[str]) -> int:
    """The verb; 0 identical or within the bound, 1 beyond it, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="maxtext compare",
        description="Run two configs, or one at two commits, from the same weights on the same batches of random ids, "
                    "and tell how far layers, logits, gradients and losses are apart. Exit code: 0 "
                    "byte-identical or within the bound, 1 beyond it, 2 a mistake.",
        epilog="example: maxtext compare quickstart --b kernels.attention=blocked --b train.remat.mode=none; "
               "at a commit: maxtext compare quickstart@main quickstart")
    parser.add_argument("a", metavar="A", help="a YAML or its name in configs/; NAME@COMMIT: with the code of a commit")
    parser.add_argument("b", metavar="B", nargs="?", help="the other side; by default A's config")
    parser.add_argument("--a", dest="of_a", action="append", default=[], metavar="key=value", help="override A alone")
    parser.add_argument("--b", dest="of_b", action="append", default=[], metavar="key=value", help="override B alone")
    parser.add_argument("--both", action="append", default=[], metavar="key=value", help="override both")
    parser.add_argument("--steps", type=int, default=1,
                        help="updates (default 1; Adam's first updates blow up rounding: widen the bound with more)")
    parser.add_argument("--bound", type=float, default=1e-5,
                        help="largest norm of a difference over the norm of A's array (default 1e-5)")
    parser.add_argument("--all", action="store_true", help="show every array, not the worst of each kind")
    args = parser.parse_args(argv)
    if args.steps < 1 or not args.bound >= 0:
        print("maxtext compare: --steps takes 1 or more, --bound 0 or more", file=sys.stderr)
        return 2
    sides = [(args.a, [*args.both, *args.of_a]), (args.b or args.a, [*args.both, *args.of_b])]
    try:
        for name, overrides in sides:
            _check(name, overrides)
        a, b = (measured(name, overrides, args.steps) for name, overrides in sides)
        rows = compare(a, b)
    except (CompareError, OSError) as error:
        print(placed(error), file=sys.stderr)
        return 2
    print(table(rows, everything=args.all))
    sentence, good = verdict(rows, args.bound)
    print(sentence)
    return 0 if good else 1


def _check(name: str, overrides: list[str]) -> None:
    """CompareError for a config that this code cannot read, before anything is measured."""
    if "@" in name:  # that is for the code of the commit to say
        return
    try:
        load(find_config(name), overrides)
    except ConfigError as error:
        side = " ".join([name, *overrides])
        raise CompareError(str(error) if str(error).startswith(f"{side}: ") else f"{side}: {error}") from None


def table(rows: list[Row], everything: bool) -> str:
    """The worst array of each kind, or all."""
    if not everything:
        kinds = [[row for row in rows if row.name.split(" ")[0] == group] for group in GROUPS]
        rows = [max(kind, key=_distance) for kind in kinds if kind]
    width = max(len(row.name) for row in rows)
    lines = [f"{'array':{width}}  relative  largest   identical"]
    lines += [f"{row.name:{width}}  {row.relative:.2e}  {row.largest:.2e}  {'yes' if row.identical else 'no'}"
              for row in rows]
    return "\n".join(lines)


def measured(name: str, overrides: list[str], steps: int) -> dict[str, np.ndarray]:
    """Measures one side in a process of its own. Raises CompareError with what it said when it fails."""
    import numpy as np

    config, _, commit = name.partition("@")
    with ExitStack() as held:
        code = held.enter_context(_checkout(commit)) if commit else PROJECT
        folder = held.enter_context(tempfile.TemporaryDirectory())
        out = Path(folder, "side.npz")
        config = str(Path(config).resolve()) if Path(config).is_file() else config
        # This file's own neighbour measures, on the code of the commit.
        script = Path(__file__).with_name("measure.py")
        done = subprocess.run(
            [sys.executable, str(script), config, str(out), "--steps", str(steps), *overrides], cwd=code, text=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"})
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()
            said = done.stderr.strip() if done.returncode == 2 else (last[-1] if last else "no message")
            hint = f" (the code of {commit} may be too old to be measured)" if commit and done.returncode != 2 else ""
            raise CompareError(f"{name} {' '.join(overrides)}: {said}{hint}")
        with np.load(out) as file:
            return dict(file)


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A temporary worktree of the project at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "code")
        made = subprocess.run(["git", "-C", str(PROJECT), "worktree", "add", "--detach", str(place), commit],
                              capture_output=True, text=True)
        if made.returncode != 0:
            raise CompareError(f"@{commit}: git has no such commit here: {made.stderr.strip().splitlines()[-1]}")
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", str(PROJECT), "worktree", "remove", "--force", str(place)],
                           capture_output=True)
