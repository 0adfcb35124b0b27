"""The order of instances: the reference's, epoch after epoch, in memory and in the cache file alike."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxtext.data import DataError, order
from maxtext.data.order import GlobalOrder, instance_order

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = json.loads((ROOT / "tests" / "oracles" / "data_loader" / "expected.json").read_text())


def test_order_of_the_reference_training_run():
    golden = EXPECTED["a1"]
    ids = instance_order(golden["num_instances"], golden["seed"], golden["epoch"])
    assert ids.dtype == np.uint32
    assert ids[:64].tolist() == golden["first_64"]
    assert hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest() == golden["sha256_uint32le"]


@pytest.mark.parametrize("run", EXPECTED["runs"], ids=["batch8", "batch4"])
def test_batches_of_the_reference_over_two_epochs(tmp_path, run):
    batch = run["gbs_instances"]
    steps = GlobalOrder(run["num_instances"], batch, run["seed"], "f", tmp_path)
    assert steps.batches_per_epoch == run["num_instances"] // batch
    for epoch, golden in run["global_order"].items():
        first = (int(epoch) - 1) * steps.batches_per_epoch + 1
        got = [steps.instance_ids(first + k).tolist() for k in range(steps.batches_per_epoch)]
        assert [i for row in got for i in row] == golden[:batch * steps.batches_per_epoch]
        assert {steps.epoch(first + k) for k in range(steps.batches_per_epoch)} == {int(epoch)}
        # The reference's ranks take strided columns of the same rows: the set of a step does not depend on the ranks.
        for world in (1, 2, 4):
            for k in (0, 1):
                rows = [run["ranks"][epoch][f"ws{world}_rank{rank}_first2"][k] for rank in range(world)]
                assert np.stack(rows, axis=1).ravel().tolist() == got[k]
    twice = GlobalOrder(run["num_instances"], 2 * batch, run["seed"], "f", tmp_path)
    assert twice.instance_ids(3).tolist() == run["resume_batch_x2_after_2"]


def test_every_epoch_sees_each_instance_at_most_once_in_its_own_order(tmp_path):
    steps = GlobalOrder(29, 4, 5, "f", tmp_path)
    epochs = [np.concatenate([steps.instance_ids(7 * e + k + 1) for k in range(7)]) for e in range(3)]
    for ids in epochs:
        assert len(set(ids.tolist())) == 28
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(epochs[2], instance_order(29, 5, 3)[:28])
    assert not np.array_equal(instance_order(29, 5, 1), instance_order(29, 6, 1))
    assert np.array_equal(instance_order(29, 5, 2), instance_order(29, 6, 1)), "the generator's seed is seed + epoch"


def test_steps_may_be_asked_in_any_order(tmp_path):
    one, two = (GlobalOrder(29, 4, 5, "f", tmp_path) for _ in range(2))
    forward = {step: one.instance_ids(step).tolist() for step in range(1, 60)}
    assert {step: two.instance_ids(step).tolist() for step in reversed(range(1, 60))} == forward
    assert len(two._epochs) <= order.EPOCHS_KEPT
    with pytest.raises(DataError, match="counted from 1"):
        one.instance_ids(0)


def test_result_does_not_alias_the_kept_order(tmp_path):
    steps = GlobalOrder(29, 4, 5, "f", tmp_path)
    first = steps.instance_ids(1)
    want = first.tolist()
    first[:] = 0
    assert steps.instance_ids(1).tolist() == want


def test_size_limits(tmp_path):
    with pytest.raises(DataError, match="at least one batch of 8"):
        GlobalOrder(7, 8, 0, "f", tmp_path)
    with pytest.raises(DataError, match="fewer than 2\\^32"):
        GlobalOrder(2**32, 8, 0, "f", tmp_path)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setattr(order, "IN_MEMORY_INSTANCES", 20)
    return lambda fingerprint="a" * 64, seed=5: GlobalOrder(29, 4, seed, fingerprint, tmp_path / "cache")


def test_cache_file_holds_the_same_order_and_is_used(cached, tmp_path, monkeypatch):
    want = {step: np.concatenate([instance_order(29, 5, 1)[:28], instance_order(29, 5, 2)[:28]])[4 * step - 4:4 * step]
            for step in range(1, 15)}
    steps = cached()
    for step, ids in want.items():
        assert np.array_equal(steps.instance_ids(step), ids)
    files = [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".u32"]
    assert sorted(files) == [steps.cache_file(1), steps.cache_file(2)]
    assert steps.cache_file(1).stat().st_size == 4 * 29
    monkeypatch.setattr(order, "instance_order", lambda *_: pytest.fail("computed again"))
    assert np.array_equal(cached().instance_ids(3), want[3])
    assert isinstance(cached()._order(1), np.memmap)


def test_the_order_itself_is_not_sent_to_workers(tmp_path):
    steps = GlobalOrder(10_000, 4, 5, "f", tmp_path)
    want = steps.instance_ids(3)
    sent = pickle.dumps(steps)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).instance_ids(3), want)


def test_cache_files_of_other_data_seeds_and_epochs_are_apart(cached):
    names = {cached().cache_file(1), cached().cache_file(2), cached(seed=6).cache_file(1),
             cached("b" * 64).cache_file(1)}
    assert len(names) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data[:40] + bytes(8) + data[48:],
                                    lambda data: b""], ids=["cut", "hole", "empty"])
def test_damaged_cache_file_is_made_again(cached, damage):
    want = cached().instance_ids(3)
    path = cached().cache_file(1)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert np.array_equal(cached().instance_ids(3), want)
    assert path.read_bytes() == good


@pytest.mark.parametrize("chunk", [1, 4])
def test_blocks_stay_together_and_are_shuffled_as_units(tmp_path, monkeypatch, chunk):
    steps = GlobalOrder(116, 6, 5, "f", tmp_path, chunk)
    ids = np.concatenate([steps.instance_ids(k) for k in range(1, 20)])
    blocks = instance_order(116 // chunk, 5, 1)
    want = (blocks[:, None] * chunk + np.arange(chunk, dtype=np.uint32)).ravel()
    assert np.array_equal(ids, want[:19 * 6])
    monkeypatch.setattr(order, "IN_MEMORY_INSTANCES", 20)
    cached = GlobalOrder(116, 6, 5, "f", tmp_path / "cache", chunk)
    assert np.array_equal(np.concatenate([cached.instance_ids(k) for k in range(1, 20)]), ids)
    assert cached.cache_file(1).stat().st_size == 4 * 116 // chunk


READER = """
import sys
sys.path.insert(0, sys.argv[1])
from maxtext.data import order

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

computed = []
shuffle = order.instance_order
order.instance_order = lambda *args: computed.append(args) or shuffle(*args)
before = peak()
steps = order.GlobalOrder(int(sys.argv[3]), 512, 7, "f", sys.argv[2])
ids = [steps.instance_ids(step) for step in range(1, 2000, 13)]
print(len(computed), peak() - before, sum(int(i.sum()) for i in ids))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_one_process_computes_a_large_order_and_the_others_map_it(tmp_path):
    n = 20_000_000  # 80 MB
    readers = [subprocess.Popen([sys.executable, "-c", READER, str(ROOT), str(tmp_path), str(n)],
                                stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = sorted(tuple(map(int, reader.communicate(timeout=120)[0].split())) for reader in readers)
    assert [computed for computed, _, _ in results] == [0, 0, 1]
    peaks = [peak for _, peak, _ in results]
    assert max(peaks[:2]) < 45e6, "16 MiB blocks to check the sum, and the pages of the rows that were read"
    assert 4 * n <= peaks[2] < 4 * n + 60e6, "the index itself, once"
    want = instance_order(n, 7, 1)
    assert {total for _, _, total in results} == {
        sum(int(want[512 * (step - 1):512 * step].sum()) for step in range(1, 2000, 13))}
