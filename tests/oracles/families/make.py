"""Makes the traces beside it: a tiny model of each family, run by transformers.

    python tests/oracles/families/make.py [NAME ...]

It needs torch and transformers (made with 2.13 and 5.24), and is kept for the record: the tests use what it wrote. The
weights are not stored: they are drawn from the name of each tensor (`draw.py`), gains, biases and sinks included. Names
and shapes are those of the file that transformers writes.

To add a family, add its row to ROWS and run this with its name.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from maxtext.convert import trace  # noqa: E402
from tests.oracles.families.draw import draw, token_ids  # noqa: E402

TINY = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0}
HEADS = {"head_dim": 8}  # 4 heads of 8 are wider than the model
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 4, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = MOE | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                "v_head_dim": 10, "n_routed_experts": 8, "first_k_dense_replace": 1}

# name: (model_type, config). The last layer of several kinds is what a window must not reach.
ROWS = {
    "olmo2": ("olmo2", TINY | {"rope_parameters": PLAIN}),
    "olmo3": ("olmo3", TINY | {"sliding_window": 6, "num_hidden_layers": 4}),
    "llama": ("llama", TINY | {"rope_parameters": PLAIN, "attention_bias": True}),
    "llama3": ("llama", TINY | HEADS | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", TINY | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6}),
    "qwen3": ("qwen3", TINY | HEADS | {"tie_word_embeddings": True}),
    "mistral": ("mistral", TINY | HEADS | {"sliding_window": 6}),
    "gemma3": ("gemma3_text", TINY | HEADS | {
        "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default",
                                                                            "rope_theta": 10000.0}}}),
    "mixtral": ("mixtral", TINY | HEADS | {"num_local_experts": 4, "intermediate_size": 12}),
    "olmoe": ("olmoe", TINY | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 12}),
    "flex_olmo": ("flex_olmo", TINY | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 12,
                                       "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", TINY | HEADS | MOE | {"num_experts": 8, "norm_topk_prob": True,
                                                     "mlp_only_layers": [0]}),
    "deepseek_v2": ("deepseek_v2", TINY | LATENT | {
        "q_lora_rank": None, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
        "n_shared_experts": 2, "routed_scaling_factor": 1.5,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}}),
    "deepseek_v3": ("deepseek_v3", TINY | LATENT | {
        "q_lora_rank": 14, "n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0,
                                                                                      "mscale_all_dim": 1.0}}),
    "gpt_oss": ("gpt_oss", TINY | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12,
                                           "sliding_window": 6, "rope_parameters": YARN | {"truncate": False}}),
}


def make(name: str, folder: Path) -> None:
    kind, keys = ROWS[name]
    config = AutoConfig.for_model(kind, dtype="float32", **keys)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    save_file({key: draw(key, shape, kind) for key, shape in shapes.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    out = Path(__file__).parent / f"{name}.npz"
    trace.save(str(out), trace.record(str(folder), token_ids(name, config.vocab_size)), shapes=shapes)
    print(name, out.stat().st_size, "bytes", json.loads((folder / "config.json").read_text()))


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder))
