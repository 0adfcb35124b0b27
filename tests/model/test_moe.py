"""The routed layer against all experts on all tokens, in loss and gradients, on one device and over meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.architecture import ModelConfig, MoeConfig
from maxtext.config.schema import Execution, KernelConfig
from maxtext.kernels.choice import KernelError
from maxtext.model.layers import activate
from maxtext.model.moe import moe, moe_params
from maxtext.parallel.sharding import is_param, sharding
from tests.tiny import mesh_of

WIDTH, SEQUENCES, LENGTH = 16, 8, 6
# data, fsdp, tensor; expert
MESHES = [((1, 1, 1), 1), ((1, 1, 1), 8), ((1, 2, 1), 4), ((2, 1, 2), 2)]
SMALL = MoeConfig(experts=8, top_k=3, d_expert=12, router_bias=True, expert_bias=True, selection_bias=True,
                  shared_experts=1, load_balance_loss=0.1)
REAL = np.arange(LENGTH)[None] < np.arange(SEQUENCES)[:, None]  # sequences of 0 to 6 real tokens
# Experts that the selection bias favours, and whether there is padding.
LOADS = {
    "even": ({}, False),
    "padding": ({}, True),
    "two experts of one device in every token": ({6: 9.0, 7: 8.0}, False),
    "one expert in every token, others empty": ({3: 9.0, 0: -9.0, 1: -9.0, 7: -9.0}, True),
}


def model(moe_config=SMALL, **changes):
    return ModelConfig(vocab_size=8, d_model=WIDTH, n_layers=1, n_heads=2, moe=moe_config, **changes)


@functools.cache
def arguments(cfg, sequences=SEQUENCES, length=LENGTH):
    """Weights, tokens, and what the output is multiplied by, so that gradients of tokens differ."""
    rng = np.random.default_rng(0)
    p = jax.tree.map(lambda q: 0.3 * rng.standard_normal(q.shape, dtype=np.float32), moe_params(cfg), is_leaf=is_param)
    return p, *rng.standard_normal((2, sequences, length, WIDTH), dtype=np.float32)


def favour(p, biases):
    bias = np.zeros_like(p.selection_bias)
    for expert, value in biases.items():
        bias[expert] = value
    return p.replace(selection_bias=bias)


def all_experts(p, x_BTD, c_BTD, real_BT, cfg):
    """Every expert on every token; the weights of those not chosen are 0."""
    x, real = x_BTD.reshape(-1, WIDTH), real_BT.reshape(-1, 1)
    logits = x @ p.router + (0 if p.router_bias is None else p.router_bias)
    scores = jax.nn.softmax(logits)
    ids = jnp.argsort(-(scores + p.selection_bias), axis=-1, stable=True)[:, : cfg.moe.top_k]
    ids = jnp.where(real, ids, cfg.moe.experts)
    gate_up = jnp.einsum("nd,edif->enif", x, p.gate_up)
    gate_up += 0 if p.gate_up_bias is None else p.gate_up_bias[:, None]
    out = jnp.einsum("enf,efd->end", activate(gate_up[:, :, 0], gate_up[:, :, 1], cfg.activation), p.down)
    out += 0 if p.down_bias is None else p.down_bias[:, None]
    weights = jnp.where((ids[..., None] == jnp.arange(cfg.moe.experts)).any(1), scores, 0)
    out = jnp.einsum("ne,end->nd", weights, out)
    if p.shared is not None:
        gate, up = x @ p.shared.gate_up[:, 0], x @ p.shared.gate_up[:, 1]
        out += activate(gate, up, cfg.activation) @ p.shared.down
    counts = (ids[..., None] == jnp.arange(cfg.moe.experts)).sum((0, 1))
    balance = cfg.moe.experts / cfg.moe.top_k * (counts * (scores * real).sum(0)).sum() / real.sum()
    z = (jax.nn.logsumexp(logits, -1, keepdims=True) ** 2 * real).sum()
    return (c_BTD * out.reshape(x_BTD.shape)).sum() + 0.1 * balance + 0.01 * z, out.reshape(x_BTD.shape)


@functools.cache
def exact(cfg):
    def run(*args):
        with jax.enable_x64(True):
            double = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, args)
            return jax.tree.map(np.asarray, dense(*double))

    dense = jax.jit(jax.value_and_grad(functools.partial(all_experts, cfg=cfg), argnums=(0, 1), has_aux=True))
    return run


def placed(cfg, mesh, p, *tokens):
    dims = jax.tree.map(lambda param: sharding(mesh, *param.dims), moe_params(cfg), is_leaf=is_param)
    each = [jax.device_put(array, sharding(mesh, "batch", *[None] * (array.ndim - 1))) for array in tokens]
    return jax.device_put(p, dims), *each


@functools.cache
def on_mesh(cfg, shape, expert):
    """One program for all loads."""
    mesh = mesh_of(shape, expert)

    def loss(p, x_BTD, c_BTD, real_BT):
        out_BTD, stats = moe(p, x_BTD, cfg, real_BT)
        return (c_BTD * out_BTD).sum() + 0.1 * stats.load_balance + 0.01 * stats.z_loss, out_BTD

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def run(*args):
        with jax.set_mesh(mesh):
            return jax.tree.map(np.asarray, compiled(*placed(cfg, mesh, *args)))

    return run


def check(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("shape", "expert"), MESHES)
def test_loss_and_gradients_are_those_of_all_experts(shape, expert, load):
    cfg, (favoured, padded) = model(), LOADS[load]
    p, x, c = arguments(cfg)
    p, real = favour(p, favoured), REAL if padded else np.ones_like(REAL)
    (loss, out), grads = on_mesh(cfg, shape, expert)(p, x, c, real)
    check(((loss, out), grads), exact(cfg)(p, x, c, real))
    assert (grads[0].selection_bias == 0).all()


@pytest.mark.parametrize(("experts", "top_k", "favoured", "expert"), [
    pytest.param(64, 4, {}, 1, id="3 tokens on 64 experts"),
    pytest.param(64, 4, {}, 8, id="3 tokens on 64 experts of 8 devices"),
    pytest.param(8, 1, {5: 9.0}, 1, id="all tokens on one expert"),
])
def test_few_tokens(experts, top_k, favoured, expert):
    cfg = model(MoeConfig(experts=experts, top_k=top_k, d_expert=4, selection_bias=True))
    real = np.ones((3, 1), bool) if expert == 1 else np.arange(8)[:, None] < 3
    p, x, c = arguments(cfg, *real.shape)
    p = favour(p, favoured)
    check(on_mesh(cfg, (1, 1, 1), expert)(p, x, c, real), exact(cfg)(p, x, c, real))


def forward(cfg, p, x, real):
    mesh = mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        return jax.jit(lambda *args: moe(args[0], args[1], cfg, args[2]))(*placed(cfg, mesh, p, x, real))


def test_padding_gives_nothing_and_counts_nowhere():
    """Nor does what stands in it matter."""
    cfg = model(dataclasses.replace(SMALL, shared_experts=0))
    p, x, _ = arguments(cfg)
    out, stats = forward(cfg, p, x, REAL)
    assert (np.asarray(out)[~REAL] == 0).all()
    check(forward(cfg, p, np.where(REAL[..., None], x, 7.0), REAL), (out, stats))
    assert stats.tokens == REAL.sum()
    assert stats.counts_E.sum() == REAL.sum() * cfg.moe.top_k


def test_what_is_beyond_capacity_gives_nothing():
    cfg = model(MoeConfig(experts=8, top_k=2, d_expert=12, selection_bias=True, capacity_factor=1.0))
    p, x, c = arguments(cfg)
    p, tokens = favour(p, {2: 9.0, 4: 8.0}), REAL.size
    out, stats = forward(cfg, p, x, np.ones_like(REAL))
    room = tokens * 2 // 8
    (_, expected), _ = exact(cfg)(p, x, c, np.arange(tokens).reshape(REAL.shape) < room)
    check(out, expected)
    assert stats.dropped == 2 * (tokens - room)
    np.testing.assert_array_equal(stats.counts_E, tokens * np.isin(np.arange(8), (2, 4)))


def test_a_token_is_sent_once_and_idle_rounds_are_skipped():
    """Messages hold tokens, not assignments: their size does not depend on top_k. All lie inside a condition."""
    cfg = model(MoeConfig(experts=16, top_k=8, d_expert=4))
    p, x, _ = arguments(cfg)
    mesh = mesh_of((1, 1, 1), expert=8)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(lambda p, x: moe(p, x, cfg)[0])(*placed(cfg, mesh, p, x))
    sent = [(eqn.invars[0].aval.shape, inside) for eqn, inside in equations(jaxpr.jaxpr)
            if eqn.primitive.name == "all_to_all"]
    message = 2  # of 6 tokens to 8 devices with 1.5 times the room
    assert [shape for shape, _ in sent if shape[-1] == WIDTH] == [(8, message, WIDTH)] * 2  # there and back
    assert all("cond" in inside for _, inside in sent)


def test_the_experts_are_multiplied_by_the_kernel_that_the_config_names():
    cfg = model(MoeConfig(experts=4, top_k=2, d_expert=4))
    p, x, _ = arguments(cfg)
    mesh = mesh_of((1, 1, 1))

    def primitives(kernel):
        how = Execution(kernels=KernelConfig(grouped_matmul=kernel))
        with jax.set_mesh(mesh):
            jaxpr = jax.make_jaxpr(lambda p, x: moe(p, x, cfg, how=how)[0])(*placed(cfg, mesh, p, x))
        return {eqn.primitive.name for eqn, _ in equations(jaxpr.jaxpr)}

    assert "ragged_dot_general" in primitives("ragged_dot")
    assert "ragged_dot_general" not in primitives("auto")
    with pytest.raises(KernelError, match=r"kernels\.grouped_matmul=megablox: it runs on TPUs, and this is cpu"):
        primitives("megablox")


def equations(jaxpr, inside=()):
    """(equation, names of the primitives that it lies in), of a program and all its parts."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            part = getattr(value, "jaxpr", value)
            if hasattr(part, "eqns"):
                yield from equations(part, (*inside, eqn.primitive.name))


