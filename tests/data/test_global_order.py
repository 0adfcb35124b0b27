"""The order of all rows is one, however many files, hosts and restarts there are: none repeated, none missing."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from maxtext.data.reader import RowRules, StepSource, make_reader
from maxtext.data.staged_order import make_order
from maxtext.data.tokens import resolve
from tests.data.batches import hosts_rows
from tests.runs import ROOT

T, EOS = 16, 0


def read(cfg, hosts: int, steps) -> dict[int, np.ndarray]:
    """Tokens (B, T) of each step, put together from what every host reads for itself."""
    parts = []
    for rows in hosts_rows(cfg.train.global_batch, hosts):
        data = resolve(cfg)  # each host finds the files for itself
        order = make_order(cfg, data)
        source = StepSource(order, make_reader(data), rows, RowRules.of(cfg.data, data.eos_id))
        parts.append({step: source[step - 1]["tokens"] for step in steps})
    return {step: np.concatenate([part[step] for part in parts]) for step in steps}


@pytest.fixture
def numbered(write_tokens):
    """Returns f(counts) -> files of that many instances; the first two tokens of an instance are its number."""

    def make(*counts):
        paths, first = [], 0
        for name, count in enumerate(counts):
            tokens = np.full((count, T), 5)
            tokens[:, 0], tokens[:, 1] = np.divmod(np.arange(first, first + count), 900)
            tokens[:, :2] += 2
            paths.append(write_tokens(f"{len(counts)}/{name:03d}.npy", tokens.ravel()))
            first += count
        return paths

    return make


def numbers(tokens_BT: np.ndarray) -> list[int]:
    return ((tokens_BT[:, 0].astype(int) - 2) * 900 + tokens_BT[:, 1].astype(int) - 2).tolist()


@pytest.mark.parametrize("counts", [(60,), (20, 20, 20), (1,) * 60, (7, 53)])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_files_and_hosts_do_not_change_the_order(make_config, numbered, counts, hosts):
    cfg = make_config({"x": numbered(*counts)}, batch=4)
    found = read(cfg, hosts, range(1, 31))
    rows = [number for step in range(1, 31) for number in numbers(found[step])]
    assert sorted(rows[:60]) == sorted(rows[60:]) == list(range(60)), "each epoch has each row once"
    assert rows[:60] != rows[60:]
    one = read(make_config({"x": numbered(60)}, batch=4), 1, range(1, 31))
    assert rows == [number for step in range(1, 31) for number in numbers(one[step])]


@pytest.mark.parametrize("samples", [10, 7])
def test_hosts_end_an_epoch_together_with_any_number_of_samples(make_config, numbered, samples):
    cfg = make_config({"x": numbered(samples)}, batch=2)
    batches = samples // 2
    found = read(cfg, 2, range(1, 2 * batches + 1))
    for epoch in (0, 1):
        steps = range(epoch * batches + 1, (epoch + 1) * batches + 1)
        rows = [number for step in steps for number in numbers(found[step])]
        assert len(rows) == len(set(rows)) == 2 * batches
        assert set(rows) <= set(range(samples))


def test_topics_in_files_are_mixed_for_every_host_from_the_start(make_config, numbered):
    cfg = make_config({"x": numbered(100, 100)}, batch=4)
    fifth = read(cfg, 2, range(1, 11))
    for host in range(2):
        seen = {number >= 100 for tokens in fifth.values() for number in numbers(tokens[2 * host:2 * host + 2])}
        assert seen == {False, True}


# A process of its own: reads the given steps of the config that it unpickles, with some hosts.
PROGRAM = """
import json, pickle, sys
sys.path.insert(0, sys.argv[1])
from tests.data.test_global_order import read
print(json.dumps([{str(step): tokens.tolist() for step, tokens in read(cfg, hosts, range(first, last)).items()}
                  for cfg, hosts, first, last in pickle.load(sys.stdin.buffer)]))
"""


def test_stops_at_five_places_and_other_hosts_repeat_and_miss_nothing(make_config, write_tokens, numbered):
    """In each kind of packing: parts of the run in a new process and on other numbers of hosts are the whole run."""
    rng = np.random.default_rng(0)
    documents = [[[*rng.integers(2, 1000, n), EOS] for n in rng.integers(1, 24, 60)] for _ in range(2)]
    paths = [write_tokens(f"d{i}.npy", np.concatenate(group)) for i, group in enumerate(documents)]
    configs = [make_config({"x": numbered(20, 30), "y": paths}, batch=4)]
    configs += [make_config({"y": paths}, batch=4, packing=kind) for kind in ("best_fit", "first_fit", "padded")]
    stops = [1, 3, 8, 11, 19, 26]
    tasks = [(cfg, hosts, first, last) for cfg in configs
             for hosts, first, last in zip((2, 4, 1, 4, 2), stops[:-1], stops[1:], strict=True)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT)], input=pickle.dumps(tasks), capture_output=True,
                          check=True, timeout=120)
    parts = json.loads(done.stdout)
    for place, cfg in enumerate(configs):
        pieces = parts[5 * place:5 * place + 5]
        steps = [int(step) for part in pieces for step in part]
        assert steps == list(range(1, 26)), "repeated = 0, missing = 0"
        for step, tokens in read(cfg, 1, range(1, 26)).items():
            got = next(part[str(step)] for part in pieces if str(step) in part)
            assert tokens.tolist() == got
