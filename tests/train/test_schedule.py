"""Learning-rate schedules against the reference's own tables, and the float32 version against the float64 one."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.config import schema
from maxtext.train.schedule import learning_rate, make_schedule

ORACLES = Path(__file__).parents[1] / "oracles"
TABLES = json.loads((ORACLES / "lr_schedules.json").read_text())


def config(peak=3e-4, steps=100, **schedule) -> schema.Config:
    return schema.Config(
        model=schema.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=8), optim=schema.OptimConfig(lr=peak),
        train=schema.TrainConfig(steps=steps, global_batch=1), schedule=schema.ScheduleConfig(**schedule))


def from_table(name: str) -> tuple[schema.Config, np.ndarray, np.ndarray]:
    row = TABLES[name]
    cfg = config(row["peak"], **{key: row[key] for key in ("kind", "warmup_steps", "total_steps", "min_ratio")})
    steps, rates = zip(*row["table"], strict=True)
    return cfg, np.array(steps), np.array(rates)


@pytest.mark.parametrize("name", TABLES)
def test_equals_the_reference_tables(name):
    cfg, steps, expected = from_table(name)
    np.testing.assert_allclose([learning_rate(cfg, int(t)) for t in steps], expected, rtol=1e-9, atol=0)
    on_device = jax.jit(make_schedule(cfg))(jnp.asarray(steps))
    assert on_device.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(on_device, np.float64), expected, rtol=1e-6, atol=0)


EVERY_KIND = {
    "cosine": {"kind": "cosine", "warmup_steps": 2000, "total_steps": 1_192_093},
    "cosine to zero": {"kind": "cosine", "warmup_steps": 2000, "total_steps": 1_668_931, "min_ratio": 0.0},
    "half cosine to zero": {"kind": "half_cosine", "warmup_steps": 597_046, "total_steps": 1_668_931,
                            "min_ratio": 0.0},
    "linear": {"kind": "linear", "total_steps": 1_668_931, "min_ratio": 0.0},
    "wsd": {"kind": "wsd", "warmup_steps": 2000, "total_steps": 1_668_931, "decay_steps": 100_003, "min_ratio": 0.0},
    "beyond 2^24": {"kind": "cosine", "warmup_steps": 3, "total_steps": 40_000_001, "min_ratio": 0.0},
    "constant": {"kind": "constant", "warmup_steps": 7},
}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_float32_keeps_six_digits_at_every_step_count(name):
    cfg = config(**EVERY_KIND[name])
    total, warmup = cfg.schedule_steps, cfg.schedule.warmup_steps
    near = {1, 2, warmup - 1, warmup, warmup + 1, total // 2, total - 100_003, total - 3, total - 1, total, total + 9}
    anywhere = np.random.default_rng(0).integers(1, total, 500).tolist()
    steps = np.array(sorted(t for t in near.union(anywhere) if t > 0))
    expected = [learning_rate(cfg, int(t)) for t in steps]
    got = np.asarray(jax.jit(make_schedule(cfg))(jnp.asarray(steps, jnp.int32)), np.float64)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0)


def test_wsd_by_hand():
    cfg = config(peak=1.0, steps=100, kind="wsd", warmup_steps=10, decay_steps=20, min_ratio=0.1)
    by_hand = {1: 0.1, 9: 0.9, 10: 1.0, 11: 1.0, 80: 1.0, 81: 1 - 0.9 / 20, 90: 0.55, 99: 0.1 + 0.9 / 20, 100: 0.1,
               150: 0.1}
    for t, expected in by_hand.items():
        assert learning_rate(cfg, t) == pytest.approx(expected, rel=1e-12), t


def test_total_steps_keeps_the_curve_when_the_run_gets_longer():
    short, long = config(steps=50, total_steps=200), config(steps=150, total_steps=200)
    assert [learning_rate(short, t) for t in range(1, 60)] == [learning_rate(long, t) for t in range(1, 60)]
    assert learning_rate(config(steps=50), 40) != learning_rate(short, 40)


@pytest.mark.parametrize("case", ["c1_skip_r32_gqa", "c2_skip_r128"])
def test_equals_the_rates_of_a_recorded_run(case):
    run = json.loads((ORACLES / "skip_step" / f"{case}.json").read_text())
    cfg = config(run["peak_lr"], run["steps"], warmup_steps=run["warmup_steps"], min_ratio=run["min_ratio"])
    got = [learning_rate(cfg, t) for t in range(1, run["steps"] + 1)]
    np.testing.assert_allclose(got, run["lr"], rtol=1e-9, atol=0)


@pytest.mark.parametrize(("schedule", "message"), [
    ({"kind": "wsd"}, "schedule.decay_steps"),
    ({"kind": "wsd", "warmup_steps": 60, "decay_steps": 50}, "60.*50.*100"),
])
def test_impossible_wsd_is_refused(schedule, message):
    for use in (make_schedule, lambda cfg: learning_rate(cfg, 1)):
        with pytest.raises(ValueError, match=message):
            use(config(**schedule))
