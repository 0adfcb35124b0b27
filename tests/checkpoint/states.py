"""Training states of the shapes that checkpoints meet, and how to compare them bit for bit."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext.checkpoint.manager import Restored
from maxtext.config.schema import CheckpointConfig

ROOT = Path(__file__).resolve().parents[2]
P = PartitionSpec
REPLICATED = P()


@flax.struct.dataclass
class Block:
    wq: Any
    norm: Any


@flax.struct.dataclass
class Params:
    embed: Any
    blocks: tuple[Block, ...]


@flax.struct.dataclass
class Optimizer:
    count: Any
    mu: Params
    nu: Params
    loss_window: Any
    skipped: Any


@flax.struct.dataclass
class State:
    params: Params
    optimizer: Optimizer
    key: Any


def make_mesh(fsdp: int = 8, tensor: int = 1, kind: AxisType = AxisType.Explicit) -> Mesh:
    n = fsdp * tensor
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(kind, kind), devices=jax.devices()[:n])


def abstract(mesh: Mesh, width: int = 32) -> State:
    """Structure, shapes, dtypes and shardings: two segments of stacked blocks, float32 moments, int32 counts, a key."""

    def array(*shape: int, spec: PartitionSpec = REPLICATED, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def params() -> Params:
        block = Block(array(3, width, 2 * width, spec=P(None, "fsdp", "tensor")), array(3, width))
        return Params(array(2 * width, width, spec=P(("fsdp", "tensor"))), (block, block))

    window = array(16)
    optimizer = Optimizer(array(dtype=jnp.int32), params(), params(), window, array(dtype=jnp.bool_))
    return State(params(), optimizer, array(dtype=jax.random.key(0).dtype))


def make_state(mesh: Mesh, seed: int = 0, width: int = 32) -> State:
    """A state of random bits of every kind, NaN payloads and negative zeros among them."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.jit(lambda: jax.random.key(seed), out_shardings=leaf.sharding)()
        bits = rng.integers(0, 256, math.prod(leaf.shape) * leaf.dtype.itemsize, np.uint8)
        host = bits.view(leaf.dtype).reshape(leaf.shape) if leaf.dtype != np.bool_ else bits.reshape(leaf.shape) < 128
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])

    return jax.tree.map(fill, abstract(mesh, width))


def host_bits(tree: Any) -> list[bytes]:
    """Shape, dtype and bytes of every leaf."""
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
              for x in jax.tree.leaves(tree)]
    return [repr((x.shape, str(x.dtype))).encode() + np.array(x).tobytes() for x in leaves]


def config(**changes: Any) -> CheckpointConfig:
    return dataclasses.replace(CheckpointConfig(keep_last=None), **changes)


def found(restored: Restored | None) -> Restored:
    """What `restore` returned, which must be a checkpoint."""
    assert restored is not None
    return restored


def child_environment() -> dict[str, str]:
    """For child processes, which inherit the platform and the 8 devices from this one."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
