"""Makes the folders beside it: tiny random models of transformers, and what transformers computes with them.

It needs torch and transformers (made with 2.13 and 5.24), and is kept for the record: the tests use what it wrote. The
weights are all drawn anew, norm gains included, because a gain of 1 hides a norm that was forgotten or misplaced.

    python make_fixtures.py OUT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Olmo3Config

YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 32, "beta_slow": 1}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
KINDS = ["sliding_attention"] * 3 + ["full_attention"] * 2
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
         "dtype": "float32"}
MIDDLE = SIZES | {"hidden_size": 48, "intermediate_size": 96}
SMALL = SIZES | {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}

# name: (config, tokens in a row). olmo3_gqa: two key/value heads, and rows much longer than the window.
MODELS = {
    "olmo2": (Olmo2Config(**SIZES, num_hidden_layers=3, num_key_value_heads=2, rope_parameters=dict(PLAIN)), 40),
    "olmo3": (Olmo3Config(**SIZES, num_hidden_layers=5, layer_types=KINDS, sliding_window=8,
                          rope_parameters={"full_attention": dict(PLAIN), "sliding_attention": dict(PLAIN)}), 40),
    "olmo3_yarn": (Olmo3Config(**MIDDLE, num_hidden_layers=5, layer_types=KINDS, sliding_window=8,
                               rope_parameters={"full_attention": dict(YARN), "sliding_attention": dict(PLAIN)}), 40),
    "olmo3_gqa": (Olmo3Config(**SMALL, num_hidden_layers=5, layer_types=KINDS, sliding_window=16,
                              rope_parameters={"full_attention": dict(PLAIN), "sliding_attention": dict(PLAIN)}), 200),
    "llama_tied": (LlamaConfig(**SMALL, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True,
                               rope_parameters={"rope_type": "default", "rope_theta": 100000.0}), 40),
}
IN_PARTS = {"olmo3": True, "olmo3_yarn": False}  # two weight files, with an index or without


def main(out: Path) -> None:
    for seed, (name, (config, length)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                gain = parameter.ndim == 1
                parameter.copy_(torch.rand_like(parameter) + 0.5 if gain else 0.08 * torch.randn_like(parameter))
        model.save_pretrained(out / name)
        (out / name / "generation_config.json").unlink(missing_ok=True)
        if name in IN_PARTS:
            split(out / name, IN_PARTS[name])
        if name == "llama_tied":  # the older format; embedding and head are one storage, and saved under both names
            torch.save(model.state_dict(), out / name / "pytorch_model.bin")
        ids = torch.randint(0, config.vocab_size, (2 if length < 100 else 1, length))
        with torch.no_grad():
            result = model(ids, output_hidden_states=True, use_cache=False)
        np.savez_compressed(out / name / "expected.npz", input_ids=ids.numpy().astype(np.int32),
                            logits=result.logits.numpy(), hidden_states=torch.stack(result.hidden_states).numpy())


def split(folder: Path, index: bool) -> None:
    """Two files as transformers writes them for a large model."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
