"""Moments and weights in the host's memory: the same updates, in the right memory, saved, restored and resumed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.architecture import MoeConfig
from maxtext.config.optimizer import OptimConfig
from maxtext.config.schema import CheckpointConfig, Config
from maxtext.model.decoder import leaf_names
from maxtext.parallel.host_memory import OffloadError, offloads, on_devices
from maxtext.train.state import abstract_state, init_state
from maxtext.train.step import compile_train_step
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

MESH = (1, 2, 1)


def config(offload: Any = "host", **optim: Any) -> Config:
    model = tiny_model(n_layers=1)
    return dataclasses.replace(tiny_config(model), optim=OptimConfig(lr=1e-2, offload=offload, **optim))


def kinds(state: Any) -> dict[str, set[str]]:
    """Kinds of memory of the weights and of the moments."""
    moments = state.optimizer.mu, state.optimizer.nu
    return {"weights": {x.sharding.memory_kind for x in jax.tree.leaves(state.params)},
            "moments": {x.sharding.memory_kind for x in jax.tree.leaves(moments)}}


def trained(cfg: Config, updates: int = 2) -> Any:
    mesh = mesh_of(MESH)
    with jax.set_mesh(mesh):
        state, step = init_state(cfg), compile_train_step(cfg)
        compiled = step.lower(state, place(random_batch(cfg), mesh)).compile()
        for seed in range(updates):
            state, _ = compiled(state, place(random_batch(cfg, seed), mesh))
    return state


@pytest.mark.one_pass
def test_moments_lie_on_the_host_and_updates_are_the_same_bits(tmp_path):
    cfg = config(kind="adamw")
    usual, state = trained(dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, offload="none"))), trained(cfg)
    assert kinds(usual) == {"weights": {"device"}, "moments": {"device"}}
    assert kinds(state) == {"weights": {"device"}, "moments": {"pinned_host"}}
    for a, b in zip(jax.tree.leaves(usual), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    mesh = mesh_of(MESH)
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=False))
    checkpoints.save(2, state, {})
    restored = checkpoints.restore(abstract_state(cfg, mesh))
    checkpoints.close()
    assert kinds(restored.state) == kinds(state)
    for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.one_pass
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_lie_on_the_host_and_updates_are_the_same_bits(dtype):
    cfg = config("none", kind="skip_step_adamw")
    model = tiny_model(n_layers=2, moe=MoeConfig(experts=4, top_k=2, d_expert=16))
    cfg = dataclasses.replace(cfg, model=model, train=dataclasses.replace(
        cfg.train, compute_dtype=dtype, gradient_accumulation_steps=2))
    there = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, offload_weights="host"))
    usual, state = trained(cfg), trained(there)
    assert kinds(usual) == {"weights": {"device"}, "moments": {"device"}}
    assert kinds(state) == {"weights": {"device", "pinned_host"}, "moments": {"device"}}
    left = [name for name, x in zip(jax.tree.leaves(leaf_names(state.params)), jax.tree.leaves(state.params),
                                    strict=True) if x.sharding.memory_kind == "device"]
    assert {name.rpartition(".")[2] for name in left} == {"router"}
    for a, b in zip(jax.tree.leaves(usual), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(on_devices(state.params)))


def test_auto_leaves_a_cpus_moments_where_they_are_and_a_device_without_host_memory_is_refused():
    cfg = config("auto")
    assert kinds(abstract_state(cfg, mesh_of((1, 1, 1)))) == {"weights": {"device"}, "moments": {"device"}}
    memories = [SimpleNamespace(kind="device")]
    alone: Any = SimpleNamespace(platform="abacus", device_kind="Abacus 3", addressable_memories=lambda: memories)
    assert not offloads("auto", alone, "optim.offload")
    with pytest.raises(OffloadError, match=r"optim.offload is host, but a Abacus 3 reaches no host memory \(it"):
        offloads("host", alone, "optim.offload")
    memories.append(SimpleNamespace(kind="pinned_host"))
    assert offloads("auto", alone, "optim.offload")
