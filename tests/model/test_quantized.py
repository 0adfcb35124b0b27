"""Which matmuls of a model run in eight bits, and what training with them comes to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config.architecture import LatentConfig, MoeConfig
from maxtext.config.schema import QuantConfig, RematConfig
from maxtext.config.validate import problems
from maxtext.data.batch import Batch
from maxtext.model.decoder import init_decoder
from maxtext.model.loss import mean_loss
from maxtext.train.state import init_state
from maxtext.train.step import compile_train_step
from maxtext.train.summary import run_rows
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

pytestmark = pytest.mark.one_pass

LATENT = LatentConfig(kv_rank=32, q_rank=32, nope_dim=32, rope_dim=32, value_dim=32)
MOE = MoeConfig(experts=4, top_k=2, d_expert=64, shared_experts=1, dense_layers=1)
GAP = 0.02  # nats, between the mean losses of the last 5 of 30 steps in eight bits and in float32


def config_of(quant, **model):
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 64, "window": 12}
    cfg = tiny_config(tiny_model(**sizes | model), steps=30, remat=RematConfig("none"))
    return dataclasses.replace(cfg, quant=quant, data=dataclasses.replace(cfg.data, sequence_length=32),
                               optim=dataclasses.replace(cfg.optim, lr=2e-3))


def eight_bit_dots(jaxpr):
    """How many matmuls of a traced program sum int8 in int32; those of loops and of functions called count once."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found += eqn.params["preferred_element_type"] == jnp.int32
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += eight_bit_dots(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize(("parts", "model", "count"), [
    (("dense", "experts"), {}, 2 * 5),  # of each layer: queries, keys and values; output; gate; up; down
    (("dense",), {"moe": MOE}, 2 * 2 + 2 * 3),  # attention of both; the dense layer, and what all tokens share
    (("experts",), {"moe": MOE}, 2),
    (("dense", "experts"), {"latent": LATENT, "qk_norm": "none", "n_kv_heads": None, "head_dim": None}, 2 * 8),
])
def test_which_matmuls_run_in_eight_bits(parts, model, count):
    """Each forward and in both its gradients; the head, routers and scores are not among them."""
    cfg = config_of(QuantConfig("int8", parts), **model)
    mesh = mesh_of((1, 1, 1))
    batch = place(random_batch(cfg), mesh)

    def loss(p):
        return mean_loss(p, batch.tokens_BT, batch.targets_BT, batch.weights_BT, jnp.float32(1), cfg)[0]

    with jax.set_mesh(mesh):
        p = jax.eval_shape(functools.partial(init_decoder, cfg.model), jax.random.key(0))
        assert eight_bit_dots(jax.make_jaxpr(loss)(p).jaxpr) == count
        assert eight_bit_dots(jax.make_jaxpr(jax.grad(loss))(p).jaxpr) == 3 * count


def batches(cfg, count):
    """Text of a random grammar: two ids may follow each, one of them three times as often."""
    rng = np.random.default_rng(0)
    follows = rng.integers(0, cfg.model.vocab_size, (cfg.model.vocab_size, 2))
    for _ in range(count):
        ids = [rng.integers(0, cfg.model.vocab_size, cfg.train.global_batch)]
        for _ in range(cfg.data.sequence_length):
            ids.append(follows[ids[-1], (rng.random(len(ids[-1])) < 0.25).astype(int)])
        tokens = np.stack(ids, 1).astype(np.int32)
        yield Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.ones_like(tokens[:, 1:], np.float32))


@functools.cache
def losses(quant):
    """Of a routed layer with a shared expert, on two devices that share its widths."""
    cfg = config_of(quant, n_layers=1, layer_pattern=("full",), window=None, d_ff=None,
                    moe=dataclasses.replace(MOE, dense_layers=0))
    mesh = mesh_of((1, 1, 2))
    assert [key for key, _ in problems(cfg)] == ["data.sources"]  # there are none, but the rest is valid
    with jax.set_mesh(mesh):
        state, step, found = init_state(cfg), compile_train_step(cfg), []
        for batch in batches(cfg, cfg.train.steps):
            state, metrics = step(state, place(batch, mesh))
            found.append(float(metrics["cross_entropy"]))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    return np.array(found)


@pytest.mark.parametrize("kind", ["int8", "fp8", "mxfp8"])
def test_training_in_eight_bits_follows_training_without(kind):
    whole, quantised = losses(QuantConfig()), losses(QuantConfig(kind))
    assert whole[-5:].mean() < whole[0] - 1.5
    assert abs(quantised[0] - whole[0]) < 0.01
    assert abs(quantised[-5:].mean() - whole[-5:].mean()) < GAP
    assert not np.array_equal(quantised, whole)


def test_the_start_summary_says_what_is_quantised():
    def row(quant, **model):
        return dict(run_rows(config_of(quant, **model)))["quantised"]

    rest = "; embeddings, norms, routers, scores, head not"
    assert row(QuantConfig()) == "nothing"
    assert row(QuantConfig("fp8")) == f"dense matmuls in fp8{rest}"
    assert row(QuantConfig("mxfp8", stochastic_rounding=True), moe=MOE) == (
        f"dense and experts matmuls in mxfp8, gradients rounded at random{rest}")
    assert row(QuantConfig("int8", ("experts",), weight_gradients=False), moe=MOE) == (
        f"experts matmuls in int8, gradients of weights in float32{rest}")
