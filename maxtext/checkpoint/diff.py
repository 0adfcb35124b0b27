"""`maxtext checkpoint diff A[@STEP] B[@STEP]`: in which arrays and in what else two checkpoints differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from maxtext.checkpoint import manifest
from maxtext.checkpoint.manifest import CheckpointError, Damaged, Manifest


def run(directories: tuple[str, str], steps: tuple[int | None, int | None]) -> int:
    """Prints the differences of two verified checkpoints; 0 when there are none but in name and time, else 1.

    Args:
      directories: folders of checkpoints.
      steps: of each; None: the newest good one.
    """
    (dir_a, a), (dir_b, b) = (_opened(*which) for which in zip(directories, steps, strict=True))
    lines = [*_leaves(dir_a, a, dir_b, b), *_rest(a, b)]
    print("\n".join(lines or [f"the same: {len(a.leaves)} arrays, bit for bit"]))
    return 1 if lines else 0


def _opened(directory: str, step: int | None) -> tuple[str, Manifest]:
    """The folder of a step and its manifest, once every file is known to be what was saved."""
    good = {entry.step: entry for entry in manifest.scan(directory) if entry.status == "good"}
    if not good or (step is not None and step not in good):
        raise CheckpointError(f"{directory} holds no good step{'' if step is None else f' {step}'}; "
                              f"good steps are {sorted(good)}")  # type: ignore[type-var]
    entry = good[max(good) if step is None else step]  # type: ignore[type-var]
    step_dir = os.path.join(directory, entry.name)
    assert entry.manifest is not None
    try:
        manifest.check_files(step_dir, entry.manifest)
    except Damaged as damage:
        raise CheckpointError(f"{step_dir} is bad: {damage}") from None
    return step_dir, entry.manifest


def _leaves(dir_a: str, a: Manifest, dir_b: str, b: Manifest) -> Iterator[str]:
    """A line for each array that is not the same; only those are read, one pair at a time."""
    from maxtext.checkpoint import arrays

    for name in sorted(a.leaves.keys() | b.leaves.keys()):
        one, two = a.leaves.get(name), b.leaves.get(name)
        if one is None or two is None:
            yield f"{name}: only in the {'second' if one is None else 'first'} ({two or one})"
        elif (one.shape, one.dtype) != (two.shape, two.dtype):
            yield f"{name}: {one} and {two}"
        elif one.fingerprint != two.fingerprint:
            pair = ((dir_a, a), (dir_b, b))
            x, y = (arrays.read_leaf(os.path.join(path, saved.arrays), name) for path, saved in pair)
            yield f"{name}: {one}, {_distance(x, y)}"


def _distance(x: np.ndarray, y: np.ndarray) -> str:
    """How far two arrays of one shape and type are apart."""
    x, y = x.reshape(-1), y.reshape(-1)
    other = x.view(np.uint8).reshape(x.size, -1) != y.view(np.uint8).reshape(y.size, -1)
    count = f"{int(other.any(-1).sum()):,} of {x.size:,} elements differ"
    gaps = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
    gaps = gaps[np.isfinite(gaps)]
    return f"{count}, by at most {gaps.max():.3g}" if gaps.size else count


def _rest(a: Manifest, b: Manifest) -> Iterator[str]:
    """A line for each difference in what is saved beside the arrays."""
    for title, one, two in (("extra", a.extra, b.extra), ("made with", a.versions, b.versions),
                            ("provenance", a.provenance, b.provenance)):
        before, now = _flat(one), _flat(two)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                yield f"{title} {key}: {before.get(key)!r} and {now.get(key)!r}"
    before, now = (_settings(saved.config_text) for saved in (a, b))
    yield from (f"config: - {line}" for line in before if line not in now)
    yield from (f"config: + {line}" for line in now if line not in before)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix.rstrip("."): node}
    return {key: value for name, item in node.items() for key, value in _flat(item, f"{prefix}{name}.").items()}


def _settings(text: str) -> list[str]:
    """The lines of a config without the comments on where a value came from."""
    return [line for line in (line.partition("  # ")[0].rstrip() for line in text.splitlines()) if line]
