"""The training state: everything that a resumed run needs, as one pytree."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.config.schema import Config
from maxtext.model.decoder import FLOAT32_WEIGHTS, Decoder, decoder_params, init_decoder, leaf_names
from maxtext.model.matrices import matrices_of
from maxtext.parallel.host_memory import offloads, on_host
from maxtext.parallel.sharding import is_param
from maxtext.parallel.show import tree_text
from maxtext.train.optim import OptimNumbers, decay_mask_from_names, make_optimizer, optim_numbers
from maxtext.train.schedule import Rates, make_schedule, rates_of


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32: updates done, skipped ones included
    params: Decoder  # float32
    optimizer: Any  # moments, Adam count, learning rate, windows of the skip rule
    rng: jax.Array  # uint32 key data of the run's seed

    __repr__ = tree_text


class Numbers(NamedTuple):
    """All that enters an update as a number and not as structure: what members of one sweep may differ in."""

    rates: Rates
    optim: OptimNumbers
    z_loss: float | jax.Array


def numbers_of(cfg: Config) -> Numbers:
    return Numbers(rates_of(cfg), optim_numbers(cfg), cfg.train.z_loss)


def optimizer_of(cfg: Config, numbers: Numbers | None = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run, with `numbers` in place of those of its config."""
    numbers = numbers_of(cfg) if numbers is None else numbers
    declared = decoder_params(cfg.model)
    decays = decay_mask_from_names(leaf_names(declared), cfg.optim.no_decay)
    trained = jax.tree.map(lambda p: p.trained, declared, is_leaf=is_param)
    return make_optimizer(cfg, make_schedule(cfg, numbers.rates), jax.tree.map(operator.and_, decays, trained),
                          matrices_of(declared), numbers.optim)


def init_state(cfg: Config) -> TrainState:
    """The state before the first update, on the current mesh; a pure function of the config's seed."""
    return _placed(cfg, _initial(cfg), jax.sharding.get_mesh(), lambda x: jax.device_put(x, on_host(x.sharding)))


def _initial(cfg: Config) -> TrainState:
    key = jax.random.key(cfg.seed)
    params = init_decoder(cfg.model, key, alike=cfg.train.determinism == "any_mesh")
    optimizer = jax.jit(optimizer_of(cfg).init)(params)
    return TrainState(jnp.int32(0), params, optimizer, jax.random.key_data(key))


def abstract_state(cfg: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state on `mesh`; nothing is allocated."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: _initial(cfg))
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(x))), shapes
    )
    return _placed(cfg, state, mesh, lambda x: x.update(sharding=on_host(x.sharding)))


def _placed(cfg: Config, state: TrainState, mesh: Mesh, move: Callable[[Any], Any]) -> TrainState:
    """The state with `move` applied to what lies in the host's memory."""
    if mesh.empty:
        return state
    device = mesh.devices.flat[0]
    if offloads(cfg.optim.offload, device, "optim.offload"):
        moments = {name: jax.tree.map(move, getattr(state.optimizer, name)) for name in ("mu", "nu")}
        state = state.replace(optimizer=state.optimizer._replace(**moments))
    if offloads(cfg.optim.offload_weights, device, "optim.offload_weights"):
        names = leaf_names(state.params)
        state = state.replace(params=jax.tree.map(
            lambda x, name: x if name.rpartition(".")[2] in FLOAT32_WEIGHTS else move(x), state.params, names))
    return state


def _spec(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The partition spec of an abstract array; one that carries no sharding is replicated."""
    return PartitionSpec() if x.sharding is None else x.sharding.spec
