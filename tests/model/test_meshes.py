"""Every family on every kind of mesh has the loss, the gradients and the router statistics of one device.

The models are the tiny ones behind the families' traces, with packed documents; they are changed only where a mesh
needs other sizes. A pipeline runs the micro-batches of an update together; one device runs them one after another.

By default each family is on two meshes and two families are on all; `--all-meshes` runs the whole table.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxtext.config.schema import Config, MeshConfig, ModelConfig, RematConfig
from maxtext.model.decoder import abstract_decoder, run_decoder
from maxtext.train.step import batch_gradient
from tests.convert.tiny_families import NAMES
from tests.generate.families import random_weights
from tests.model.test_families import tiny
from tests.tiny import mesh_of, place, random_batch, tiny_config


class Kind(NamedTuple):
    """A kind of mesh: sizes of data, fsdp and tensor and of the other axes, and settings that go with it."""

    shape: tuple[int, int, int]
    others: dict[str, int] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012


KINDS = {
    "data 8": Kind((8, 1, 1)),
    "fsdp 8": Kind((1, 8, 1)),
    "fsdp 4 x 2": Kind((1, 8, 1), {"inner": 2}),
    "fsdp 4, tensor 2": Kind((1, 4, 2)),
    "all_gather": Kind((1, 2, 1), {"context": 4}, {"context_strategy": "all_gather"}),
    "ring": Kind((1, 2, 1), {"context": 4}, {"context_strategy": "ring"}),
    "ulysses": Kind((1, 2, 1), {"context": 4}, {"context_strategy": "ulysses"}),
    "pipeline": Kind((1, 2, 2), {"pipeline": 2}),
    "rounds": Kind((2, 1, 1), {"pipeline": 2, "context": 2}, {"pipeline_rounds": 2}),
    "data 2, fsdp 4": Kind((2, 4, 1)),
    "data 2, fsdp 2, tensor 2": Kind((2, 2, 2)),
    "expert 4, fsdp 2": Kind((1, 2, 1), {"expert": 4}),
    "expert 2, tensor 2": Kind((2, 1, 2), {"expert": 2}),
    "experts, all": Kind((1, 1, 1), {"pipeline": 2, "expert": 2, "context": 2}),
    "all": Kind((1, 1, 2), {"pipeline": 2, "context": 2}),
}
WHOLE = ("olmo3", "deepseek_v3")  # families that are on all meshes by default
BOTH_PASSES = (("olmo3", "ring"), ("olmo3", "pipeline"), ("deepseek_v3", "experts, all"))  # of .ci/run


def model_for(name: str, kind: str) -> ModelConfig:
    """The family's tiny model, with sizes that the mesh divides."""
    model, mesh = tiny(name), KINDS[kind]
    if model.latent.kv_rank is not None:
        ranks = {"kv_rank": 16} | ({} if model.latent.q_rank is None else {"q_rank": 16})
        model = dataclasses.replace(model, latent=dataclasses.replace(model.latent, **ranks))
    elif kind == "ulysses":
        model = dataclasses.replace(model, n_heads=8, n_kv_heads=4, head_dim=8)
    runs = mesh.others.get("pipeline", 1) * mesh.settings.get("pipeline_rounds", 1)
    if runs > 2:  # few layers: rounding grows with them, on a mesh of data alone to 1.3e-5 of the norm over nine
        model = dataclasses.replace(model, layer_pattern=model.layer_pattern[-1:])
    if runs > 1:  # as many repeats of the pattern, and what stands before and after them
        layers = model.moe.dense_layers + runs * len(model.layer_pattern)
        model = dataclasses.replace(model, n_layers=layers + (name == "gemma3"))
    return model


def config_for(name: str, kind: str) -> Config:
    micro_batches = KINDS[kind].others.get("pipeline", 1)
    cfg = tiny_config(model_for(name, kind), remat=RematConfig("none"), gradient_accumulation_steps=micro_batches)
    return dataclasses.replace(cfg, mesh=MeshConfig(**KINDS[kind].settings))


