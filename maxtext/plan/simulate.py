"""`maxtext plan --scale`: what a planned step costs on thousands of devices.

A plan is of one replica: a slice of a TPU, or some nodes of GPUs. More replicas hold the same weights and exchange
their gradients over the network of the data centre, which the backward pass hides as far as it lasts, except for the
last. With the batch grown alike, each device computes what it did (weak scaling); with the same batch, a share of it
(strong scaling), while gathers of weights and the optimizer take as long as before. Failures, stragglers and the input
are not modelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxtext.config.schema import Config
from maxtext.config.validate import BATCH_AXES
from maxtext.model.cost import flops_per_token
from maxtext.model.prediction import Exchange, Prediction, exchanges
from maxtext.parallel.network import spread
from maxtext.plan.estimate import DAY, Estimate
from maxtext.plan.topology import Target

TRILLION = 1e12
BACKWARD = 2 / 3  # of computing, during which gradients appear


@dataclasses.dataclass(frozen=True)
class Base:
    """Seconds of one replica's step, compiled or predicted."""

    compute: float
    hidden: float
    exposed: float
    source: str
    fixed: float = 0.0  # of computing, what does not shrink with the batch: the optimizer
    ends: float = 0.0  # collectives that nothing can hide, whatever the batch

    @classmethod
    def of_estimate(cls, guess: Estimate, optimizer: float) -> Base:
        assert guess.step_seconds is not None
        assert guess.hidden_seconds is not None
        assert guess.exposed_seconds is not None
        compute = max(guess.matmul_seconds or 0.0, guess.cycle_seconds or 0.0)
        return cls(compute, guess.hidden_seconds, guess.exposed_seconds, "compiled", min(optimizer, compute))

    @classmethod
    def of_prediction(cls, made: Prediction) -> Base:
        return cls(made.compute, made.hidden, made.exposed, "predicted from shapes", made.optimizer, made.ends)


@dataclasses.dataclass(frozen=True)
class Scale:
    """One row: so many replicas."""

    replicas: int
    devices: int
    tokens: int  # of one step
    step: float
    waiting: float  # share of the step in which devices wait for others
    mfu: float  # percent
    days: float  # for all tokens of the run
    device_hours: float  # a trillion tokens

    @property
    def tokens_per_day(self) -> float:
        return self.tokens * DAY / self.step


def scales(cfg: Config, target: Target, mesh: dict[str, int], base: Base, largest: int, strong: bool) -> list[Scale]:
    """Rows for 1, 2, 4 ... replicas, up to `largest`; with the same batch, only while each device has a sequence."""
    assert target.chip is not None
    rows, replicas = [], 1
    ways = 1
    for axis in BATCH_AXES:
        ways *= mesh.get(axis, 1)
    while replicas <= largest:
        if strong and cfg.train.global_batch % (replicas * ways * cfg.train.gradient_accumulation_steps):
            break
        share = 1 / replicas if strong else 1.0
        compute = base.fixed + (base.compute - base.fixed) * share
        between, last = gradient_seconds(cfg, target, mesh, replicas)
        hidden = max(base.hidden + between, between + (1 - BACKWARD) * compute)
        step = max(compute, hidden) + base.exposed * share + base.ends + last
        devices, tokens = replicas * target.n_devices, int(cfg.batch_tokens * (1 if strong else replicas))
        flops = flops_per_token(cfg.model, cfg.data.sequence_length) * tokens / devices
        whole = cfg.train.steps * cfg.batch_tokens
        mfu = 100 * flops / step / target.chip.peak_flops
        rows.append(Scale(replicas, devices, tokens, step, 1 - compute / step, mfu, whole / tokens * step / DAY,
                          TRILLION / tokens * step * devices / 3600))
        replicas *= 2
    return rows


def gradient_seconds(cfg: Config, target: Target, mesh: dict[str, int], replicas: int) -> tuple[float, float]:
    """What the all-reduces of gradients take longer with so many replicas than within one; and the last one alone."""
    network = target.network

    def seconds(times: int) -> tuple[float, float]:
        grown = mesh | {"data": mesh.get("data", 1) * times}
        whole = {"data": grown["data"]} | {axis: size for axis, size in grown.items() if axis != "data"}
        # Each replica has its own share of the batch, so sizes of arrays are those of one.
        found = [one for one in exchanges(_times(cfg, times), whole) if _of_replicas(one)]
        each = [network.seconds(one.kind, one.array, *spread(one.axes, whole, network.domain)) for one in found]
        return sum(one.calls * time for one, time in zip(found, each, strict=True)), sum(each)

    (many, last), (own, own_last) = seconds(replicas), seconds(1)
    return many - own, last - own_last


def _of_replicas(one: Exchange) -> bool:
    return one.kind == "all-reduce" and "data" in one.axes


def _times(cfg: Config, times: int) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, global_batch=cfg.train.global_batch * times))


def to_table(rows: Sequence[Scale]) -> list[tuple[str, ...]]:
    """Head and rows of a table."""
    cells = [("devices", "replicas", "tokens a step", "step", "waiting", "MFU", "tokens a day", "days",
              "device-hours a trillion tokens", "cost")]
    first = rows[0].device_hours if rows else 1.0
    for row in rows:
        cells.append((f"{row.devices:,}", f"{row.replicas:,}", f"{row.tokens:,}", f"{row.step:.3g} s",
                      f"{row.waiting:.1%}", f"{row.mfu:.1f}%", f"{row.tokens_per_day:.3g}", f"{row.days:,.1f}",
                      f"{row.device_hours:,.0f}", f"{row.device_hours / first:.3f}"))
    return cells


def to_json(rows: Sequence[Scale]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) | {"tokens_per_day": row.tokens_per_day} for row in rows]
