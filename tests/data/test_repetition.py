"""The instance filter: the reference's decisions, on its own examples and in its own run."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxtext.data.batch import make_batch
from maxtext.data.pipeline import make_batches
from maxtext.data.repetition import RepetitionRule, repetitive
from maxtext.data.tokens import resolve

ORACLES = Path(__file__).resolve().parents[1] / "oracles"
GOLDEN = json.loads((ORACLES / "instances" / "repetition_filter.json").read_text())


def tokens_of(example):
    tokens = example["tokens"]
    return np.full(tokens["len"], tokens["fill"]) if isinstance(tokens, dict) else np.array(tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_reference_examples(dtype):
    decisions = []
    for example in GOLDEN:
        tokens_1T = tokens_of(example)[None].astype(dtype)
        times = [run[3] for run in example["start_end_period_times"]]
        # Every limit that some run of the example just reaches or just misses, and those of the golden.
        for count in {3, 8, 16, 32} | {limit for n in times for limit in (n, n + 1)}:
            want = any(n >= count for n in times)
            assert repetitive(tokens_1T, RepetitionRule(1, 13, count)).tolist() == [want], (example, count)
            assert example.get("keep_if_max_count", {}).get(str(count), not want) is not want
            decisions.append(want)
    assert 100 < sum(decisions) < len(decisions) - 100


@pytest.mark.parametrize("period", [1, 2, 7, 13])
@pytest.mark.parametrize("count", [3, 4, 32])
def test_one_token_less_or_one_period_more_is_kept(period, count):
    rng = np.random.default_rng(0)
    T = 3 * period * count
    rule = RepetitionRule(1, 13, count)
    pattern = np.arange(period) + 5000
    for start in (0, 1, period, T - period * count):
        tokens = rng.permutation(np.arange(T))
        tokens[start:start + period * count] = np.resize(pattern, period * count)
        shorter = tokens.copy()
        shorter[start + period * count - 1] = 9999
        assert repetitive(np.stack([tokens, shorter]), rule).tolist() == [True, False], start
        if period > 1:
            assert repetitive(tokens[None], RepetitionRule(1, period - 1, count)).tolist() == [False]
            assert repetitive(tokens[None], RepetitionRule(period, period, count)).tolist() == [True]


def test_periods_end_at_a_third_of_the_instance():
    tokens = np.resize(np.arange(10), 29)[None]  # 2.9 periods of 10
    assert repetitive(tokens, RepetitionRule(1, 13, 3)).tolist() == [False]
    assert repetitive(np.resize(np.arange(10), 30)[None], RepetitionRule(1, 13, 3)).tolist() == [True]
    assert repetitive(np.zeros((2, 1), int), RepetitionRule(1, 13, 3)).tolist() == [False, False]


def by_definition(tokens, rule):
    """Straight from the words: the longest run of tokens equal to the one a period before."""
    for period in range(rule.min_period, min(rule.max_period, len(tokens) // 3) + 1):
        run = best = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            best = max(best, run)
        if best and (best + period) // period >= max(rule.max_count, 3):
            return True
    return False


def test_random_patterns_agree_with_the_definition():
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(300):
        T, ids = int(rng.integers(1, 120)), int(rng.integers(2, 6))
        tokens_RT = rng.integers(0, ids, (4, T))
        for row in tokens_RT:
            begin, end = sorted(rng.integers(0, T + 1, 2))
            row[begin:end] = np.resize(rng.integers(0, ids, int(rng.integers(1, 14))), end - begin)
        low = int(rng.integers(1, 4))
        rule = RepetitionRule(low, int(rng.integers(low, 14)), int(rng.integers(1, 9)))
        want = [by_definition(row, rule) for row in tokens_RT.tolist()]
        assert repetitive(tokens_RT, rule).tolist() == want
        found += sum(want)
    assert 300 < found < 1000


@pytest.mark.parametrize("workers", [0, 2])
def test_reference_run_rejects_the_same_instances(reference_run, workers):
    record, cfg = reference_run("d_instance_filter_u16", workers=workers)
    batches = make_batches(cfg, resolve(cfg))
    rejected = 0
    for number, step in enumerate(record["steps"], 1):
        assert batches.instance_ids(number).tolist() == step["ids"]
        batch = next(batches)
        assert batch.rejected_B.dtype == np.float32
        assert batch.rejected_B.tolist() == [1.0 - kept for kept in step["kept"]]
        assert batch.weights_BT.sum(axis=1).tolist() == [127.0 * kept for kept in step["kept"]]
        assert 1 - batch.weights_BT.mean() == pytest.approx(step["masked"], abs=1e-7)
        rejected += int(batch.rejected_B.sum())
    batches.close()
    assert rejected == 71


def test_without_a_filter_nothing_is_rejected(reference_run, make_config):
    _, cfg = reference_run("d_instance_filter_u16", instance_filter=make_config().data.instance_filter)
    batches = make_batches(cfg, resolve(cfg))
    batch = next(batches)
    batches.close()
    assert batch.rejected_B is None
    assert batch.weights_BT.sum() == 8 * 127


def test_a_rejected_instance_keeps_tokens_and_targets():
    tokens_BT = np.arange(12).reshape(2, 6)
    plain, batch = make_batch(tokens_BT), make_batch(tokens_BT, rejected_B=np.array([False, True]))
    assert np.array_equal(batch.tokens_BT, plain.tokens_BT)
    assert np.array_equal(batch.targets_BT, plain.targets_BT)
    assert batch.weights_BT.tolist() == [plain.weights_BT[0].tolist(), [0.0] * 6]
