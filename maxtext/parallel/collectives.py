"""Small pieces for code that runs on each device's own part of an array, inside `per_device`."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes over which any of these local arrays may differ."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, typed as different over `axes` too; the transpose sums gradients over those axes."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, tree)
