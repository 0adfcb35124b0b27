"""Muon against numpy in float64, against optax, on meshes, in FLOPs, and through a stop and a resume."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext.config.optimizer import MuonConfig, OptimConfig
from maxtext.config.schema import Config
from maxtext.model.decoder import abstract_decoder, decoder_params, leaf_names
from maxtext.model.matrices import Matrices, matrices_of
from maxtext.parallel.sharding import is_param
from maxtext.train import loop
from maxtext.train.muon import newton_schulz, orthogonalized
from maxtext.train.optim import global_norm
from maxtext.train.state import optimizer_of
from tests.generate.families import FAMILIES, random_weights
from tests.runs import Runs, lines, saved_bits, some_devices
from tests.tiny import mesh_of, tiny_config

# Which matrices an array of one layer is made of, written as a loop would: index of the matrix -> number of rows.
# Gate and up, queries, keys and values, and experts are matrices of their own.
ROWS = {"out": -1, "q_down": 1, "q_up": 1, "kv_down": 1, "kv_up": 1}
ADAMW = {"router", "q_norm", "k_norm", "qkv_bias", "sinks", "gate_up_bias", "down_bias", "router_bias",
         "selection_bias", "out_bias", "kv_norm"}


def config(family: str = "olmo3", **muon: Any) -> Config:
    cfg = tiny_config(FAMILIES[family])
    return dataclasses.replace(cfg, optim=OptimConfig(lr=1e-2, kind="skip_step_muon", muon=MuonConfig(**muon)))


def views(name: str, array: np.ndarray) -> list[np.ndarray]:
    """Views of each matrix (in, ...) of an array (R, ...), by its name."""
    field, found = name.split(".")[-1], []
    for layer in array:
        if field == "qkv":
            found += [layer[:, :, :-2], layer[:, :, -2], layer[:, :, -1]]
        elif field == "gate_up":
            experts = layer if layer.ndim == 4 else layer[None]
            found += [expert[:, i] for expert in experts for i in range(2)]
        elif field == "down":
            found += [*layer] if layer.ndim == 3 else [layer]
        else:
            found.append(layer)
    return found


def shape_of(name: str, view: np.ndarray) -> tuple[int, int]:
    ahead = ROWS.get(name.split(".")[-1], 1)
    return int(np.prod(view.shape[:ahead])), int(np.prod(view.shape[ahead:]))


def is_matrix(name: str) -> bool:
    return name.startswith("segments") and name.split(".")[-1] in {"qkv", "gate_up", "down", *ROWS}


def polynomial(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Newton-Schulz by what it does to each singular value: no matrix product is iterated."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.sqrt((s ** 2).sum()) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    return u @ np.diag(s) @ vt


def reference(cfg: Config, weights: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]):
    """The matrices after some updates at a constant rate, in float64."""
    o, muon = cfg.optim, cfg.optim.muon
    rate = muon.matrix_lr or o.lr
    decay = o.weight_decay if muon.matrix_weight_decay is None else muon.matrix_weight_decay
    p = {name: x.astype(np.float64) for name, x in weights.items() if is_matrix(name)}
    m = {name: np.zeros_like(x) for name, x in p.items()}
    for grads in gradients:
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        for name in p:
            g = grads[name].astype(np.float64) * min(1, 1 / (norm + 1e-6))
            m[name] = muon.momentum * m[name] + (1 - muon.momentum) * g
            u = (1 - muon.momentum) * g + muon.momentum * m[name] if muon.nesterov else m[name]
            for weight, ahead in zip(views(name, p[name]), views(name, u), strict=True):
                fan_in, fan_out = shape = shape_of(name, weight)
                factor = {"adamw_rms": 0.2 * max(shape) ** 0.5, "aspect": max(1, fan_out / fan_in) ** 0.5}[muon.scale]
                direction = polynomial(ahead.reshape(shape), muon.ns_steps).reshape(weight.shape)
                weight[...] = weight * (1 - rate * decay) - rate * factor * direction
    return p, m


def named(tree: Any) -> dict[str, np.ndarray]:
    return dict(zip(jax.tree.leaves(leaf_names(tree)), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def gradients(cfg: Config, mesh: Any, count: int = 3) -> list[Any]:
    """Of a size that is clipped at first and not at the end."""
    def draw(i: int, leaf: jax.ShapeDtypeStruct, j: int) -> jax.Array:
        drawn = np.random.default_rng((i, j)).normal(0, 10.0 ** -(2 * i), leaf.shape).astype(np.float32)
        return jax.device_put(drawn, leaf.sharding)

    leaves, treedef = jax.tree.flatten(abstract_decoder(cfg.model, mesh))
    return [treedef.unflatten([draw(i, leaf, j) for j, leaf in enumerate(leaves)]) for i in range(count)]


def updated(cfg: Config, mesh: Any, count: int = 3) -> tuple[Any, Any]:
    """Weights and optimizer state after some updates at the constant rate `optim.lr`."""
    cfg = dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, kind="constant", warmup_steps=0))
    tx: Any = optimizer_of(cfg)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        changes, state = tx.update(grads, state, params, loss=jnp.float32(2), grad_norm=global_norm(grads))
        return optax.apply_updates(params, changes), state

    with jax.set_mesh(mesh):
        params = random_weights(cfg.model, mesh)
        state = jax.jit(tx.init)(params)
        for grads in gradients(cfg, mesh, count):
            params, state = step(params, state, grads)
    return params, state


@functools.cache
def on_one_device(family: str) -> tuple[Any, Any]:
    return updated(config(family), mesh_of((1, 1, 1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array_of_a_block_is_a_matrix_or_adamws(family: str):
    declared = decoder_params(FAMILIES[family])
    for name, how, leaf in zip(jax.tree.leaves(leaf_names(declared)), matrices_of(declared),
                               jax.tree.leaves(declared, is_leaf=is_param), strict=True):
        assert (how is not None) == is_matrix(name), name
        if how is None and name.startswith("segments"):
            assert name.split(".")[-1] in ADAMW or len(leaf.shape) == 2, f"{name}: is it Muon's or AdamW's?"
        if how is not None:
            dims = [*how.inputs, *how.outputs]
            assert sorted(dims) == sorted(set(dims))
            assert max(dims) < len(leaf.shape) - 1


@pytest.mark.parametrize(("family", "options"), [
    ("olmo3", {}), ("deepseek_v3", {}),
    pytest.param("olmo3", {"scale": "aspect", "matrix_lr": 0.02, "matrix_weight_decay": 0.0, "nesterov": False,
                           "ns_steps": 3, "momentum": 0.9}, marks=pytest.mark.one_pass)])
def test_updates_equal_float64(family: str, options: dict[str, Any]):
    cfg, mesh = config(family, **options), mesh_of((1, 1, 1))
    params, state = on_one_device(family) if not options else updated(cfg, mesh)
    expected, momenta = reference(cfg, named(random_weights(cfg.model, mesh)), list(map(named, gradients(cfg, mesh))))
    got, mu = named(params), named(state.mu)
    assert len(expected) > 5
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=3e-5 * np.abs(want).max(), err_msg=name)
        np.testing.assert_allclose(mu[name], momenta[name], rtol=0, atol=1e-6 * np.abs(momenta[name]).max())
    assert named(state.nu).keys() == got.keys() - expected.keys()  # matrices have one moment


def test_a_plain_matrix_equals_optax():
    """Without Nesterov, whose first steps optax corrects for bias: a factor that does not survive orthogonalisation."""
    x = np.random.default_rng(0).normal(size=(3, 24, 40)).astype(np.float32)
    tx = optax.contrib.scale_by_muon(beta=0.9, nesterov=False, weight_dimension_numbers=(
        optax.contrib.MuonDimensionNumbers(1, 2)))
    expected = tx.update(jnp.asarray(x), tx.init(jnp.asarray(x)))[0]
    got, = orthogonalized([jnp.asarray(x)], [Matrices((0,), (1,))], MuonConfig())
    np.testing.assert_allclose(got / (0.2 * 40 ** 0.5), expected, atol=2e-5)


@pytest.mark.parametrize(("family", "shape", "others"), [
    ("deepseek_v3", (2, 1, 2), {"expert": 2}),
    pytest.param("olmo3", (1, 8, 1), {"inner": 2}, marks=pytest.mark.one_pass),
    pytest.param("olmo3", (1, 2, 1), {"context": 2, "pipeline": 2}, marks=pytest.mark.one_pass)])
def test_a_mesh_gives_the_updates_of_one_device(family: str, shape: tuple[int, int, int], others: dict[str, int]):
    params, state = updated(config(family), mesh_of(shape, **others))
    one, one_state = on_one_device(family)
    for got, want in zip(jax.tree.leaves((params, state.mu, state.nu)),
                         jax.tree.leaves((one, one_state.mu, one_state.nu)), strict=True):
        assert np.linalg.norm(np.asarray(got) - want) <= 1e-5 * np.linalg.norm(want)
    for got, declared in zip(jax.tree.leaves(params), jax.tree.leaves(state.mu), strict=True):
        assert got.sharding == declared.sharding


def test_a_share_of_the_work_falls_to_each_device_and_no_matrix_to_all():
    """16 matrices of one shape: a device of eight orthogonalises two, and receives no more than those."""
    how, shape = [Matrices((0,), (2,))], (8, 64, 2, 128)

    def compiled(mesh_shape: tuple[int, int, int]) -> Any:
        mesh = mesh_of(mesh_shape)
        sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "fsdp", None, "tensor"))
        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            return jax.jit(lambda x: orthogonalized([x], how, MuonConfig())).lower(x).compile()

    one, eight = compiled((1, 1, 1)), compiled((2, 2, 2))
    least = 5 * (4 * 64 * 64 * 128 + 2 * 64 ** 3) * 16
    assert least <= one.cost_analysis()["flops"] < 1.1 * least
    assert eight.cost_analysis()["flops"] < 1.1 * least / 8
    text = eight.as_text()
    assert "all-to-all" in text
    gathered = [line for line in text.splitlines() if " all-gather(" in line or " all-reduce(" in line]
    assert len(gathered) == 1  # of the results, over `data`
    assert eight.memory_analysis().temp_size_in_bytes < one.memory_analysis().temp_size_in_bytes / 3


def test_matrices_that_do_not_fill_the_devices_are_right_too():
    """Three of them on eight devices, and a matrix of zeros stays zero."""
    x = np.random.default_rng(0).normal(size=(3, 16, 8)).astype(np.float32)
    x[1] = 0
    how = [Matrices((0,), (1,))]
    expected, = orthogonalized([jnp.asarray(x)], how, MuonConfig())
    mesh = mesh_of((2, 2, 2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(None, "tensor", "fsdp")))
        got, = jax.jit(lambda x: orthogonalized([x], how, MuonConfig()))(placed)
        half, = jax.jit(lambda x: orthogonalized([x], how, MuonConfig(dtype="bfloat16")))(placed)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not np.asarray(got)[1].any()
    assert half.dtype == jnp.float32
    assert 1e-4 < np.linalg.norm(half - expected) / np.linalg.norm(expected) < 0.1


def test_singular_values_come_near_one():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 32, 96)).astype(np.float32) * np.array([1e-6, 1e6], np.float32)[:, None, None]
    values = np.linalg.svd(newton_schulz(jnp.asarray(x), 5), compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.one_pass
def test_a_run_resumes_to_the_same_bits(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """With moments in bfloat16, whose rounding is drawn anew at each step."""
    options = ("optim.kind=skip_step_muon", "optim.muon.matrix_lr=0.02", "optim.moments_dtype=bfloat16",
               "eval.every=null", "checkpoint.every=2")
    straight, stopped = (runs.config(name, *options, "train.steps=4") for name in ("straight", "stopped"))
    loop.train(straight, devices=some_devices(1))
    shutil.copytree(straight.run_dir, stopped.run_dir)
    newest, = Path(stopped.run_dir, "checkpoints").glob("*4")
    shutil.rmtree(newest)
    loop.train(stopped, devices=some_devices(1))
    last = lines(stopped)[-1]
    assert last["optim/LR (Muon)"] == pytest.approx(2 * last["optim/LR (group 0)"])
    assert "skip_step_muon: Muon for 45.2% of the weights at peak lr 0.02, AdamW for" in capsys.readouterr().out
    bits = saved_bits(straight, 4)
    assert saved_bits(stopped, 4) == bits
    assert bits["optimizer.mu.segments.0.0.mlp.down"][0] == bits["optimizer.nu.embed"][0] == "bfloat16"
    assert "optimizer.nu.segments.0.0.mlp.down" not in bits
    assert any(np.frombuffer(bits["optimizer.mu.segments.0.0.mlp.down"][2], np.uint16))