def gradient_on(cfg: Config, mesh: Mesh) -> Any:
    """(gradients, losses, router statistics) of a batch of packed documents, as numpy."""
    batch = random_batch(cfg, counts=[15, 12, 15, 3, 15, 15, 0, 9])
    segments = np.sort(np.random.default_rng(5).integers(0, 3, batch.tokens_BT.shape), axis=1).astype(np.int32)
    with jax.set_mesh(mesh):
        placed = place(batch.replace(segments_BT=segments), mesh)
        run = jax.jit(lambda p: batch_gradient(cfg, p, placed, placed.weights_BT.sum()))
        return jax.tree.map(np.asarray, run(random_weights(cfg.model, mesh)))


@functools.cache
def on_one_device(model: ModelConfig, micro_batches: int) -> Any:
    cfg = tiny_config(model, remat=RematConfig("none"), gradient_accumulation_steps=micro_batches)
    return gradient_on(cfg, mesh_of((1, 1, 1)))


def families_on_meshes() -> list:
    """(family, kind of mesh); what is not run by default is marked."""
    rows = []
    for at, name in enumerate(NAMES):
        routed = bool(tiny(name).moe.experts)
        kinds = [kind for kind in KINDS if routed or "expert" not in kind]
        chosen = {kinds[(2 * at) % len(kinds)], kinds[(2 * at + 1) % len(kinds)]}
        for kind in kinds:
            marks = [] if name in WHOLE or kind in chosen else [pytest.mark.all_meshes]
            marks += [] if (name, kind) in BOTH_PASSES else [pytest.mark.one_pass]
            rows.append(pytest.param(name, kind, marks=marks))
    return rows


@pytest.mark.parametrize(("name", "kind"), families_on_meshes())
def test_a_family_has_the_numbers_of_one_device(name, kind):
    cfg = config_for(name, kind)
    grads, losses, stats = gradient_on(cfg, mesh_of(KINDS[kind].shape, **KINDS[kind].others))
    one_grads, one_losses, one_stats = on_one_device(cfg.model, cfg.train.gradient_accumulation_steps)
    np.testing.assert_allclose(losses.cross_entropy, one_losses.cross_entropy, rtol=1e-6)
    np.testing.assert_allclose(losses.squared_log_z, one_losses.squared_log_z, rtol=1e-6)

    def close(ours: np.ndarray, theirs: np.ndarray) -> None:
        assert np.isfinite(theirs).all()
        assert np.linalg.norm(ours - theirs) <= 1e-5 * max(np.linalg.norm(theirs), 1e-6)

    jax.tree.map(close, (grads, stats), (one_grads, one_stats))


@pytest.mark.parametrize(("kind", "collectives"), [
    ("all_gather", {("all_gather", "context")}),
    ("ring", {("ppermute", "context")}),
    ("ulysses", {("all_to_all", "context")}),
    ("pipeline", {("ppermute", "pipeline"), ("all_to_all", "pipeline")}),
])
def test_the_axes_share_the_work_and_not_only_the_weights(kind, collectives):
    """The numbers above would be right too if all devices of an axis did the same."""
    cfg, mesh = config_for("llama", kind), mesh_of(KINDS[kind].shape, **KINDS[kind].others)
    with jax.set_mesh(mesh):
        params, batch = abstract_decoder(cfg.model, mesh), place(random_batch(cfg), mesh)
        traced = str(jax.make_jaxpr(lambda p: batch_gradient(cfg, p, batch, batch.weights_BT.sum()))(params))
    found = set(re.findall(r"(all_gather|all_to_all|ppermute)\[[^\]]*?axis_name=\(?'?(\w+)", traced))
    assert collectives <= found


def test_between_layers_the_tensor_axis_splits_positions():
    cfg, mesh = config_for("llama", "fsdp 4, tensor 2"), mesh_of((1, 4, 2))
    with jax.set_mesh(mesh):
        params, batch = abstract_decoder(cfg.model, mesh), place(random_batch(cfg), mesh)
        made = jax.make_jaxpr(lambda p: run_decoder(p, batch.tokens_BT, cfg.model, cfg.execution)[0])(params)
    [scan] = [eqn for eqn in made.eqns if eqn.primitive.name == "scan"]
    assert scan.outvars[0].aval.sharding.spec[1] == "tensor"
