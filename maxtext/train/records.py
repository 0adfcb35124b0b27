"""What metrics.jsonl and a checkpoint say of an update, under OLMo-core's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.model.cost import flops_per_token, peak_flops
from maxtext.train.conditions import conditions
from maxtext.train.console import host_memory_gib
from maxtext.train.guard import Skips

Record = dict[str, float]


def step_record(cfg: Config, step: int, values: dict[str, float], seconds: float, wait_seconds: float,
                mesh: Mesh) -> Record:
    """The metrics of one update under OLMo-core's names; seconds are of this update alone."""
    devices = mesh.size
    per_device = cfg.batch_tokens / seconds / devices
    record = {
        "train/CE loss": values["cross_entropy"],
        "train/Z loss": values["squared_log_z"] * cfg.train.z_loss,
        "train/Z loss unscaled": values["squared_log_z"],
        "train/masked labels (%)": 1 - values["targets"] / cfg.batch_tokens,
        "train/masked instances (%)": values["rejected"] / cfg.train.global_batch,
        "optim/total grad norm": values["grad_norm"],
        "optim/LR (group 0)": values["learning_rate"],
        "optim/LR (group 1)": values["learning_rate"],
        "optim/step skipped": values["skipped"],
        "throughput/device/TPS": per_device,
        "throughput/device/data loading (s)": wait_seconds,
        "throughput/device/data loading (%)": 100 * wait_seconds / seconds,
        "throughput/total tokens": step * cfg.batch_tokens,
        "data/fingerprint": values["fingerprint"],
        "time/step (s)": seconds,
        "memory/host (GiB)": host_memory_gib(),
    }
    if cfg.optim.uses_muon and cfg.optim.muon.matrix_lr is not None:
        record["optim/LR (Muon)"] = values["learning_rate"] * cfg.optim.muon.matrix_lr / cfg.optim.lr
    if values["cross_entropy"] < 10:  # as the reference: a larger one says nothing
        record["train/PPL"] = math.exp(values["cross_entropy"])
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    if peak is not None:
        flops = flops_per_token(cfg.model, cfg.data.sequence_length)
        record["throughput/device/MFU"] = 100 * per_device * flops / peak
    return record


def router_record(cfg: Config, router: Mapping[str, np.ndarray]) -> Record:
    """The metrics of the routers under OLMo-core's names: of each layer, and of all (the worst, or the sum)."""
    moe, layers = cfg.model.moe, [i for i, routed in enumerate(cfg.model.routed_layers) if routed]
    weights = {"load balancing loss": ("load_balance", moe.load_balance_loss), "router Z loss": ("z_loss", moe.z_loss)}
    columns = {"load imbalance": router["imbalance"], "router entropy": router["entropy"]}
    if moe.capacity_factor is not None:
        columns["dropped assignments (%)"] = 100 * router["dropped"]
    for name, (key, weight) in weights.items():
        columns[name] = router[key] * weight / cfg.model.n_layers
        columns[f"{name} unscaled"] = router[key]
    record = {f"train/block {layer:02d}/{name}": float(column[i]) for i, layer in enumerate(layers)
              for name, column in columns.items()}
    overall = {"load imbalance": np.max, "router entropy": np.mean, "dropped assignments (%)": np.mean}
    return record | {f"train/{name}": float(overall.get(name, np.sum)(column)) for name, column in columns.items()}


def saved_extra(cfg: Config, mesh: Mesh, data: dict[str, Any], record: Record, skips: Skips) -> dict[str, Any]:
    """What a checkpoint holds besides the state: where the data stands (`get_state`), and the record of its update."""
    return {"data": data, "record": record, "seed": cfg.seed, "skips": skips.updates,
            "conditions": conditions(cfg, mesh)}
