"""Which run was meant where a folder is none: `runs/qickstart does not exist (did you mean runs/quickstart?)`."""

from __future__ import annotations

import difflib
import os

_OF_A_RUN = ("checkpoints", "metrics.jsonl", "events.jsonl")
_MOST = 4  # names that a message lists


def no_run(path: str, lacks: str) -> str:
    """Why `path` is not the run that was asked for, with the runs that it may have been.

    Args:
      path: as it was given; it need not exist.
      lacks: what an existing folder would need, such as `a checkpoint`.
    """
    if os.path.isdir(path):
        return f"{path} holds no {lacks}{_listed(path, _runs_in(path))}"
    fault = "is a file, not a folder" if os.path.exists(path) else "does not exist"
    head, mark, step = path.rpartition("@")
    if mark and step.isdigit() and os.path.isdir(head):
        return f"{path} {fault} (a step of {head} is a folder, {head}/checkpoints/step_{int(step):08d})"
    beside, name = os.path.split(os.path.normpath(path))
    names = _runs_in(beside or ".")
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f"{path} {fault} (did you mean {os.path.join(beside, near[0])}?)"
    return f"{path} {fault}{_listed(beside, names)}"


def _listed(folder: str, names: list[str]) -> str:
    shown = [os.path.join(folder, name) for name in names[:_MOST]]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f" (runs there: {', '.join(shown)}{more})" if shown else ""


def _runs_in(folder: str) -> list[str]:
    """Names of the runs that stand directly in a folder; none where it cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [name for name in names if any(os.path.exists(os.path.join(folder, name, one)) for one in _OF_A_RUN)]
