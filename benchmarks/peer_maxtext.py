"""Speed of the tiny OLMo 3 in AI-Hypercomputer's MaxText 0.2.5, as one JSON line, to run beside train_step.py.

Its package has our package's name, so it needs an environment of its own (Python 3.12, made as peer_maxtext.txt says)
and is run with that environment's python:

    PEER/bin/python benchmarks/peer_maxtext.py --vocab 8192 --steps 20 [--experts] [key=value ...]

What runs is MaxText's own trainer with its own input pipeline; only its per-step function is wrapped to wait for the
new state and to note the time. Further key=value arguments go to MaxText's configuration.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BATCH, SEQUENCE = 4, 512
# Its OLMo 3 has no experts, its Mixtral has: full attention in each layer, which costs its masked attention the same.
EXPERTS = {
    "model_name": "mixtral-8x7b",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_mlp_dim": 344,
    "base_moe_mlp_dim": 344,
    "megablox": False,  # the kernel of TPUs; this is jax.lax.ragged_dot
    "load_balance_loss_weight": 0.01,
}


def settings(vocab: int, steps: int, window: int, scratch: str) -> dict[str, object]:
    """MaxText's keys for 4 layers, d_model 256, 4 heads of 64, mlp 688, fp32, AdamW, clipping, synthetic tokens."""
    return {
        "model_name": "olmo3-7b-pt",
        "override_model_config": True,
        "base_num_decoder_layers": 4,
        "base_emb_dim": 256,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": 64,
        "base_mlp_dim": 688,
        "sliding_window_size": window,
        "vocab_size": vocab,
        "max_target_length": SEQUENCE,
        "per_device_batch_size": BATCH,
        "dtype": "float32",
        "weight_dtype": "float32",
        "steps": steps,
        "dataset_type": "synthetic",
        "hardware": "cpu",
        "attention": "dot_product",
        # The fastest of its settings on a CPU; its defaults, full and True, are 15% slower per CPU-second.
        "remat_policy": "minimal",
        "scan_layers": False,
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "skip_jax_distributed_system": True,
        "run_name": "peer",
        "base_output_directory": scratch,
        "jax_cache_dir": "",
        "log_config": False,
        "enable_goodput_recording": False,
    }


def seconds_since_process_start() -> float:
    import psutil

    return time.time() - psutil.Process().create_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20, help="steps in all; the first two are not in the median")
    parser.add_argument("--experts", action="store_true", help="8 experts of width 344 for the feed-forward, 2 a token")
    parser.add_argument("--window", type=int, default=128, help="tokens that a sliding layer sees")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="MaxText settings on top")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps must be at least 4")

    os.environ["JAX_PLATFORMS"] = "cpu"
    # Its log goes to stderr, so that stdout is the one JSON line.
    line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import jax

    import maxtext
    from maxtext.trainers.pre_train import train

    ends: list[tuple[float, float]] = []  # (wall, CPU) seconds
    first_step_done = 0.0
    losses: list[float] = []
    step_function = train.training_loop_iteration

    def timed(device_state, python_vars, immutable):
        nonlocal first_step_done
        metrics = step_function(device_state, python_vars, immutable)
        jax.block_until_ready((device_state["state"], metrics))
        ends.append((time.perf_counter(), time.process_time()))
        first_step_done = first_step_done or seconds_since_process_start()
        losses.append(float(metrics["scalar"]["learning/loss"]))
        return metrics

    train.training_loop_iteration = timed
    with tempfile.TemporaryDirectory() as scratch:
        values = settings(arguments.vocab, arguments.steps, arguments.window, scratch)
        values |= EXPERTS if arguments.experts else {}
        config_file = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
        train.main([sys.argv[0], str(config_file), *(f"{k}={v}" for k, v in values.items()), *arguments.overrides])

    # Interval k ends with step k + 2: the first step's compile and the second's warming up are left out.
    median, cpu_median = (
        statistics.median(b - a for a, b in itertools.pairwise(clock[1:])) for clock in zip(*ends, strict=True)
    )
    result = {
        "trainer": f"MaxText {version('maxtext')}",
        "jax": jax.__version__,
        "vocab": arguments.vocab,
        "steps": len(ends),
        "experts": arguments.experts,
        "tokens/s": round(BATCH * SEQUENCE / median),
        "tokens/CPU-second": round(BATCH * SEQUENCE / cpu_median),
        "process start to first step done (s)": round(first_step_done, 1),
        "peak memory (GiB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "overrides": arguments.overrides,
    }
    print(json.dumps(result), file=line, flush=True)


if __name__ == "__main__":
    main()
