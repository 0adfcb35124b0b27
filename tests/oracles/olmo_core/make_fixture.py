"""Makes `step3/` and `expected.npz`: a checkpoint of a real OLMo-core run, and how that run went on.

It needs torch and ai2-olmo-core 3.0.0, and is kept for the record: the tests use only what it wrote.

    python make_fixture.py OUT
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.attention.backend import AttentionBackendName
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.nn.transformer.config import InitMethod, TransformerBlockType
from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig

VOCABULARY, STEPS, SAVED, LENGTH, BATCH = 128, 6, 3, 24, 4


def main(out: Path) -> None:
    config = TransformerConfig.llama_like(
        d_model=32, vocab_size=VOCABULARY, n_layers=3, n_heads=4, n_kv_heads=2, qk_norm=True, layer_norm_eps=1e-6,
        rope_theta=500_000, block_name=TransformerBlockType.reordered_norm, layer_norm_name=LayerNormType.rms,
        attn_backend=AttentionBackendName.torch, feed_forward=FeedForwardConfig(hidden_size=48, bias=False),
        init_method=InitMethod.normal, sliding_window=SlidingWindowAttentionConfig(
            pattern=[8, -1], force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=True))
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=LENGTH)
    optim = SkipStepAdamWConfig(
        lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False,
        group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]).build(model)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, BATCH, LENGTH)).astype(np.int32)
    record: dict[str, list[float]] = {"ce": [], "grad_norm": []}
    for step in range(STEPS):
        if step == SAVED:
            logits = forward(model, tokens[0]).detach().numpy()
            shutil.rmtree(out / "step3", ignore_errors=True)
            save_model_and_optim_state(out / "step3" / "model_and_optim", model, optim, flatten_optimizer_state=True)
            dataset = {"sequence_length": LENGTH,
                       "tokenizer": {"vocab_size": 120, "eos_token_id": 119, "pad_token_id": 118}}
            (out / "step3" / "config.json").write_text(json.dumps(
                {"model": config.as_config_dict(), "dataset": dataset}, indent=1))
        train_step(model, optim, tokens[step], record)
    numbers = {name: np.array(values) for name, values in record.items()}
    np.savez_compressed(out / "expected.npz", tokens=tokens, logits=logits, **numbers)


def forward(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(tokens.astype(np.int64)))


def train_step(model: torch.nn.Module, optim: torch.optim.Optimizer, tokens: np.ndarray,
               record: dict[str, list[float]]) -> None:
    """One update: cross-entropy plus z-loss over the real targets, clipping at 1."""
    logits = forward(model, tokens)[:, :-1].reshape(-1, VOCABULARY).float()
    targets = torch.from_numpy(tokens[:, 1:].reshape(-1).astype(np.int64))
    ce = torch.nn.functional.cross_entropy(logits, targets)
    (ce + 1e-5 * logits.logsumexp(-1).pow(2).mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.latest_loss, optim.latest_grad_norm = ce.detach(), norm
    optim.step()
    optim.zero_grad()
    record["ce"].append(float(ce.detach()))
    record["grad_norm"].append(float(norm))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
