"""How a tree of arrays prints: a line an array, with its path, type, shape, sharding and size, and no values."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxtext.parallel.sharding import Param, is_param

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def tree_text(tree: Any) -> str:
    """A table of the leaves of a tree, under a line with their sums.

    Leaves may be arrays, tracers, abstract arrays or `Param`: a shape names the mesh axes of more than one device that
    a dim is split over, as JAX's own types do (`float32[2048@tensor,512@(fsdp,expert)]`); that of a `Param` names its
    logical dims. What is no array shows as itself.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_param)
    rows = [(jax.tree_util.keystr(path, simple=True, separator="."), _type(leaf), size_text(_bytes(leaf)))
            for path, leaf in leaves]
    shaped = [leaf for _, leaf in leaves if hasattr(leaf, "shape")]
    values = sum(math.prod(leaf.shape) for leaf in shaped)
    title = (f"{type(tree).__name__}: {values:,} values in {len(shaped)} arrays, "
             f"{size_text(sum(_bytes(leaf) or 0 for leaf in shaped))}")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join([title, *(f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}".rstrip()
                               for name, kind, size in rows)])


def size_text(size: int | None) -> str:
    """Bytes for people, such as `3.4 GiB`; nothing for None."""
    if size is None:
        return ""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


def _type(leaf: Any) -> str:
    if is_param(leaf):
        dims = ",".join(f"{dim} {size}" if dim else str(size) for dim, size in zip(leaf.dims, leaf.shape, strict=True))
        return f"{leaf.init}[{dims}]"
    if not hasattr(leaf, "shape"):
        text = repr(leaf)
        return text if len(text) <= 60 else f"{text[:57]}..."
    axes = _axes(leaf)
    dims = ",".join(f"{size}{axis}" for size, axis in zip(leaf.shape, axes, strict=True))
    return f"{leaf.dtype}[{dims}]"


def _axes(leaf: Any) -> list[str]:
    """What splits each dim, such as `@fsdp` or nothing."""
    where = getattr(jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf, "sharding", None)
    if not isinstance(where, NamedSharding):
        return [""] * len(leaf.shape)
    found = []
    for entry in [*where.spec, *[None] * len(leaf.shape)][: len(leaf.shape)]:
        names = (entry,) if isinstance(entry, str) else entry or ()
        split = [name for name in names if isinstance(name, str) and where.mesh.shape[name] > 1]
        found.append("" if not split else f"@{split[0]}" if len(split) == 1 else f"@({','.join(split)})")
    return found


def _bytes(leaf: Any) -> int | None:
    """Of a whole array, over all devices; None where there is no type."""
    if isinstance(leaf, Param) or not hasattr(leaf, "shape"):
        return None
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
