"""The optimizer against recorded runs of the reference, a float64 twin, optax, and its own saved state."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext.config import schema
from maxtext.train.optim import decay_mask_from_names, global_norm, make_optimizer
from maxtext.train.schedule import learning_rate, make_schedule

RUNS = {path.stem: json.loads(path.read_text())
        for path in sorted((Path(__file__).parents[1] / "oracles" / "skip_step").glob("*.json"))}
SHAPES = {"embed": (7, 5), "head": (5, 7), "scale": (5,)}
MASK = {"embed": False, "head": True, "scale": True}


def config(steps=40, schedule: Any = None, **optim: Any) -> schema.Config:
    settings: dict[str, Any] = {"lr": 1e-2} | optim
    schedule = {"warmup_steps": 5} if schedule is None else schedule
    return schema.Config(
        model=schema.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=8), optim=schema.OptimConfig(**settings),
        train=schema.TrainConfig(steps=steps, global_batch=1),
        schedule=schema.ScheduleConfig(**schedule))


def make(cfg) -> Any:
    return make_optimizer(cfg, make_schedule(cfg), MASK)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(n, seed=1):
    """Random gradients whose norm changes so much from step to step that some are clipped and some are not."""
    rng = np.random.default_rng(seed)
    return [{name: (rng.normal(size=shape) * 10 ** rng.uniform(-3, 1)).astype(np.float32)
             for name, shape in SHAPES.items()} for _ in range(n)]


_steppers: dict[str, Any] = {}


def stepper(cfg):
    """The jitted update; one for equal configs, as compiling takes most of the time here."""
    tx = make(cfg)

    def step(state, params, grads, loss, norm):
        changes, state = tx.update(grads, state, params, loss=loss, grad_norm=norm)
        return state, optax.apply_updates(params, changes)

    return _steppers.setdefault(repr(cfg), jax.jit(step))


def run(cfg, grads, losses=None, params=None, state=None):
    """Return (weights, state, 0/1 skipped per step) after one update per gradient."""
    tx = make(cfg)
    params = weights() if params is None else params
    state = tx.init(jax.tree.map(jnp.asarray, params)) if state is None else state
    step, skipped = stepper(cfg), []
    for i, g in enumerate(grads):
        loss = 2.0 if losses is None else losses[i]
        state, params = step(state, params, g, jnp.float32(loss), global_norm(g))
        skipped.append(int(state.skipped))
    return params, state, skipped


def reference(cfg, grads, rates, skipped=()):
    """AdamW as torch and the reference order it, in float64. Returns weights, first and second moments."""
    o, (b1, b2) = cfg.optim, cfg.optim.betas
    p = {name: x.astype(np.float64) for name, x in weights().items()}
    m, v, t = {n: 0 * x for n, x in p.items()}, {n: 0 * x for n, x in p.items()}, 0
    for i, g in enumerate(grads):
        if i in skipped:
            continue
        g = {n: x.astype(np.float64) for n, x in g.items()}
        norm = np.sqrt(sum((x ** 2).sum() for x in g.values()))
        coefficient = 1 if o.max_grad_norm is None else min(1, o.max_grad_norm / (norm + 1e-6))
        step = t + 1 if o.step_increment_bugfix else 1
        t += 1
        for n in p:
            p[n] = p[n] * (1 - rates[i] * o.weight_decay * MASK[n])
            m[n] = m[n] + (1 - b1) * (g[n] * coefficient - m[n])
            v[n] = b2 * v[n] + (1 - b2) * (g[n] * coefficient) ** 2
            p[n] = p[n] - rates[i] / (1 - b1 ** step) * m[n] / (np.sqrt(v[n]) / np.sqrt(1 - b2 ** step) + o.eps)
    return p, m, v


def assert_close(got, expected, rtol=1e-6):
    """Each array to `rtol` of its largest entry: an entry near zero is the difference of two that are not."""
    for name, x in expected.items():
        np.testing.assert_allclose(np.asarray(got[name], np.float64), x, rtol=rtol, atol=rtol * np.abs(x).max())


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("case", RUNS)
def test_skips_exactly_the_steps_that_the_reference_skipped(case):
    record = RUNS[case]
    cfg = config(record["steps"], {"warmup_steps": record["warmup_steps"], "min_ratio": record["min_ratio"]},
                 lr=record["peak_lr"], skip=schema.SkipConfig(record["window"], record["sigma"]))
    tx, params = make(cfg), jax.tree.map(jnp.asarray, weights())
    state, step, zero = tx.init(params), stepper(cfg), jax.tree.map(jnp.zeros_like, params)
    skipped, rates = [], []
    for t, (loss, norm) in enumerate(zip(record["ce_loss"], record["grad_norm"], strict=True), start=1):
        state, params = step(state, params, zero, jnp.float32(loss), jnp.float32(norm))
        rates.append(float(state.learning_rate))
        if int(state.skipped):
            skipped.append(t)
    assert skipped == record["skipped"]
    assert int(state.count) == record["adam_count_at_end"]
    assert int(state.n_recorded) == record["steps"]
    np.testing.assert_allclose(rates, record["lr"], rtol=3e-7)  # float32 on the device; test_schedule has the 1e-9


@pytest.mark.parametrize("options", [
    {}, {"kind": "adamw"}, {"max_grad_norm": None}, {"weight_decay": 0.0}, {"step_increment_bugfix": False},
    {"betas": (0.0, 0.999)}, {"betas": (0.9, 0.9999)},
], ids=str)
def test_forty_steps_equal_float64_adamw(options):
    cfg, grads = config(**options), gradients(40)
    params, state, skipped = run(cfg, grads)
    rates = [float(make_schedule(cfg)(t)) for t in range(1, 41)]
    p, m, v = reference(cfg, grads, rates)
    assert not any(skipped)
    assert_close(params, p)
    assert_close(state.mu, m)
    assert_close(state.nu, v)
    assert int(state.count) == (40 if cfg.optim.step_increment_bugfix else 0)


def test_adamw_without_clipping_is_optax_adamw():
    cfg = config(kind="adamw", max_grad_norm=None)
    grads, schedule = gradients(40), make_schedule(cfg)
    params, state, skipped = run(cfg, grads, losses=[2.0] * 39 + [1e9])
    tx: Any = optax.adamw(lambda count: schedule(jnp.asarray(count) + 1), *cfg.optim.betas, weight_decay=0.1, mask=MASK)
    expected: Any = jax.tree.map(jnp.asarray, weights())
    their_state = tx.init(expected)
    for g in grads:
        changes, their_state = tx.update(g, their_state, expected)
        expected = optax.apply_updates(expected, changes)
    assert not any(skipped)
    assert state.loss_window is None
    assert_close(params, {name: np.asarray(x, np.float64) for name, x in expected.items()}, rtol=1e-6)


def noisy(n, seed=0):
    return (2 + 0.01 * np.random.default_rng(seed).normal(size=n)).tolist()


@pytest.mark.parametrize("bad", [1e3, float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit_but_moves_schedule_and_window(bad):
    cfg = config(skip=schema.SkipConfig(window=16))
    params, state, _ = run(cfg, gradients(20), noisy(20))
    params["scale"] = params["scale"].at[0].set(-0.0)  # adding 0.0 to it would flip its sign bit
    grads = {name: np.full(shape, bad, np.float32) for name, shape in SHAPES.items()}
    after, new_state, skipped = run(cfg, [grads], [2.0], params, state)
    assert skipped == [1]
    assert_same_bits((after, new_state.mu, new_state.nu, new_state.count), (params, state.mu, state.nu, state.count))
    assert int(new_state.n_recorded) == 21
    assert float(new_state.learning_rate) == pytest.approx(learning_rate(cfg, 21), rel=1e-6)
    np.testing.assert_array_equal(new_state.grad_norm_window[20 % 16], global_norm(grads))


def test_training_goes_on_after_a_skipped_step_as_if_it_had_not_been():
    cfg = config(skip=schema.SkipConfig(window=16), schedule={"kind": "constant"})
    losses, grads = noisy(40), gradients(40)
    losses[25] = 50.0
    params, state, skipped = run(cfg, grads, losses)
    assert [i for i, s in enumerate(skipped) if s] == [25]
    p, m, v = reference(cfg, grads, [cfg.optim.lr] * 40, skipped=[25])
    assert_close(params, p)
    assert_close(state.nu, v)
    assert_close(state.mu, m)
    assert int(state.count) == 39


def test_the_deviation_is_the_unbiased_one():
    cfg, losses = config(skip=schema.SkipConfig(window=8, sigma=3.0)), [1.0, 3.0] * 4
    limit = 2 + 3 * float(np.std(losses, ddof=1))  # the biased deviation gives 5.0 instead of 5.207
    for last, expected in ((limit * 0.999, 0), (limit * 1.001, 1)):
        assert run(cfg, [weights()] * 9, [*losses, last])[2][-1] == expected


def test_the_guard_waits_for_half_a_window_and_only_looks_up():
    cfg, grads = config(skip=schema.SkipConfig(window=32)), [weights()] * 40
    for at, expected in ((14, []), (15, [15]), (30, [30])):  # the 16th recorded step is the first that it can skip
        losses = noisy(40)
        losses[at] = 9.0
        assert [i for i, s in enumerate(run(cfg, grads, losses)[2]) if s] == expected, at
        losses[at] = -9.0
        assert not any(run(cfg, grads, losses)[2])


def test_a_nan_loss_is_skipped_from_the_first_step_and_does_not_blind_the_guard():
    cfg = config(skip=schema.SkipConfig(window=16))
    losses = [float("nan"), *noisy(39)]
    losses[30] = 9.0
    params, _, skipped = run(cfg, gradients(40), losses)
    assert [i for i, s in enumerate(skipped) if s] == [0, 30]
    assert all(np.isfinite(x).all() for x in params.values())


def test_tiny_windows_never_divide_by_zero():
    for window in (2, 3, 5):
        assert not any(run(config(skip=schema.SkipConfig(window=window)), [weights()] * 6, [2.0] * 6)[2])


def test_saved_state_continues_to_the_same_bits():
    cfg, losses, grads = config(skip=schema.SkipConfig(window=16)), noisy(40), gradients(40)
    losses[12], losses[27] = 30.0, 300.0  # one on each side of the save, both after the guard wakes
    straight = run(cfg, grads, losses)
    assert [i for i, s in enumerate(straight[2]) if s] == [12, 27]
    params, state, _ = run(cfg, grads[:20], losses[:20])
    saved = jax.tree.map(lambda x: np.asarray(x).copy(), (params, state))
    params, state = jax.tree.map(jnp.asarray, saved)
    resumed = run(cfg, grads[20:], losses[20:], params, state)
    assert_same_bits(straight[:2], resumed[:2])
    assert straight[2][20:] == resumed[2]


def test_sharded_weights_give_sharded_moments_and_the_same_update():
    cfg, grads = config(), gradients(3)
    grads = [{name: np.tile(x, (4,) * x.ndim) for name, x in g.items()} for g in grads]
    start = {name: np.tile(x, (4,) * x.ndim) for name, x in weights().items()}
    expected, state, _ = run(cfg, grads, params=start)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"embed": P("fsdp", None), "head": P("tensor", "fsdp"), "scale": P(None)}
    tx = make(cfg)
    with jax.set_mesh(mesh):
        def place(tree):
            return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}
        params = place(start)
        sharded = jax.jit(tx.init)(params)
        step = stepper(cfg)
        for g in map(place, grads):
            sharded, params = step(sharded, params, g, jnp.float32(2), jax.jit(global_norm)(g))
        for tree in (params, sharded.mu, sharded.nu):
            assert {name: x.sharding.spec for name, x in tree.items()} == specs
        assert sharded.loss_window.sharding.is_fully_replicated
    assert_close(params, {name: np.asarray(x, np.float64) for name, x in expected.items()}, rtol=1e-6)
    assert_close(sharded.nu, {name: np.asarray(x, np.float64) for name, x in state.nu.items()}, rtol=2e-6)


def test_global_norm_of_a_large_tree_keeps_float32_digits():
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(3000, 1000)), "b": 100 + rng.normal(size=70_001)}
    tree = {name: x.astype(np.float32) for name, x in tree.items()}
    expected = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in tree.values()))
    norm = jax.jit(global_norm)(tree)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    assert float(global_norm({"a": jnp.full((1000,), 300, jnp.bfloat16)})) == pytest.approx(300 * 1000 ** 0.5, rel=1e-3)


def test_update_runs_in_place():
    """Donated weights and moments need no second copy: a temporary the size of a leaf would show here."""
    tx = make(config())
    params = {name: jnp.zeros(tuple(200 * n for n in shape)) for name, shape in SHAPES.items()}

    def step(state, params, grads):
        changes, state = tx.update(grads, state, params, loss=jnp.float32(2), grad_norm=global_norm(grads))
        return state, optax.apply_updates(params, changes)

    state = tx.init(params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(state, params, params).compile()
    usage = compiled.memory_analysis()
    assert usage is not None
    assert usage.temp_size_in_bytes < params["embed"].nbytes / 10


def test_decay_mask_by_glob():
    names = {"embed": "embed", "blocks": [{"norm": "blocks.0.attention_norm", "w": "blocks.0.w_q"}], "head": "head.w"}
    assert decay_mask_from_names(names, ("embed",)) == {
        "embed": False, "blocks": [{"norm": True, "w": True}], "head": True}
    assert decay_mask_from_names(names, ("*norm", "head.*")) == {
        "embed": True, "blocks": [{"norm": False, "w": True}], "head": False}
    with pytest.raises(ValueError, match=r"'embedd' matches no parameter.*embed"):
        decay_mask_from_names(names, ("embedd",))


def test_beta_of_one_is_refused():
    with pytest.raises(ValueError, match=r"optim.betas.*below 1"):
        make(dataclasses.replace(config(), optim=schema.OptimConfig(lr=1e-3, betas=(0.9, 1.0))))
