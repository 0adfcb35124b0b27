"""Parameter and FLOP counts against OLMo-core's own (oracles/model_sizes.json), and the memory estimate."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from maxtext.config.architecture import LatentConfig, MoeConfig
from maxtext.config.load import load
from maxtext.config.schema import ModelConfig, RematConfig
from maxtext.model.cost import (
    count_non_embedding,
    count_params,
    flops_per_token,
    memory_per_device,
    peak_flops,
    state_bytes,
)
from maxtext.train.state import abstract_state
from tests.tiny import mesh_of, tiny_config, tiny_model

SIZES = json.loads((Path(__file__).parents[1] / "oracles" / "model_sizes.json").read_text())


@pytest.mark.parametrize("name", SIZES)
def test_equals_the_reference(name):
    size = SIZES[name]
    model = ModelConfig(vocab_size=100352, d_model=size["d_model"], n_layers=size["n_layers"], n_heads=size["n_heads"],
                        n_kv_heads=size["n_kv_heads"], d_ff=size["ffn"], window=4096,
                        layer_pattern=("window", "window", "window", "full"))
    assert list(model.layer_windows) == [4096 if kind == "w" else None for kind in size["layers"]]
    assert count_params(model) == size["params"]
    assert count_non_embedding(model) == size["non_embedding"]
    for length, flops in size["flops_per_token"].items():
        assert flops_per_token(model, int(length)) == flops


def test_sixteen_heads_cost_what_thirty_two_cost():
    """The 16 x 256 option: parameters and FLOPs of the published 32 x 128, with heads twice as wide."""
    usual, wide = load("olmo3_7b").model, load("olmo3_7b_heads16").model
    assert (wide.n_heads, wide.head_width) == (16, 256)
    assert count_params(wide) == count_params(usual) == 7_298_617_344
    assert flops_per_token(wide, 8192) == flops_per_token(usual, 8192) == 46_558_863_360


LATENT = tiny_model(d_ff=48, n_kv_heads=None, head_dim=None, qk_norm="none", latent=LatentConfig(kv_rank=16),
                    moe=MoeConfig(experts=4, top_k=2, d_expert=16, shared_experts=1, dense_layers=1, router_bias=True,
                                  expert_bias=True))


MUON = {"kind": "muon", "moments_dtype": "bfloat16"}


@pytest.mark.parametrize(("model", "shape", "expert", "optim"), [
    (tiny_model(), (1, 1, 1), 1, {}), (tiny_model(), (1, 8, 1), 1, MUON), (tiny_model(), (2, 2, 2), 1, {}),
    (tiny_model(), (1, 2, 4), 1, {}), (LATENT, (1, 2, 2), 2, {}), (LATENT, (1, 1, 1), 4, MUON)])
def test_state_bytes_are_those_of_the_state(model, shape, expert, optim):
    cfg, mesh = tiny_config(model), mesh_of(shape, expert)
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **optim))
    state = abstract_state(cfg, mesh)

    def bytes_of(tree):
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    memory = memory_per_device(cfg, dict(mesh.shape))
    assert memory.weights == bytes_of(state.params)
    assert memory.moments == bytes_of((state.optimizer.mu, state.optimizer.nu))
    weights = state.params, state.optimizer.mu, state.optimizer.nu
    assert state_bytes(cfg) == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))


def test_remat_orders_activation_memory():
    def activations(**remat):
        cfg = tiny_config(remat=RematConfig(**remat))
        return memory_per_device(cfg, {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}).activations

    assert activations(mode="full") < activations(mode="names", save=("qkv",)) < activations(mode="none")


def test_half_the_width_and_half_the_batch_halve_activations():
    one = memory_per_device(tiny_config(), {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    two = memory_per_device(tiny_config(), {"data": 2, "fsdp": 1, "expert": 1, "tensor": 1})
    assert two.activations * 2 == one.activations
    bf16 = memory_per_device(tiny_config(compute_dtype="bfloat16"), {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    assert bf16.activations * 2 == one.activations


def test_experts_of_a_token_take_memory_and_the_others_none_but_weights():
    mesh = {"data": 1, "fsdp": 1, "expert": 2, "tensor": 1}

    def memory(**moe):
        moe = MoeConfig(**({"experts": 4, "top_k": 2, "d_expert": 24} | moe))
        return memory_per_device(tiny_config(tiny_model(d_ff=None, moe=moe), remat=RematConfig(mode="none")), mesh)

    usual, tokens, width = memory(), 8 * 16 // 2, 4
    # A third expert a token: its input and output, gate, up, and their product, in each of 5 layers and once more.
    assert memory(top_k=3).activations - usual.activations == 6 * tokens * width * (2 * 32 + 3 * 24)
    more = memory(experts=8)  # two more on each of two devices, and four scores a token
    assert more.activations - usual.activations == 6 * tokens * width * 4
    assert more.weights - usual.weights == 5 * 4 * (2 * 3 * 32 * 24 + 32 * 4 // 2)


def test_an_unknown_device_has_no_peak():
    assert peak_flops("cpu") is None
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert peak_flops("TPU v5 lite") == 197e12
