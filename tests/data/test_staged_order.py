"""Weights of sources that change over a run: shares, order, limits, what is counted, and what may change on resume."""

import dataclasses
import json

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError
from maxtext.data.journal import Journal, Jump
from maxtext.data.pipeline import make_batches
from maxtext.data.staged_order import StagedOrder, Stages, make_order, seats
from maxtext.data.tokens import resolve

STEPS = (1, 11, 16)
WEIGHTS = {"web": (0.7, 0.2, 0.0), "code": (0.3, 0.3, 0.5), "books": (0.0, 0.5, 0.5)}
T, B = 16, 8


@pytest.fixture
def mixed(make_config, write_tokens):
    """Returns f(weights, steps, **changes) -> Config of three sources of 100, 60 and 40 instances in five files; the
    second token of an instance is its number in the source, the first says which source it is."""

    def make(weights=WEIGHTS, mixture_steps=STEPS, max_repetition=5.0, steps=30, **changes):
        sources = {}
        for place, (name, counts) in enumerate({"web": (70, 30), "code": (25, 35), "books": (40,)}.items()):
            paths, first = [], 0
            for file, count in enumerate(counts):
                tokens = np.full((count, T), 9)
                tokens[:, 0], tokens[:, 1] = 2 + place, 10 + np.arange(first, first + count)
                paths.append(write_tokens(f"{name}{file}.npy", tokens.ravel()))
                first += count
            sources[name] = SourceConfig(paths=tuple(paths), weights=weights[name], max_repetition=max_repetition)
        return make_config(sources, batch=B, steps=steps, **{"mixture_steps": mixture_steps} | changes)

    return make


def read(cfg, count, state=None):
    """(rows as (source, number) of each step, the state after them, counts of tokens after each step)."""
    batches = make_batches(cfg, resolve(cfg))
    if state is not None:
        batches.set_state(json.loads(json.dumps(state)))
    rows, counts = [], []
    for _ in range(count):
        tokens = next(batches).tokens_BT
        rows.append([(int(row[0]) - 2, int(row[1]) - 10) for row in tokens])
        counts.append(batches.source_tokens)
    state = batches.get_state()
    batches.close()
    return rows, state, counts


def walk(weights: np.ndarray, n_rows: int) -> list[int]:
    """Webster's method, one row after the other."""
    counts = np.zeros(len(weights), int)
    for _ in range(n_rows):
        with np.errstate(divide="ignore"):
            counts[np.argmin((counts + 0.5) / weights)] += 1
    return counts.tolist()


def test_any_number_of_rows_is_shared_as_a_walk_shares_it():
    rng = np.random.default_rng(0)
    for weights in [*rng.dirichlet([0.3] * 5, 30), np.array([0.5, 0.5]), np.array([1.0]), np.array([0.0, 0.25, 0.75]),
                    np.array([1e-4, 1 - 1e-4]), np.full(7, 1 / 7)]:
        for n in (0, 1, 2, 7, 100, 333):
            found = seats(weights, n)
            assert found.tolist() == walk(weights, n)
            assert np.abs(found - n * weights).max() < 1 + len(weights) / 4
    assert seats(np.array([0.2, 0.3, 0.5]), 10**12).tolist() == [2 * 10**11, 3 * 10**11, 5 * 10**11]


def test_each_stage_has_its_shares_and_a_source_its_own_order(mixed):
    rows, _, counts = read(mixed(), 30)
    shares = [(0, 10), (10, 15), (15, 30)]
    for place, (first, last) in enumerate(shares):
        seen = np.bincount([source for step in rows[first:last] for source, _ in step], minlength=3)
        want = np.array([weights[place] for weights in WEIGHTS.values()]) * B * (last - first)
        assert np.abs(seen - want).max() <= 1
        assert (seen[want == 0] == 0).all()
    for source, size in enumerate((100, 60, 40)):
        numbers = [number for step in rows for one, number in step if one == source]
        first_pass = numbers[:size]
        assert len(set(first_pass)) == len(first_pass), "no instance twice in a pass"
        if len(numbers) >= size:
            assert set(first_pass) == set(range(size))
            assert numbers[size:2 * size] != first_pass[:len(numbers) - size], "each pass has an order of its own"
    for step, told in enumerate(counts):
        seen = np.bincount([source for past in rows[:step + 1] for source, _ in past], minlength=3) * T
        assert list(told.values()) == seen.tolist()
    assert read(mixed(seed=1), 30)[0] != rows


def test_the_batch_of_a_step_needs_no_earlier_one(mixed):
    cfg = mixed()
    data = resolve(cfg)
    order = make_order(cfg, data)
    straight = [order.instance_ids(step).tolist() for step in range(1, 31)]
    for step in (30, 17, 3, 11, 16):
        assert make_order(cfg, data).instance_ids(step).tolist() == straight[step - 1]


