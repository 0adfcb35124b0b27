"""One declaration per array, and the rules that lay logical dims over mesh axes.

A tensor has *dims* with logical names; a mesh has *axes*. `RULES` is the only place where the two meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),
    "embed": ("fsdp", "expert"),  # width of weights: sharded at rest, gathered for use
    "expert": "expert",  # the experts of a routed layer
    "expert_embed": "fsdp",  # width of the experts' weights: their other axis is taken by the experts
    "heads": "tensor",  # key/value heads, each with its group of query heads
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    None: None,
}


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


def spec(*dims: str | None) -> PartitionSpec:
    """The partition spec of a tensor with these logical dims."""
    return PartitionSpec(*(RULES[dim] for dim in dims))


def sharding(mesh: Mesh, *dims: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*dims))


def gather(weight: jax.Array, *dims: str | None) -> jax.Array:
    """A weight made whole over its width, ready for a matmul (an all-gather; its transpose a reduce-scatter)."""
    return jax.sharding.reshard(weight, spec(*(None if dim in ("embed", "expert_embed") else dim for dim in dims)))


def per_device(function: Callable[..., Any], in_dims: Any, out_dims: Any) -> Callable[..., Any]:
    """Runs `function` on each device's own piece of its arguments (`jax.shard_map` over every axis).

    Args:
      function: works on local arrays; it may use collectives over mesh axes by name.
      in_dims, out_dims: trees of tuples of logical dims, one tuple an array.
    """

    def to_spec(tree: Any) -> Any:
        return jax.tree.map(lambda dims: spec(*dims), tree, is_leaf=_is_dims)

    return jax.shard_map(function, in_specs=to_spec(in_dims), out_specs=to_spec(out_dims))


def _is_dims(node: Any) -> bool:
    return isinstance(node, tuple) and all(item is None or isinstance(item, str) for item in node)
