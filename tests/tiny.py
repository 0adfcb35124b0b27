"""Small models, batches and meshes that many tests share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from maxtext.config.schema import Config, DataConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig
from maxtext.data.batch import Batch
from maxtext.parallel.mesh import AXES, cut_fsdp
from maxtext.parallel.sharding import sharding

MESHES = [(8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2), (2, 1, 4)]  # data, fsdp, tensor


def tiny_model(**changes: Any) -> ModelConfig:
    """Five layers (a pattern, then a forced full one), grouped heads, windows shorter than the sequence."""
    model = ModelConfig(vocab_size=96, d_model=32, n_layers=5, n_heads=8, n_kv_heads=4, head_dim=8, d_ff=48,
                        layer_pattern=("window", "window", "window", "full"), window=6)
    return dataclasses.replace(model, **changes)


def tiny_config(model: ModelConfig | None = None, **train: Any) -> Config:
    train = {"steps": 10, "global_batch": 8, "compute_dtype": "float32", "loss_chunk_tokens": 48} | train
    return Config(
        model=model or tiny_model(),
        data=DataConfig(sequence_length=16, vocab_size=96, eos_id=94, pad_id=95),
        optim=OptimConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=2),
        train=TrainConfig(**train),
    )


def mesh_of(shape: tuple[int, int, int], expert: int = 1, context: int = 1, pipeline: int = 1, inner: int = 1
            ) -> Mesh:
    """A mesh of these sizes of data, fsdp and tensor, and of the other axes; `inner` cuts fsdp in two."""
    data, fsdp, tensor = shape
    sizes = (data, pipeline, fsdp, expert, context, tensor)
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    return mesh if inner == 1 else cut_fsdp(mesh, inner)


def random_batch(cfg: Config, seed: int = 0, counts: list[int] | None = None) -> Batch:
    """Numpy batch of random ids; row b has counts[b] real targets, or all but the last position."""
    rng = np.random.default_rng(seed)
    shape = (cfg.train.global_batch, cfg.data.sequence_length)
    tokens = rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    counts = [shape[1] - 1] * shape[0] if counts is None else counts
    weights = (np.arange(shape[1])[None] < np.asarray(counts)[:, None]).astype(np.float32)
    targets = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    return Batch(tokens, targets, weights)


def place(batch: Batch, mesh: Mesh) -> Batch:
    return jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, "batch", *(None,) * (x.ndim - 1))), batch)
