"""Which arrays of a block are made of matrices, and of which: what an optimizer for matrices works on.

Queries, keys and values are matrices of their own, and so are gate and up and the experts. Embeddings, head, norms,
biases, sinks and routers are none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from maxtext.model.attention import Attention
from maxtext.model.decoder import Decoder
from maxtext.model.latent import LatentAttention
from maxtext.model.layers import Mlp
from maxtext.model.moe import Moe
from maxtext.parallel.sharding import is_param


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How the array of one layer is made of matrices. Its dims that are neither inputs nor outputs count them."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    apart: int | None = None  # a dim whose last two entries are matrices of their own: keys and values


MATRICES = {
    (Attention, "qkv"): Matrices((0,), (1, 2, 3), apart=2),
    (Attention, "out"): Matrices((0, 1, 2), (3,)),
    (LatentAttention, "q_down"): Matrices((0,), (1,)),
    (LatentAttention, "q_up"): Matrices((0,), (1, 2)),
    (LatentAttention, "kv_down"): Matrices((0,), (1,)),
    (LatentAttention, "kv_up"): Matrices((0,), (1, 2)),
    (LatentAttention, "out"): Matrices((0, 1), (2,)),
    (Mlp, "gate_up"): Matrices((0,), (2,)),
    (Mlp, "down"): Matrices((0,), (1,)),
    (Moe, "gate_up"): Matrices((1,), (3,)),
    (Moe, "down"): Matrices((1,), (2,)),
}


def matrices_of(declared: Decoder) -> list[Matrices | None]:
    """For each leaf of the weights, in tree order: the matrices that it is made of, or None where AdamW serves."""
    found = []
    for path, _ in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_param):
        owner: Any = declared
        for key in path[:-1]:
            owner = getattr(owner, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else owner[key.idx]
        found.append(MATRICES.get((type(owner), path[-1].name)))
    return found
