"""OLMo-core's loader: blocks of longer instances, its fingerprints and its state, against values of the reference."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError
from maxtext.data.pipeline import make_batches
from maxtext.data.reader import InstanceReader
from maxtext.data.reference import fingerprint
from maxtext.data.tokens import resolve

ORACLES = Path(__file__).resolve().parents[1] / "oracles"
RUNS = json.loads((ORACLES / "instances" / "loader.json").read_text())
SETS = json.loads((ORACLES / "instances" / "random_sets.json").read_text())
TOKENS = [str(path) for path in sorted((ORACLES / "data_loader").glob("*.npy"))]


@pytest.fixture
def open_run(make_config):
    def make(run, batch=None):
        cfg = make_config({"x": TOKENS}, batch=batch or run["gbs_instances"], sequence_length=run["seq"],
                          seed=run["seed"], max_target_sequence_length=run["max_target"], vocab_size=768, eos_id=766,
                          pad_id=767)
        data = resolve(cfg)
        return data, make_batches(cfg, data)

    return make


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['seq']}of{run['max_target']}")
def test_instances_and_order_of_the_reference(open_run, run):
    data, batches = open_run(run)
    ends = np.cumsum([part.n_instances for part in data.parts]).tolist()
    assert [list(pair) for pair in zip([0, *ends[:-1]], ends, strict=True)] == run["file_offsets"]
    last = InstanceReader(data).read(np.array([run["num_instances"] - 1]))
    assert last[0].tolist() == run["last_instance_tokens"]
    per_epoch, ids = run["total_batches"], []
    for epoch in (1, 2):
        order = np.concatenate([batches.instance_ids(per_epoch * (epoch - 1) + k + 1) for k in range(per_epoch)])
        assert order.dtype == np.uint32
        assert order[:3 * run["gbs_instances"]].tolist() == run["first_ids"][str(epoch)]
        assert hashlib.sha256(order.astype("<u4").tobytes()).hexdigest() == run["order_sha256"][str(epoch)]
        ids.append(order)
    assert not np.array_equal(*ids)
    twice = open_run(run, batch=2 * run["gbs_instances"])[1]
    assert twice.instance_ids(run["resumed_batches_x2"] + 1).tolist() == run["next_batch_x2"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['seq']}of{run['max_target']}")
def test_state_of_the_reference(open_run, run):
    _, batches = open_run(run)
    for _ in range(4):
        next(batches)
    assert batches.reference_state() == run["state_after_4"]
    state = batches.get_state()
    batches.set_state(state | {"step": run["total_batches"] + 2})
    assert batches.reference_state() == run["state_after_2"]
    assert batches.describe()["reference_state"]["dataset_fingerprint"] == run["fingerprint"]
    batches.set_state(state | {"step": run["total_batches"]})
    assert (batches.reference_state()["epoch"], batches.reference_state()["batches_processed"]) \
        == (1, run["total_batches"])
    batches.set_state(state | {"step": 0})
    assert (batches.reference_state()["epoch"], batches.reference_state()["batches_processed"]) == (1, 0)
    batches.close()


def test_blocks_are_read_in_pieces_that_belong_together(make_config, write_tokens):
    path = write_tokens("a.npy", np.arange(2, 2 + 16 * 21))
    cfg = make_config({"x": SourceConfig(paths=(path,), repeat=1.5)}, batch=4, max_target_sequence_length=64)
    data = resolve(cfg)
    assert [part.n_instances for part in data.parts] == [20, 8], "the half pass gives whole blocks too"
    batches = make_batches(cfg, data)
    for _ in range(7):
        batch = next(batches)
        assert np.array_equal(batch.tokens_BT.ravel(), np.arange(64) + batch.tokens_BT[0, 0])
        assert batch.weights_BT.sum() == 4 * 15
    batches.close()
    with pytest.raises(DataError, match=r"28 instances \(7 x 4\) of data.max_target_sequence_length 64 tokens, but "
                                        r"train.global_batch is 32: .*a.npy 336 // 64 = 5"):
        resolve(make_config({"x": SourceConfig(paths=(path,), repeat=1.5)}, batch=32, max_target_sequence_length=64))


def test_position_in_blocks_of_another_length_is_refused(make_config, write_tokens):
    path = write_tokens("a.npy", 16 * 16)  # as many instances in blocks of 1, 2 and 4
    prints = {resolve(make_config({"x": [path]}, max_target_sequence_length=longest)).fingerprint
              for longest in (None, 32, 64)}
    assert len(prints) == 3


@pytest.mark.parametrize("case", SETS["packed"], ids=lambda case: case["fingerprint"][:6])
def test_fingerprint_of_packed_files(make_config, write_tokens, case):
    paths = [write_tokens(name, [*(i % 900 + 2 for i in range(size - 1)), 0]) for name, size in case["files"]]
    cfg = make_config({"x": paths}, batch=1, sequence_length=case["length"], packing="best_fit",
                      packing_group=case["group"], dtype="uint16")
    assert fingerprint(cfg.data, resolve(cfg)) == case["fingerprint"]


def test_fingerprints_of_all_settings_differ(make_config, write_tokens):
    paths = tuple(write_tokens(f"{name}.npy", [*range(2, 40), 0] * 8) for name in "ab")

    def of(**change):
        source = SourceConfig(paths=paths, ratio=1.0 if "mixture_tokens" in change else None)
        cfg = make_config({"x": source}, batch=2, **change)
        return fingerprint(cfg.data, resolve(cfg))

    changes = ({}, {"vocab_size": 999}, {"pad_id": 2}, {"eos_id": 39}, {"max_target_sequence_length": 32},
               {"mixture_tokens": 64}, {"mixture_tokens": 128}, {"packing": "best_fit"},
               {"packing": "best_fit", "packing_group": 1}, {"packing": "best_fit", "sequence_length": 32},
               {"packing": "best_fit", "packing_seed": 1})
    assert len({of(**change) for change in changes}) == len(changes)
    assert of() == of(sequence_length=32), "the reference's fixed-length fingerprint does not know the length"
