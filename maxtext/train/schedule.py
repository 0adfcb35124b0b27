"""Learning rate as a function of the update number.

The same formulas exist twice: `learning_rate` in Python float64 (for tables, dry runs and tests) and the function made
by `make_schedule`, traced into the train step in float32. The first update has t = 1, so a warm-up over w updates gives
peak / w at the first one. Source of the shapes: OLMo-core's scheduler.py (cosine, half-cosine and linear with warm-up).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.config.schema import Config


class Rates(NamedTuple):
    """The numbers of a schedule, made in float64; a sweep traces them, as it has other ones for each member."""

    peak: float | jax.Array
    floor: float | jax.Array  # the final rate
    fall: float | jax.Array  # peak - floor
    rise: float | jax.Array  # what the warm-up ends at
    warmup: int | jax.Array  # updates
    total: int | jax.Array  # update at which the schedule ends
    span: int | jax.Array  # updates over which the rate falls


def rates_of(cfg: Config) -> Rates:
    """Raises ValueError when the schedule's numbers do not fit together."""
    _check(cfg)
    peak = cfg.optim.lr
    floor = cfg.schedule.min_ratio * peak
    return Rates(peak, floor, peak - floor, _warmup_end_ratio(cfg) * peak, cfg.schedule.warmup_steps,
                 cfg.schedule_steps, _decay_span(cfg))


def learning_rate(cfg: Config, t: int) -> float:
    """Learning rate of update `t` (1-based) in float64.

    Raises ValueError when the schedule's numbers do not fit together.
    """
    _check(cfg)
    schedule, peak, total = cfg.schedule, cfg.optim.lr, cfg.schedule_steps
    warmup, floor = schedule.warmup_steps, schedule.min_ratio * peak
    if t < warmup:
        return (_warmup_end_ratio(cfg) * peak) * t / warmup
    if schedule.kind == "constant":
        return peak
    if t >= total:
        return floor
    remaining = (total - t) / _decay_span(cfg)
    return floor + (peak - floor) * _falling(cfg, remaining, math.sin, min)


def make_schedule(cfg: Config, rates: Rates | None = None) -> Callable[[jax.Array | int], jax.Array]:
    """Return f(t) -> float32 learning rate of update t (int32, 1-based, any shape), for use under jit.

    Steps are subtracted as integers and only then turned into a fraction, and the fraction is of what *remains*: so the
    float32 result keeps its relative accuracy at step counts of millions and near a final rate of zero.

    Args:
      rates: in place of those of `cfg`, whose kind of schedule stays.
    """
    peak, floor, fall, rise, warmup, total, span = rates_of(cfg) if rates is None else rates

    def rate(t: jax.Array | int) -> jax.Array:
        step = jnp.asarray(t, jnp.int32)
        if cfg.schedule.kind == "constant":
            after = jnp.full(step.shape, peak, jnp.float32)
        else:
            remaining = jnp.maximum(total - step, 0).astype(jnp.float32) / jnp.float32(span)
            after = jnp.float32(floor) + jnp.float32(fall) * _falling(cfg, remaining, jnp.sin, jnp.minimum)
        if isinstance(warmup, int) and warmup == 0:
            return after
        return jnp.where(step < warmup, jnp.float32(rise) * (step.astype(jnp.float32) / jnp.float32(warmup)), after)

    return rate


def _warmup_end_ratio(cfg: Config) -> float:
    """What the warm-up rises to, over the peak: half-cosine rises only to the middle of the cosine."""
    return (1 + cfg.schedule.min_ratio) / 2 if cfg.schedule.kind == "half_cosine" else 1.0


def _decay_span(cfg: Config) -> int:
    """Updates over which the rate falls."""
    if cfg.schedule.kind == "wsd":
        assert cfg.schedule.decay_steps is not None
        return cfg.schedule.decay_steps
    return max(cfg.schedule_steps - cfg.schedule.warmup_steps, 1)


def _falling(cfg: Config, remaining, sin, minimum):
    """Share of (peak - final) that is left when the fraction `remaining` (1 -> 0) of the decay is still to come."""
    match cfg.schedule.kind:
        case "cosine":  # (1 + cos(pi u)) / 2 with u = 1 - remaining; the sine form does not cancel near the end
            return sin(math.pi / 2 * remaining) ** 2
        case "half_cosine":  # the second half of that cosine: u runs from 1/2 to 1
            return sin(math.pi / 4 * remaining) ** 2
        case "linear":
            return remaining
        case "wsd":  # before the decay starts more than all of it remains
            return minimum(remaining, 1.0)
    raise AssertionError(cfg.schedule.kind)


def _check(cfg: Config) -> None:
    schedule, total = cfg.schedule, cfg.schedule_steps
    if schedule.kind != "wsd":
        return
    if schedule.decay_steps is None:
        raise ValueError("schedule.decay_steps is null, but schedule.kind wsd needs it; "
                         f"set it to the updates of the final decay, e.g. schedule.decay_steps={max(total // 10, 1)}")
    if schedule.warmup_steps + schedule.decay_steps > total:
        raise ValueError(f"schedule.warmup_steps {schedule.warmup_steps} + schedule.decay_steps {schedule.decay_steps} "
                         f"is more than the {total} updates of the schedule; "
                         "lower one of them or raise schedule.total_steps")
