"""One conversion table a family: its tensors, and what its config.json says about the architecture.

To add a family, add its tables here. A family differs from another by tables alone: tensor names (`Rule`s), the keys of
its config.json (`Setting`s), the choices of our vocabulary that it stands for, and the defaults that transformers gives
to keys which its config.json leaves out.

Dims: D model width, V vocabulary, F feed-forward width, K key/value heads, G query heads of one, H head width. Mixture
of experts: E experts, X width of one, S width of the shared ones, P the pair of gate and up. Latent attention: Q width
of compressed queries, C of compressed keys and values, N part of a head without positions, R rotary part, W value.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from maxtext.config.architecture import ModelConfig
from maxtext.convert import ConvertError
from maxtext.convert.config_json import (
    NO_WINDOWS,
    WINDOWS_FROM_A_LAYER_ON,
    Family,
    Known,
    Said,
    Setting,
    Unsupported,
    listed_windows,
    needed,
    optional,
    rotary,
    same,
    windows_everywhere,
    words,
)
from maxtext.convert.mapping import Rule

# ---- tensors

_BLOCK = "model.layers.{layer}."
_ATTENTION = _BLOCK + "self_attn."

_ENDS = (
    Rule("model.embed_tokens.weight", "V D", "embed", "V D"),
    Rule("model.norm.weight", "D", "norm", "D"),
    Rule("lm_head.weight", "V D", "head", "D V"),
)
_PROJECTIONS = (
    Rule(_ATTENTION + "q_proj.weight", "(K G H) D", "attention.qkv", "D K :G H"),
    Rule(_ATTENTION + "k_proj.weight", "(K H) D", "attention.qkv", "D K -2 H"),
    Rule(_ATTENTION + "v_proj.weight", "(K H) D", "attention.qkv", "D K -1 H"),
    Rule(_ATTENTION + "o_proj.weight", "D (K G H)", "attention.out", "K G H D"),
    Rule(_ATTENTION + "q_proj.bias", "(K G H)", "attention.qkv_bias", "K :G H"),
    Rule(_ATTENTION + "k_proj.bias", "(K H)", "attention.qkv_bias", "K -2 H"),
    Rule(_ATTENTION + "v_proj.bias", "(K H)", "attention.qkv_bias", "K -1 H"),
    Rule(_ATTENTION + "o_proj.bias", "D", "attention.out_bias", "D"),
)
_LATENT = (
    Rule(_ATTENTION + "q_proj.weight", "(K N+R) D", "attention.q_up", "D K N+R", "no attention.q_down"),
    Rule(_ATTENTION + "kv_a_proj_with_mqa.weight", "C+R D", "attention.kv_down", "D C+R"),
    Rule(_ATTENTION + "kv_a_layernorm.weight", "C", "attention.kv_norm", "C"),
    Rule(_ATTENTION + "kv_b_proj.weight", "(K N+W) C", "attention.kv_up", "C K N+W"),
    Rule(_ATTENTION + "o_proj.weight", "D (K W)", "attention.out", "K W D"),
)
_LATENT_QUERIES = (
    Rule(_ATTENTION + "q_a_proj.weight", "Q D", "attention.q_down", "D Q"),
    Rule(_ATTENTION + "q_a_layernorm.weight", "Q", "attention.q_norm", "Q"),
    Rule(_ATTENTION + "q_b_proj.weight", "(K N+R) Q", "attention.q_up", "Q K N+R", "attention.q_down"),
)
_SINKS = (Rule(_ATTENTION + "sinks", "(K G)", "attention.sinks", "K G"),)
_QK_NORM = (
    Rule(_ATTENTION + "q_norm.weight", "(K G H)", "attention.q_norm", "K G H"),
    Rule(_ATTENTION + "k_norm.weight", "(K H)", "attention.k_norm", "K H"),
)
_HEAD_NORM = (
    Rule(_ATTENTION + "q_norm.weight", "H", "attention.q_norm", "H"),
    Rule(_ATTENTION + "k_norm.weight", "H", "attention.k_norm", "H"),
)
_POST_NORMS = (
    Rule(_BLOCK + "post_attention_layernorm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "post_feedforward_layernorm.weight", "D", "mlp_norm", "D"),
)
_PRE_NORMS = (
    Rule(_BLOCK + "input_layernorm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "post_attention_layernorm.weight", "D", "mlp_norm", "D"),
)
_SANDWICH_NORMS = (
    Rule(_BLOCK + "input_layernorm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "post_attention_layernorm.weight", "D", "attention_post_norm", "D"),
    Rule(_BLOCK + "pre_feedforward_layernorm.weight", "D", "mlp_norm", "D"),
    Rule(_BLOCK + "post_feedforward_layernorm.weight", "D", "mlp_post_norm", "D"),
)
_MLP = (
    Rule(_BLOCK + "mlp.gate_proj.weight", "F D", "mlp.gate_up", "D 0 F"),
    Rule(_BLOCK + "mlp.up_proj.weight", "F D", "mlp.gate_up", "D 1 F"),
    Rule(_BLOCK + "mlp.down_proj.weight", "D F", "mlp.down", "F D"),
)
_ROUTER = (Rule(_BLOCK + "mlp.gate.weight", "E D", "mlp.router", "D E"),)
_EXPERTS = (
    Rule(_BLOCK + "mlp.experts.{expert}.gate_proj.weight", "X D", "mlp.gate_up", "{expert} D 0 X"),
    Rule(_BLOCK + "mlp.experts.{expert}.up_proj.weight", "X D", "mlp.gate_up", "{expert} D 1 X"),
    Rule(_BLOCK + "mlp.experts.{expert}.down_proj.weight", "D X", "mlp.down", "{expert} X D"),
)
_SHARED_EXPERTS = (
    Rule(_BLOCK + "mlp.gate.e_score_correction_bias", "E", "mlp.selection_bias", "E", float32=True),
    Rule(_BLOCK + "mlp.shared_experts.gate_proj.weight", "S D", "mlp.shared.gate_up", "D 0 S"),
    Rule(_BLOCK + "mlp.shared_experts.up_proj.weight", "S D", "mlp.shared.gate_up", "D 1 S"),
    Rule(_BLOCK + "mlp.shared_experts.down_proj.weight", "D S", "mlp.shared.down", "S D"),
)
_MIXTRAL_EXPERTS = (
    Rule(_BLOCK + "block_sparse_moe.gate.weight", "E D", "mlp.router", "D E"),
    Rule(_BLOCK + "block_sparse_moe.experts.{expert}.w1.weight", "X D", "mlp.gate_up", "{expert} D 0 X"),
    Rule(_BLOCK + "block_sparse_moe.experts.{expert}.w3.weight", "X D", "mlp.gate_up", "{expert} D 1 X"),
    Rule(_BLOCK + "block_sparse_moe.experts.{expert}.w2.weight", "D X", "mlp.down", "{expert} X D"),
)
_FUSED_EXPERTS = (  # gate and up alternate
    Rule(_BLOCK + "mlp.router.weight", "E D", "mlp.router", "D E"),
    Rule(_BLOCK + "mlp.router.bias", "E", "mlp.router_bias", "E"),
    Rule(_BLOCK + "mlp.experts.gate_up_proj", "E D (X P)", "mlp.gate_up", "E D P X"),
    Rule(_BLOCK + "mlp.experts.gate_up_proj_bias", "E (X P)", "mlp.gate_up_bias", "E P X"),
    Rule(_BLOCK + "mlp.experts.down_proj", "E X D", "mlp.down", "E X D"),
    Rule(_BLOCK + "mlp.experts.down_proj_bias", "E D", "mlp.down_bias", "E D"),
)

# ---- keys of config.json

_BASE = (
    same("vocab_size", "vocab_size"),
    same("hidden_size", "d_model"),
    same("num_hidden_layers", "n_layers"),
    same("num_attention_heads", "n_heads"),
    optional("num_key_value_heads", "n_kv_heads", lambda model: model.kv_heads),
    same("rms_norm_eps", "norm_eps"),
    same("initializer_range", "init_std"),
    same("tie_word_embeddings", "tie_embeddings"),
)
_HEAD_DIM = optional("head_dim", "head_dim", lambda model: model.head_width)
_UNUSUAL_HEAD_DIM = optional("head_dim", "head_dim", lambda model: (
    None if model.head_width * model.n_heads == model.d_model else model.head_width))
_SILU = words("hidden_act", "activation", {"silu": "silu"})
_BIASES = words("attention_bias", "attention_bias", {False: "none", True: "all"})
_DENSE = (same("intermediate_size", "d_ff"), _SILU)


def _routed(width: str, *names: str) -> tuple[Setting, ...]:
    """Sizes of experts: the key of their width, and the names of the key of their number."""
    return (same(names[0], "moe.experts", also=names[1:], least=1), same("num_experts_per_tok", "moe.top_k"),
            same(width, "moe.d_expert"))


_RENORMALISE = same("norm_topk_prob", "moe.renormalise")
# To stand after moe.dense_layers: a width of dense layers is there when one is dense.
_DENSE_WIDTH = Setting(
    lambda known, said: {"d_ff": needed(known, "intermediate_size") if said.get("moe.dense_layers") else None},
    lambda model: {"intermediate_size": model.d_ff or model.moe.d_expert})


def _read_sparse_step(known: Known, said: Said) -> Said:
    layers, dense = int(needed(known, "num_hidden_layers")), known.get("mlp_only_layers") or []
    routed = [i not in dense and (i + 1) % known["decoder_sparse_step"] == 0 for i in range(layers)]
    if not all(routed[routed.count(False):]):
        raise Unsupported(f"mlp_only_layers {dense} and decoder_sparse_step {known['decoder_sparse_step']} put dense "
                          "layers after routed ones; only the first layers may be dense")
    return {"moe.dense_layers": routed.count(False)}


_SPARSE_STEP = Setting(_read_sparse_step, lambda model: {
    "mlp_only_layers": list(range(model.moe.dense_layers)), "decoder_sparse_step": 1})


def _read_group_method(known: Known, said: Said) -> Said:
    if known["topk_method"] == "greedy":
        return {"moe.groups": 1, "moe.group_top_k": 1}
    if known["topk_method"] != "group_limited_greedy":
        raise Unsupported(f"topk_method is {known['topk_method']!r}; only 'greedy' or 'group_limited_greedy' is "
                          "supported")
    return {"moe.groups": needed(known, "n_group"), "moe.group_top_k": needed(known, "topk_group")}


_GROUP_METHOD = Setting(_read_group_method, lambda model: {
    "topk_method": "greedy" if model.moe.groups == 1 else "group_limited_greedy", "n_group": model.moe.groups,
    "topk_group": model.moe.group_top_k})
_GROUPS = (same("n_group", "moe.groups"), same("topk_group", "moe.group_top_k"))
_QUERY_SCALE = Setting(lambda known, said: {"attention_scale": float(needed(known, "query_pre_attn_scalar")) ** -0.5},
                       lambda model: {"query_pre_attn_scalar": round(
                           model.head_width if model.attention_scale is None else model.attention_scale**-2)})
_DEEPSEEK = (
    *_BASE,
    same("kv_lora_rank", "latent.kv_rank"),
    Setting(lambda known, said: {"latent.q_rank": known.get("q_lora_rank")},
            lambda model: {"q_lora_rank": model.latent.q_rank}),
    same("qk_nope_head_dim", "latent.nope_dim"),
    same("qk_rope_head_dim", "latent.rope_dim"),
    same("v_head_dim", "latent.value_dim"),
    *_routed("moe_intermediate_size", "n_routed_experts"),
    _SILU,
    same("n_shared_experts", "moe.shared_experts", least=1),
    same("first_k_dense_replace", "moe.dense_layers"),
    _DENSE_WIDTH,
    same("routed_scaling_factor", "moe.scale"),
    NO_WINDOWS,
    rotary(on_scores=True),
)

# ---- families

_DEFAULTS = {"initializer_range": 0.02, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
             "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_WRITES = {"attention_dropout": 0.0}
_POST = {"norm_placement": "post", "qk_norm": "projection"}
_LLAMA = {"norm_placement": "pre", "qk_norm": "none"}
_QWEN3 = {"norm_placement": "pre", "qk_norm": "head"}
_SOFTMAX = {"moe.scores": "softmax"}
# The norms inside latent attention have this eps whatever the config says.
_LATENT_ONLY = {"attention_bias": False, "rms_norm_eps": 1e-6, "moe_layer_freq": 1}
_NEXT_TOKENS = r"model\.layers\.{n_layers}\..*"  # a further layer, which predicts the token after the next

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="olmo2",
            architecture="Olmo2ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _MLP + _POST_NORMS,
            settings=(*_BASE, *_DENSE, _UNUSUAL_HEAD_DIM, _BIASES, NO_WINDOWS, rotary()),
            choices=_POST,
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5},
            writes=_WRITES,
        ),
        Family(
            name="olmo3",
            architecture="Olmo3ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _MLP + _POST_NORMS,
            settings=(*_BASE, *_DENSE, _UNUSUAL_HEAD_DIM, _BIASES, listed_windows(4), rotary(by_layer_type=True)),
            choices=_POST,
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
            writes=_WRITES,
        ),
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            rules=_ENDS + _PROJECTIONS + _MLP + _PRE_NORMS,
            settings=(*_BASE, *_DENSE, _HEAD_DIM, _BIASES, NO_WINDOWS, rotary()),
            choices=_LLAMA,
            defaults=_DEFAULTS,
            writes=_WRITES | {"mlp_bias": False, "pretraining_tp": 1},
        ),
        Family(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _MLP + _PRE_NORMS,
            settings=(*_BASE, *_DENSE, _UNUSUAL_HEAD_DIM, WINDOWS_FROM_A_LAYER_ON, rotary()),
            choices=_LLAMA | {"attention_bias": "qkv"},
            defaults=_DEFAULTS | {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
            writes=_WRITES,
        ),
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _HEAD_NORM + _MLP + _PRE_NORMS,
            settings=(*_BASE, *_DENSE, _HEAD_DIM, _BIASES, WINDOWS_FROM_A_LAYER_ON, rotary()),
            choices=_QWEN3,
            defaults=_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096,
                                  "max_window_layers": 28},
            writes=_WRITES,
        ),
        Family(
            name="mistral",
            architecture="MistralForCausalLM",
            rules=_ENDS + _PROJECTIONS + _MLP + _PRE_NORMS,
            settings=(*_BASE, *_DENSE, _HEAD_DIM, windows_everywhere(), rotary()),
            choices=_LLAMA,
            defaults=_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
            only={"attention_bias": False, "layer_types": None},
            writes=_WRITES,
        ),
        Family(
            name="gemma3_text",
            architecture="Gemma3ForCausalLM",
            rules=_ENDS + _PROJECTIONS + _HEAD_NORM + _MLP + _SANDWICH_NORMS,
            settings=(*_BASE, same("intermediate_size", "d_ff"), _HEAD_DIM, _BIASES, _QUERY_SCALE,
                      words("hidden_activation", "activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
                      listed_windows(6), rotary(by_layer_type=True)),
            choices={"norm_placement": "both", "norm_gain": "one_plus_weight", "qk_norm": "head",
                     "scale_embeddings": True},
            defaults=_DEFAULTS | {"num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                                  "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6,
                                  "rope_local_base_freq": 10000.0, "tie_word_embeddings": True},
            writes=_WRITES,
        ),
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            rules=_ENDS + _PROJECTIONS + _MIXTRAL_EXPERTS + _PRE_NORMS,
            settings=(*_BASE, *_routed("intermediate_size", "num_local_experts"), _SILU, _HEAD_DIM,
                      windows_everywhere(), rotary()),
            choices=_LLAMA | _SOFTMAX | {"moe.renormalise": True},
            defaults=_DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                                  "num_experts_per_tok": 2, "num_local_experts": 8},
            only={"attention_bias": False},
            writes=_WRITES,
        ),
        Family(
            name="olmoe",
            architecture="OlmoeForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _ROUTER + _EXPERTS + _PRE_NORMS,
            settings=(*_BASE, *_routed("intermediate_size", "num_experts", "num_local_experts"), _SILU, _RENORMALISE,
                      _BIASES, NO_WINDOWS, rotary()),
            choices={"norm_placement": "pre", "qk_norm": "projection"} | _SOFTMAX,
            defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64,
                                  "norm_topk_prob": False},
            only={"sliding_window": None},
            writes=_WRITES,
        ),
        Family(
            name="flex_olmo",
            architecture="FlexOlmoForCausalLM",
            rules=_ENDS + _PROJECTIONS + _QK_NORM + _ROUTER + _EXPERTS + _POST_NORMS,
            settings=(*_BASE, *_routed("intermediate_size", "num_experts", "num_local_experts"), _SILU, _RENORMALISE,
                      _BIASES, NO_WINDOWS, rotary()),
            choices=_POST | _SOFTMAX,
            defaults=_DEFAULTS | {"rope_theta": 500000.0, "num_experts_per_tok": 5, "num_experts": 7,
                                  "norm_topk_prob": False},
            writes=_WRITES,
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            rules=_ENDS + _PROJECTIONS + _HEAD_NORM + _MLP + _ROUTER + _EXPERTS + _PRE_NORMS,
            settings=(*_BASE, *_routed("moe_intermediate_size", "num_experts", "num_local_experts"), _SILU,
                      _RENORMALISE, _SPARSE_STEP, _DENSE_WIDTH, _HEAD_DIM, _BIASES,
                      windows_everywhere("use_sliding_window"), rotary()),
            choices=_QWEN3 | _SOFTMAX,
            defaults=_DEFAULTS | {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1,
                                  "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
                                  "norm_topk_prob": False, "intermediate_size": 6144},
            writes=_WRITES,
        ),
        Family(
            name="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            rules=_ENDS + _LATENT + _LATENT_QUERIES + _MLP + _ROUTER + _EXPERTS + _SHARED_EXPERTS + _PRE_NORMS,
            settings=(*_DEEPSEEK, _GROUP_METHOD),
            choices=_LLAMA | _SOFTMAX | {"moe.renormalise": False, "moe.group_score": "max",
                                         "rope_pairs": "neighbours"},
            defaults=_DEFAULTS | {"first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": 1,
                                  "topk_group": 1, "topk_method": "greedy", "n_routed_experts": 64,
                                  "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                                  "v_head_dim": 128, "routed_scaling_factor": 1.0, "moe_intermediate_size": 1407},
            only=_LATENT_ONLY | {"scoring_func": "softmax", "norm_topk_prob": False},
            writes=_WRITES | {"attention_bias": False, "norm_topk_prob": False, "mlp_bias": False},
        ),
        Family(
            name="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            rules=_ENDS + _LATENT + _LATENT_QUERIES + _MLP + _ROUTER + _EXPERTS + _SHARED_EXPERTS + _PRE_NORMS,
            settings=(*_DEEPSEEK, _RENORMALISE, *_GROUPS,
                      words("rope_interleave", "rope_pairs", {True: "neighbours", False: "halves"})),
            choices=_LLAMA | {"moe.scores": "sigmoid", "moe.selection_bias": True, "moe.group_score": "top2_sum"},
            defaults=_DEFAULTS | {"first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": 8,
                                  "topk_group": 4, "num_experts_per_tok": 8, "n_routed_experts": 256,
                                  "n_shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                                  "v_head_dim": 128, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048,
                                  "norm_topk_prob": True, "rope_interleave": True},
            only=_LATENT_ONLY | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            writes=_WRITES | {"attention_bias": False, "num_nextn_predict_layers": 0},
            ignored=(*Family.ignored, _NEXT_TOKENS),
        ),
        Family(
            name="gpt_oss",
            architecture="GptOssForCausalLM",
            rules=_ENDS + _PROJECTIONS + _SINKS + _FUSED_EXPERTS + _PRE_NORMS,
            settings=(*_BASE, *_routed("intermediate_size", "num_local_experts"), _HEAD_DIM, _BIASES,
                      listed_windows(2), rotary()),
            choices=_LLAMA | _SOFTMAX | {"moe.renormalise": True, "moe.router_bias": True, "moe.expert_bias": True,
                                         "attention_sinks": True, "activation": "clamped_swish"},
            defaults=_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                                  "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
                                  "num_experts_per_tok": 4, "num_local_experts": 128, "rope_scaling": {
                                      "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                      "truncate": False, "original_max_position_embeddings": 4096}},
            only={"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            writes=_WRITES | {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        ),
    )
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names. Raises ConvertError when it is none of ours."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(str(name), FAMILIES, 1)
        hint = f"; did it mean {near[0]}?" if near else "."
        raise ConvertError(f"{where}: model_type {name!r} has no conversion table{hint} Tables exist for "
                           f"{', '.join(FAMILIES)} (maxtext/convert/families.py)")
    return FAMILIES[name]


def family_for(model: ModelConfig, preferred: str | None = None) -> Family:
    """A family that stands for a model, the preferred one first. Raises ConvertError when there is none."""
    order = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)
    faults = {family.name: family.cannot_hold(model) for family in order}
    for family in order:
        if not faults[family.name]:
            return family
    raise ConvertError("no family of transformers stands for this model:\n" + "\n".join(
        f"  {name}: {'; '.join(why)}" for name, why in faults.items()))
