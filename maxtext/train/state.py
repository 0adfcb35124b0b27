"""The training state: everything that a resumed run needs, as one pytree."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.config.schema import Config
from maxtext.model.decoder import Decoder, decoder_params, init_decoder, leaf_names
from maxtext.model.matrices import matrices_of
from maxtext.parallel.host_memory import offloads, on_host
from maxtext.parallel.sharding import is_param
from maxtext.train.optim import decay_mask_from_names, make_optimizer
from maxtext.train.schedule import make_schedule


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32: updates done, skipped ones included
    params: Decoder  # float32
    optimizer: Any  # moments, Adam count, learning rate, windows of the skip rule
    rng: jax.Array  # uint32 key data of the run's seed


def optimizer_of(cfg: Config) -> optax.GradientTransformationExtraArgs:
    declared = decoder_params(cfg.model)
    decays = decay_mask_from_names(leaf_names(declared), cfg.optim.no_decay)
    trained = jax.tree.map(lambda p: p.trained, declared, is_leaf=is_param)
    return make_optimizer(cfg, make_schedule(cfg), jax.tree.map(operator.and_, decays, trained), matrices_of(declared))


def init_state(cfg: Config) -> TrainState:
    """The state before the first update, on the current mesh; a pure function of the config's seed."""
    state = _initial(cfg)
    if _offloads(cfg, jax.sharding.get_mesh()):
        return _with_moments(state, lambda x: jax.device_put(x, on_host(x.sharding)))
    return state


def _initial(cfg: Config) -> TrainState:
    key = jax.random.key(cfg.seed)
    params = init_decoder(cfg.model, key)
    optimizer = jax.jit(optimizer_of(cfg).init)(params)
    return TrainState(jnp.int32(0), params, optimizer, jax.random.key_data(key))


def abstract_state(cfg: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state on `mesh`; nothing is allocated."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: _initial(cfg))
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(x))), shapes
    )
    if _offloads(cfg, mesh):
        return _with_moments(state, lambda x: x.update(sharding=on_host(x.sharding)))
    return state


def _offloads(cfg: Config, mesh: Mesh) -> bool:
    return not mesh.empty and offloads(cfg.optim.offload, mesh.devices.flat[0], "optim.offload")


def _with_moments(state: TrainState, move: Callable[[Any], Any]) -> TrainState:
    """The state with other moments."""
    optimizer = state.optimizer
    return state.replace(optimizer=optimizer._replace(mu=jax.tree.map(move, optimizer.mu),
                                                      nu=jax.tree.map(move, optimizer.nu)))


def _spec(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The partition spec of an abstract array; one that carries no sharding is replicated."""
    return PartitionSpec() if x.sharding is None else x.sharding.spec