@pytest.mark.parametrize(("name", "shape"), [("gate_up", (144, 24)), ("mlp_out", (8, 6, 16))])
def test_rematerialisation_keeps_what_is_named(name, shape):
    cfg = model(dataclasses.replace(SMALL, shared_experts=0))
    p, x, _ = arguments(cfg)

    def kept(*names):
        policy, mesh = jax.checkpoint_policies.save_only_these_names(*names), mesh_of((1, 1, 1))
        layer = jax.checkpoint(lambda p, x: jnp.sin(moe(p, x, cfg)[0]), policy=policy)
        with jax.set_mesh(mesh):
            pull = jax.eval_shape(lambda p, x: jax.vjp(layer, p, x)[1], *placed(cfg, mesh, p, x))
        return [leaf.shape for leaf in jax.tree.leaves(pull)].count(shape)

    assert kept(name) == kept() + 1


@pytest.mark.parametrize(("kind", "expected"), [
    ("silu", lambda g, u: g / (1 + np.exp(-g)) * u),
    ("gelu_tanh", lambda g, u: g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u),
    ("clamped_swish", lambda g, u: (c := np.minimum(g, 7)) / (1 + np.exp(-1.702 * c)) * (1 + np.clip(u, -7, 7))),
])
def test_activations(kind, expected):
    gate, up = (4 * np.random.default_rng(0).standard_normal((2, 100))).astype(np.float32)
    assert abs(gate).max() > 7 < abs(up).max()
    np.testing.assert_allclose(activate(gate, up, kind), expected(gate, up), rtol=1e-5, atol=1e-6)
