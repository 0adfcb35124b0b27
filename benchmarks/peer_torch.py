"""Speed of the tiny OLMo 3 on torch, in transformers or in OLMo-core, as one JSON line, to run beside train_step.py.

It needs an environment with torch and transformers, or with torch and ai2-olmo-core:

    PEER/bin/python benchmarks/peer_torch.py --vocab 8192 --steps 20 [--olmo-core] [--eager]

The model has the sizes of train_step.yml. A step is the model's own forward pass with its own loss, backward,
clipping and torch's fused AdamW; by default all but the optimizer goes through torch.compile. OLMo-core's model has its
attention by torch, as its other kernels need a GPU, and its z-loss; it compiles each block by itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from train_step import process_start  # of the file beside this one

if TYPE_CHECKING:
    import torch

    Built = tuple[torch.nn.Module, Callable[[], torch.Tensor], str]

BATCH, SEQUENCE = 4, 512


def main() -> None:
    started = process_start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--olmo-core", action="store_true", help="OLMo-core's model instead of that of transformers")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    import torch

    torch.manual_seed(0)
    ids = torch.randint(0, args.vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    model, compute_loss, name = (olmo_core if args.olmo_core else transformers)(args.vocab, ids, not args.eager)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        loss = compute_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    first_step = time.time() - started
    step()
    seconds, cpu = [], []
    for _ in range(args.steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    tokens = BATCH * SEQUENCE
    print(json.dumps({
        "trainer": f"{name}, {'eager' if args.eager else 'torch.compile'}",
        "torch": torch.__version__,
        name.partition(" ")[0]: name.partition(" ")[2],
        "vocab": args.vocab,
        "tokens/s": round(tokens / statistics.median(seconds)),
        "tokens/s, best step": round(tokens / min(seconds)),
        "tokens/CPU-second": round(tokens / statistics.mean(cpu)),
        "process start to first step done (s)": round(first_step, 1),
        "peak memory (GiB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "loss": round(loss, 4),
    }))


def transformers(vocab: int, ids: torch.Tensor, compiled: bool) -> Built:
    """The model of transformers with its own loss."""
    import torch
    import transformers
    from transformers import Olmo3Config, Olmo3ForCausalLM

    config = Olmo3Config(
        vocab_size=vocab, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, sliding_window=128, rope_theta=5e5, use_cache=False,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], pad_token_id=1, eos_token_id=0, bos_token_id=None)
    model = Olmo3ForCausalLM(config).float().train()
    run = torch.compile(model) if compiled else model
    return model, lambda: run(input_ids=ids, labels=ids).loss, f"transformers {transformers.__version__}"


def olmo_core(vocab: int, ids: torch.Tensor, compiled: bool) -> Built:
    """OLMo-core's model with the loss of its LM head."""
    import torch
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    window = SlidingWindowAttentionConfig(pattern=[128, 128, 128, -1], force_full_attention_on_first_layer=False,
                                          force_full_attention_on_last_layer=True)
    model = TransformerConfig.llama_like(
        vocab_size=vocab, d_model=256, n_layers=4, n_heads=4, hidden_size_multiple_of=16, qk_norm=True,
        layer_norm_eps=1e-6, block_name=TransformerBlockType.reordered_norm, sliding_window=window,
        attn_backend=AttentionBackendName.torch).build(init_device="cpu")
    assert model.blocks["0"].feed_forward.hidden_size == 688
    model.init_weights(max_seq_len=SEQUENCE, device=torch.device("cpu"))
    if compiled:
        model.apply_compile()
    labels = torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], dim=1)
    return model.train(), lambda: model(ids, labels=labels, z_loss_multiplier=1e-5).loss, (
        f"ai2-olmo-core {version('ai2-olmo-core')}")


if __name__ == "__main__":
    main()