@pytest.mark.parametrize("stop", [0, 1, 10, 12, 29])
def test_a_continuation_sees_and_counts_the_same(mixed, stop):
    rows, state, counts = read(mixed(), 30)
    _, middle, _ = read(mixed(), stop)
    after, end, told = read(mixed(), 30 - stop, middle)
    assert (after, end, told) == (rows[stop:], state, counts[stop:])
    without = {key: value for key, value in middle.items() if key != "source_tokens"}  # as older checkpoints are
    assert read(mixed(), 0, without)[1] == middle


def test_stages_to_come_may_change_and_past_ones_not(mixed):
    rows, state, _ = read(mixed(), 12)
    later = {name: (*weights[:2], weight) for (name, weights), weight in
             zip(WEIGHTS.items(), (0.5, 0.25, 0.25), strict=True)}
    changed = mixed(later)
    whole = read(changed, 30)[0]
    assert whole[:12] == rows
    assert read(changed, 18, state)[0] == whole[12:]
    sooner = {**WEIGHTS, "web": (0.6, 0.2, 0.0), "code": (0.4, 0.3, 0.5)}
    constant = mixed({"web": (0.5,), "code": (0.25,), "books": (0.25,)}, (1,))
    for cfg in (mixed(sooner), mixed(mixture_steps=(1, 9, 16)), constant):
        with pytest.raises(DataError, match=r"cannot continue at step 12: the weights of data.sources up to there are "
                                            r"\[\[1, .* but were \[\[1, .*\[11, "):
            read(cfg, 1, state)
    plain = dataclasses.replace(mixed(), data=dataclasses.replace(mixed().data, mixture_steps=(1,), sources={
        name: dataclasses.replace(source, weights=(), max_repetition=1.0)
        for name, source in mixed().data.sources.items()}))
    with pytest.raises(DataError, match="up to there are None but were"):
        read(plain, 1, state)
    with pytest.raises(DataError, match="but were None"):
        read(mixed(), 1, read(plain, 3)[1])


def test_batches_that_are_passed_over_count_for_what_was_seen(mixed):
    """After a jump a run has seen stages that its number of updates alone has not."""
    cfg = mixed()
    batches = make_batches(cfg, resolve(cfg), journal=Journal())
    batches.journal.add_jumps([Jump(9, 5, 6, 10)])  # update 6 takes batch 11
    taken = [batches.instance_ids(step).tolist() for step in range(1, 8)]
    assert taken[5] == make_order(cfg, resolve(cfg)).instance_ids(11).tolist()
    for _ in range(6):
        next(batches)
    state = batches.get_state()
    batches.close()
    assert [first for first, _ in state["stages"]] == [1, 11]
    with pytest.raises(DataError, match=r"the weights of data.sources up to there"):
        read(mixed({name: (weights[0], *weights[2:], weights[2]) for name, weights in WEIGHTS.items()}), 1, state)


def test_repetition_is_limited_with_the_arithmetic(mixed):
    with pytest.raises(DataError, match=r"data.sources.books: its weights take 80 instances in train.steps 30, but it "
                                        r"has 40 x max_repetition 1.5 = 60; raise max_repetition") as error:
        make_order(mixed(max_repetition=1.5), resolve(mixed()))
    assert "web" not in str(error.value)
    assert make_order(mixed(max_repetition=2.0), resolve(mixed())).rows(30).tolist() == [64, 96, 80]
    alone = mixed({"web": (1.0,), "code": (0.0,), "books": (0.0,)}, (1,), max_repetition=1.15)
    with pytest.raises(DataError, match=r"it has 100 x max_repetition 1.15 = 115;"):  # 100 * 1.15 is below 115
        make_order(alone, resolve(alone))


def test_large_runs_cost_no_walk():
    """Step 10^7 of batches of 1,024: some 10^10 rows stand before it."""
    stages = Stages((1, 5_000_000), {"a": (0.999, 0.5), "b": (0.001, 0.5)})
    order = StagedOrder({"a": 1000, "b": 10}, stages, 1024, 0, "x" * 16, "unused")
    rows = order.rows(10_000_000)
    assert rows.sum() == 10_000_000 * 1024
    assert rows[1] == pytest.approx(4_999_999 * 1024 * 0.001 + 5_000_001 * 512, abs=2)
    ids = order.instance_ids(10_000_000)
    assert (ids >= 1000).sum() == 512


def test_the_start_table_has_the_shares_and_passes_of_the_run(mixed):
    cfg = mixed()
    batches = make_batches(cfg, resolve(cfg))
    told = batches.describe()
    batches.close()
    assert told["passes"] == {"web": 64 / 100, "code": 96 / 60, "books": 80 / 40}
    assert {name: row["share"] for name, row in told["sources"].items()} == {
        "web": 64 / 240, "code": 96 / 240, "books": 80 / 240}
    assert json.dumps(told)
