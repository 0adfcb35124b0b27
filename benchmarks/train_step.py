"""Speed of one training step of a small OLMo 3 on this machine, as a share of its own matmul peak.

    python benchmarks/train_step.py [--vocab 8192] [--steps 20] [key=value ...]

The model has 4 layers (windows of 128 and one full), width 256, 4 heads of 64, feed-forward 688, sequence 512, batch 4,
float32. It runs the very step that a run compiles, on random tokens. The matmul peak is measured in the same process,
before and after, so that the share holds on a noisy machine. One JSON line at the end holds all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time

MATMUL = 2048


def main() -> None:
    started = process_start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.remat.mode=full")
    args = parser.parse_args()

    from maxtext.config.load import load
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    import jax
    import numpy as np

    from maxtext.data.batch import make_batch
    from maxtext.model.cost import flops_per_token
    from maxtext.parallel.mesh import make_mesh
    from maxtext.parallel.sharding import sharding
    from maxtext.train.state import init_state
    from maxtext.train.step import compile_train_step

    here = os.path.dirname(os.path.abspath(__file__))
    cfg = load(os.path.join(here, "train_step.yml"), [f"model.vocab_size={args.vocab}", *args.overrides])
    mesh = make_mesh(cfg)
    with jax.set_mesh(mesh):
        shape = (cfg.train.global_batch, cfg.data.sequence_length)
        tokens = np.random.default_rng(0).integers(0, args.vocab, shape, dtype=np.int32)
        batch = jax.device_put(make_batch(tokens), sharding(mesh, "batch", None))
        state = init_state(cfg)
        step = compile_train_step(cfg).lower(state, batch).compile()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        first_step = time.time() - started
        peak_before = matmul_peak()
        seconds, cpu = [], time.process_time()
        for _ in range(args.steps):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
        cpu = (time.process_time() - cpu) / args.steps
        peak = max(peak_before, matmul_peak())
    median, count = float(np.median(seconds)), cfg.batch_tokens
    flops = flops_per_token(cfg.model, cfg.data.sequence_length) * count / median
    print(json.dumps({
        "vocab": args.vocab,
        "tokens/s": round(count / median),
        "tokens/s, best step": round(count / min(seconds)),
        "tokens/CPU-second": round(count / cpu),
        "GFLOP/s": round(flops / 1e9, 1),
        "matmul peak GFLOP/s": round(peak / 1e9, 1),
        "share of matmul peak": round(flops / peak, 3),
        "process start to first step done (s)": round(first_step, 1),
        "peak memory (GiB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "loss": round(metrics["cross_entropy"].item(), 4),
        "jax": jax.__version__,
    }))


def process_start() -> float:
    """Time at which this process was started, interpreter included (Linux; elsewhere the time of this call)."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        with open("/proc/stat") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration):
        return time.time()


def matmul_peak() -> float:
    """FLOP/s of the best of a few float32 matmuls."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((MATMUL, MATMUL), jnp.float32)
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(x, x).block_until_ready()
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * MATMUL**3 / best


if __name__ == "__main__":
    main()
