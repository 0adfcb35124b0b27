"""One side of a comparison: what a config computes on batches that depend on seed and shape alone.

    python -m maxtext.compare.measure CONFIG OUT.npz --steps N [key=value ...]

It runs in a process of its own, because devices and compiler flags are those of a process, and may run in another
checkout of this project: it uses few names of the rest.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from typing import Any

import numpy as np

from maxtext.config.load import ConfigError, find_config, load
from maxtext.config.schema import Config
from maxtext.config.validate import AXES

SEED, DOCUMENT = 0, 64  # of the batches; mean length of a document, in tokens


def measure(cfg: Config, steps: int) -> dict[str, np.ndarray]:
    """Named arrays: hidden states of each layer, logits and gradients before any update; loss and gradient norm of each
    update; weights after the last."""
    import jax

    from maxtext.model.decoder import init_decoder
    from maxtext.parallel.mesh import make_mesh
    from maxtext.train.state import init_state
    from maxtext.train.step import batch_gradient, compile_train_step

    mesh, found = make_mesh(cfg), {}
    with jax.set_mesh(mesh):
        batches = [_place(_batch(cfg, SEED + i), mesh) for i in range(steps)]
        params = init_decoder(cfg.model, jax.random.key(cfg.seed))
        hidden, logits = _forward(cfg, params, batches[0])
        found |= {f"layer {i:02d}": _host(x) for i, x in enumerate(hidden)} | {"logits": _host(logits)}
        counted = batches[0].weights_BT.sum()
        grads = jax.jit(lambda p: batch_gradient(cfg, p, batches[0], counted)[0])(params)
        found |= {f"gradient {name}": array for name, array in _named(grads)}
        state, step = init_state(cfg), compile_train_step(cfg)
        for i, batch in enumerate(batches):
            state, metrics = step(state, batch)
            found[f"update {i + 1} loss"] = _host(metrics["cross_entropy"])
            found[f"update {i + 1} grad norm"] = _host(metrics["grad_norm"])
        found |= {f"weight {name}": array for name, array in _named(state.params)}
    return found


def _batch(cfg: Config, seed: int) -> Any:
    """Random ids, in documents where the config masks them."""
    from maxtext.data.batch import make_batch

    rng, shape = np.random.default_rng(seed), (cfg.train.global_batch, cfg.data.sequence_length)
    tokens = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    starts = rng.random(shape) < 1 / DOCUMENT
    return make_batch(tokens, segments_BT=starts.cumsum(1) if cfg.data.document_masking else None)


def _place(batch: Any, mesh: Any) -> Any:
    import jax

    from maxtext.parallel.sharding import sharding

    def place(x: np.ndarray) -> jax.Array:
        split = sharding(mesh, "batch", *(None,) * (x.ndim - 1))
        return jax.make_array_from_callback(x.shape, split, lambda index: x[index])

    return jax.tree.map(place, batch)


def _forward(cfg: Config, params: Any, batch: Any) -> tuple[list[Any], Any]:
    """Hidden states after each layer, and logits, as training computes them."""
    import jax

    from maxtext.model import decoder
    from maxtext.model.loss import head_logits
    from maxtext.parallel.positions import layout, share, split, unshare

    def run(p: Any, batch: Any) -> tuple[list[Any], Any]:
        model, how, length = cfg.model, cfg.execution, batch.tokens_BT.shape[1]
        order_T, hidden = layout(length), []
        x = share(decoder.embed(p, split(batch.tokens_BT, order_T), model, jax.numpy.dtype(how.compute_dtype)))
        rows = decoder.make_rows(batch.segments_BT, None, order_T)
        context = decoder.make_context(model, decoder.row_positions(length, order_T), rows)
        for segment, blocks in zip(decoder.segments(model), p.segments, strict=True):
            for repeat in range(segment.repeats):
                for layer, stacked in zip(segment.layers, blocks, strict=True):
                    block = jax.tree.map(lambda w, repeat=repeat: w[repeat], stacked)
                    x, _ = decoder.block_forward(block, x, context, model, layer.window, how)
                    hidden.append(decoder.join(unshare(x), order_T))
        x = decoder.rms_norm(hidden[-1], p.norm.astype(x.dtype), model)
        return hidden, head_logits(p, x)

    return jax.jit(run)(params, batch)


def _named(tree: Any) -> list[tuple[str, np.ndarray]]:
    import jax

    from maxtext.model.decoder import leaf_names

    return list(zip(jax.tree.leaves(leaf_names(tree)), map(_host, jax.tree.leaves(tree)), strict=True))


def _host(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype.kind in "fiu" and array.dtype.itemsize > 1 else array.astype(np.float32)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m maxtext.compare.measure")
    parser.add_argument("config")
    parser.add_argument("out")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_intermixed_args(argv)
    try:
        cfg = load(find_config(args.config), args.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        # Not `least_devices`: the code of an older commit may not have it.
        devices = math.prod(max(1, getattr(cfg.mesh, axis)) for axis in AXES)
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    try:
        np.savez(args.out, **measure(cfg, args.steps))
    except ValueError as error:  # MeshError, KernelError and their like say what to do
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
