"""Speed of one training step of a small OLMo 3 on this machine, as a share of its own matmul peak.

    python benchmarks/train_step.py [--vocab 8192] [--steps 20] [--experts] [key=value ...]

The model has 4 layers (windows of 128 and one full), width 256, 4 heads of 64, feed-forward 688, sequence 512, batch 4,
float32. It runs the very step that a run compiles, on random tokens. The matmul peak is measured in the same process,
before and after, so that the share holds on a noisy machine. One JSON line at the end holds all figures.

With --experts a second model takes turns with it, step by step: 8 experts of width 344, of which a token uses 2, stand
for the feed-forward of 688, so that both use as many parameters a token (and a router). No token is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxtext.config.schema import Config

MATMUL = 2048
EXPERTS = ["model.d_ff=null", "model.moe.experts=8", "model.moe.top_k=2", "model.moe.d_expert=344",
           "model.moe.load_balance_loss=0.01", "model.moe.z_loss=0.001"]


def main() -> None:
    started = process_start()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--experts", action="store_true", help="measure a mixture of experts too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.remat.mode=full")
    args = parser.parse_args()

    from maxtext.config.load import load
    from maxtext.parallel.runtime import keep_freed_memory, prepare_runtime

    prepare_runtime()
    keep_freed_memory()
    import jax
    import numpy as np

    from maxtext.model.cost import flops_per_token

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train_step.yml")
    overrides = [f"model.vocab_size={args.vocab}", *args.overrides]
    cfg = load(path, overrides)
    dense, *others = (stepper(load(path, [*overrides, *more])) for more in ([[], EXPERTS] if args.experts else [[]]))
    dense()
    first_step = time.time() - started
    for other in others:
        other()
    peak_before = matmul_peak()
    times = [[timed(run) for run in (dense, *others)] for _ in range(args.steps)]  # by turns
    seconds, cpu = np.array(times).transpose(2, 1, 0)  # each (models, steps)
    peak = max(peak_before, matmul_peak())
    median, count = float(np.median(seconds[0])), cfg.batch_tokens
    flops = flops_per_token(cfg.model, cfg.data.sequence_length) * count / median
    figures = {
        "vocab": args.vocab,
        "tokens/s": round(count / median),
        "tokens/s, best step": round(count / seconds[0].min()),
        "tokens/CPU-second": round(count / cpu[0].mean()),
        "GFLOP/s": round(flops / 1e9, 1),
        "matmul peak GFLOP/s": round(peak / 1e9, 1),
        "share of matmul peak": round(flops / peak, 3),
        "process start to first step done (s)": round(first_step, 1),
        "peak memory (GiB)": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "loss": round(dense(), 4),
        "jax": jax.__version__,
    }
    if others:
        figures |= {
            "experts: tokens/s": round(count / float(np.median(seconds[1]))),
            "experts: tokens/CPU-second": round(count / cpu[1].mean()),
            "experts: tokens/s over dense": round(median / float(np.median(seconds[1])), 3),
            "experts: tokens/CPU-second over dense": round(cpu[0].mean() / cpu[1].mean(), 3),
            "experts: loss": round(others[0](), 4),
        }
    print(json.dumps(figures))


def stepper(cfg: Config) -> Callable[[], float]:
    """Compiles the training step of a run; each call makes one update and returns its cross-entropy."""
    import jax
    import numpy as np

    from maxtext.data.batch import make_batch
    from maxtext.parallel.mesh import make_mesh
    from maxtext.parallel.sharding import sharding
    from maxtext.train.state import init_state
    from maxtext.train.step import compile_train_step

    mesh = make_mesh(cfg)
    shape = (cfg.train.global_batch, cfg.data.sequence_length)
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    with jax.set_mesh(mesh):
        batch = jax.device_put(make_batch(tokens), sharding(mesh, "batch", None))
        state = init_state(cfg)
        step = compile_train_step(cfg).lower(state, batch).compile()

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return jax.block_until_ready(metrics)["cross_entropy"].item()

    return run


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one call: on the clock, and of the processor."""
    cpu, clock = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


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
