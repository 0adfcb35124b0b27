"""One declaration per array, and the rules that lay logical dims over mesh axes.

A tensor has *dims* with logical names; a mesh has *axes*. `RULES` is the only place where the two meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str | None, tuple[str, ...]] = {
    "batch": ("data", "pipeline", "fsdp", "expert"),
    "sequence": ("context",),  # positions, inside a layer
    "residual": ("context", "tensor"),  # positions, between layers
    # Width of weights: sharded at rest, gathered for use. The pipeline comes last, so that one all-to-all over it sends
    # a stage its layers.
    "embed": ("fsdp", "expert", "context", "pipeline"),
    "expert": ("expert",),  # the experts of a routed layer
    "expert_embed": ("fsdp", "context", "pipeline"),  # width of experts' weights: the experts take their other axis
    "heads": ("tensor",),  # key/value heads, each with its group of query heads
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "stage": ("pipeline",),  # layers, and micro-batches before and after, of a pipeline
    "micro_batch": ("data", "fsdp", "expert"),  # rows of one in a pipeline
    "layers": (),
    None: (),
}
POSITIONS = ("sequence", "residual")
# A mesh may cut the axis fsdp in two (`mesh.cut_fsdp` says when and why); then this is its inner part, next to it, and
# what RULES lay over fsdp lies over both.
INNER = "fsdp_inner"


@dataclasses.dataclass(frozen=True)
class Param:
    """Shape, logical dims and initializer of one array.

    Everything that must agree about an array is derived from this: initial value, sharding, abstract state, checkpoint
    target, weight-decay mask, parameter count.
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    trained: bool = True  # by gradients; the optimizer leaves the others alone

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), (self.shape, self.dims)

    def stack(self, repeats: int) -> Param:
        """The same parameter for `repeats` layers, on a new leading dim."""
        return dataclasses.replace(self, shape=(repeats, *self.shape), dims=("layers", *self.dims))


def is_param(node: Any) -> bool:
    return isinstance(node, Param)


def mesh_axes(*dims: str | None) -> tuple[str, ...]:
    """Axes of the current mesh that split these dims, without those that a surrounding pipeline runs over."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in with_parts((axis for dim in dims for axis in RULES[dim]), mesh.axis_names)
                 if axis not in mesh.manual_axes)


def with_parts(axes: Iterable[str], mesh_names: Iterable[str]) -> tuple[str, ...]:
    """The axes, with both parts of fsdp where the mesh of these names has two."""
    cut = INNER in mesh_names
    return tuple(part for axis in axes for part in ((axis, INNER) if cut and axis == "fsdp" else (axis,)))


def in_turn(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The groups of axes over which a weight is gathered one after the other, the last first; scattered, the first."""
    at = axes.index(INNER) if INNER in axes else 0
    return tuple(group for group in (axes[:at], axes[at:]) if group)


def spec(*dims: str | None, sizes: Mapping[str, int] | None = None) -> PartitionSpec:
    """The partition spec of a tensor with these logical dims.

    Positions are special: only what really splits them is named, as positions that are whole can be cut and joined.

    Args:
      sizes: of the mesh's axes; by default those of the current mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape) if sizes is None else sizes

    def axes(dim: str | None) -> str | tuple[str, ...] | None:
        named = tuple(axis for axis in with_parts(RULES[dim], sizes) if axis not in mesh.manual_axes)
        found = tuple(axis for axis in named if dim not in POSITIONS or sizes.get(axis, 1) > 1)
        return found[0] if len(found) == 1 else found or None

    return PartitionSpec(*(axes(dim) for dim in dims))


def sharding(mesh: Mesh, *dims: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*dims, sizes=mesh.shape))


def gather(weight: jax.Array, *dims: str | None, whole: tuple[str, ...] = ("embed",),
           quantized: bool = False) -> jax.Array:
    """A weight made whole over its width, ready for a matmul (an all-gather; its transpose a reduce-scatter).

    Where only the batch and widths are split, the type says that gradients come as sums which each device has made of
    its own tokens (`reduced`), so that they are scattered as they are summed. XLA for TPU makes all-reduces where the
    split dim is the last, so that one is the first while it is gathered. Where fsdp is cut, both go over one part after
    the other.

    Args:
      whole: the dims to gather.
      quantized: whether the matmul is one of eight bits, whose gradients are whole sums.
    """
    mesh, target = jax.sharding.get_abstract_mesh(), spec(*(None if dim in whole else dim for dim in dims))
    sizes, batch, width = dict(mesh.shape), mesh_axes("batch"), mesh_axes("embed")
    split = {axis for axis in mesh.axis_names if sizes[axis] > 1}
    if quantized or not split or not split <= set(batch) - {"pipeline"}:
        return jax.sharding.reshard(weight, target)
    if dims[-1] == "embed" and len(dims) > 1:
        first = gather(jnp.moveaxis(weight, -1, 0), dims[-1], *dims[:-1], whole=whole)
        return jnp.moveaxis(first, 0, -1)
    if INNER in width:
        outer = width[: width.index(INNER)]
        partly = (outer if dim == "embed" else kept for dim, kept in zip(dims, target, strict=True))
        weight = jax.sharding.reshard(weight, PartitionSpec(*partly, reduced=set(batch) - set(outer)))
    return jax.sharding.reshard(weight, PartitionSpec(*target, reduced=set(batch)))


def per_device(function: Callable[..., Any], in_dims: Any, out_dims: Any) -> Callable[..., Any]:
    """Runs `function` on each device's own piece of its arguments (`jax.shard_map` over every axis that is left).

    Args:
      function: works on local arrays; it may use collectives over mesh axes by name.
      in_dims, out_dims: trees of tuples of logical dims, one tuple an array.
    """

    def to_spec(tree: Any) -> Any:
        return jax.tree.map(lambda dims: spec(*dims), tree, is_leaf=_is_dims)

    mesh, in_specs, out_specs = jax.sharding.get_abstract_mesh(), to_spec(in_dims), to_spec(out_dims)
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    if not free and mesh.axis_names:  # the caller already works on its own device's piece
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=free)


def _is_dims(node: Any) -> bool:
    return isinstance(node, tuple) and all(item is None or isinstance(item, str) for item in node)
