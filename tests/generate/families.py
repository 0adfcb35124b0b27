"""Tiny models of the shapes in which caches differ, with weights that no default leaves at zero."""

from __future__ import annotations

import zlib

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.config.architecture import LatentConfig, ModelConfig, MoeConfig, RopeScalingConfig
from maxtext.model.decoder import Decoder, abstract_decoder, leaf_names
from tests.tiny import tiny_model

WINDOW = 4
MIXED = {"layer_pattern": ("window", "full"), "window": WINDOW, "n_layers": 4}

FAMILIES: dict[str, ModelConfig] = {
    "olmo3": tiny_model(**MIXED),
    "gemma3": tiny_model(**MIXED | {"n_layers": 3, "layer_pattern": ("window", "window", "full")},
                         norm_placement="both", norm_gain="one_plus_weight", qk_norm="head", activation="gelu_tanh",
                         window_rope_theta=100.0, scale_embeddings=True, tie_embeddings=True, attention_scale=0.3,
                         rope_scaling=RopeScalingConfig("linear", factor=4.0)),
    "deepseek_v3": tiny_model(
        n_layers=3, layer_pattern=("full",), window=None, qk_norm="none", norm_placement="pre", n_kv_heads=None,
        head_dim=None, rope_pairs="neighbours",
        latent=LatentConfig(kv_rank=12, q_rank=10, nope_dim=6, rope_dim=4, value_dim=5),
        rope_scaling=RopeScalingConfig("yarn", factor=4.0, original_length=8, mscale_all_dim=1.0),
        moe=MoeConfig(experts=8, top_k=2, d_expert=8, shared_experts=1, dense_layers=1, scores="sigmoid", groups=4,
                      group_top_k=2, selection_bias=True, renormalise=True, scale=2.0)),
    "gpt_oss": tiny_model(**MIXED | {"n_layers": 2}, d_ff=None, qk_norm="none", norm_placement="pre",
                          attention_bias="all", attention_sinks=True, activation="clamped_swish",
                          moe=MoeConfig(experts=4, top_k=2, d_expert=16, renormalise=True, router_bias=True,
                                        expert_bias=True, capacity_factor=0.5)),
}


def random_weights(model: ModelConfig, mesh: Mesh) -> Decoder:
    """Normal weights around 1 for norms and 0 for all else, biases and sinks included; the same on every mesh."""
    want = abstract_decoder(model, mesh)

    def draw(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        drawn = rng.normal(0.9 if name.endswith("norm") else 0.0, 0.25, leaf.shape).astype(np.float32)
        return jax.device_put(drawn, leaf.sharding)

    return jax.tree.map(draw, leaf_names(want), want)
