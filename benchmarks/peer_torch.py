"""Speed of the tiny OLMo 3 in transformers on torch, as one JSON line, to run beside train_step.py.

It needs an environment with torch and transformers:

    PEER/bin/python benchmarks/peer_torch.py --vocab 8192 --steps 20 [--eager]

The model has the sizes of train_step.yml. A step is the model's own forward pass with its own loss, backward,
clipping and torch's fused AdamW; by default all but the optimizer goes through torch.compile.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

from train_step import process_start  # of the file beside this one

BATCH, SEQUENCE = 4, 512


def main() -> None:
    started = process_start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    import torch
    import transformers
    from transformers import Olmo3Config, Olmo3ForCausalLM

    config = Olmo3Config(
        vocab_size=args.vocab, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=SEQUENCE, sliding_window=128, rope_theta=5e5, use_cache=False,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], pad_token_id=1, eos_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    model = Olmo3ForCausalLM(config).float().train()
    run_model = model if args.eager else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, args.vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = run_model(input_ids=ids, labels=ids).loss
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
        "trainer": f"transformers {transformers.__version__}, {'eager' if args.eager else 'torch.compile'}",
        "torch": torch.__version__,
        "vocab": args.vocab,
        "tokens/s": round(tokens / statistics.median(seconds)),
        "tokens/s, best step": round(tokens / min(seconds)),
        "tokens/CPU-second": round(tokens / statistics.mean(cpu)),
        "process start to first step done (s)": round(first_step, 1),
        "peak memory (GiB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "loss": round(loss, 4),
    }))


if __name__ == "__main__":
    main()
