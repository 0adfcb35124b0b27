"""Source mixtures: the reference's allotment, its limits, and that each file gives its first instances."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError
from maxtext.data.mixture import MixtureSource, allot
from maxtext.data.pipeline import make_batches
from maxtext.data.reader import InstanceReader
from maxtext.data.reference import fingerprint
from maxtext.data.tokens import resolve

INSTANCES = Path(__file__).resolve().parents[1] / "oracles" / "instances"
SETS = json.loads((INSTANCES / "random_sets.json").read_text())["mixtures"]
GOLDEN = json.loads((INSTANCES / "source_mixture.json").read_text())


@pytest.mark.parametrize("golden", GOLDEN, ids=["once", "repeated"])
def test_mixture_of_the_reference(golden, make_config, write_tokens):
    paths: dict[str, list[str]] = {"a": [], "b": []}
    with np.load(INSTANCES / "tokens.npz") as arrays:
        for key in sorted(arrays.files):
            if key.startswith("mix_"):
                paths[key[4]].append(write_tokens(key, arrays[key]))
    cfg = make_config({name: SourceConfig(paths=tuple(files), ratio=golden[f"ratio_{name}"],
                                          max_repetition=golden["b_max_repetition"] if name == "b" else 1.0)
                       for name, files in paths.items()},
                      batch=8, sequence_length=golden["seq"], mixture_tokens=golden["requested_tokens"])
    data = resolve(cfg)
    names = [f"mix_{part.source}/{Path(part.path).name}" for part in data.parts]
    assert [[name, place, part.n_instances * golden["seq"]]
            for place, (name, part) in enumerate(zip(names, data.parts, strict=True))] == golden["path_tokens"]
    ends = np.cumsum([part.n_instances for part in data.parts]).tolist()
    assert [list(pair) for pair in zip([0, *ends[:-1]], ends, strict=True)] == golden["offsets"]
    assert data.n_instances == golden["num_instances"]
    tokens = InstanceReader(data).read(np.arange(0, data.n_instances, golden["instance_stride"]))
    assert hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest() == golden["instances_sha256"]
    batches = make_batches(cfg, data)
    share = batches.describe()["sources"]["a"]["share"]
    batches.close()
    assert share == pytest.approx(golden["ratio_a"], abs=0.02)


@pytest.mark.parametrize("case", SETS, ids=range(len(SETS)))
def test_random_mixtures_of_the_reference(case, make_config, write_tokens):
    sources = {}
    for name, source in case["sources"].items():
        paths = tuple(write_tokens(file, size) for file, size in source["files"])
        sources[name] = SourceConfig(paths=paths, **{key: value for key, value in source.items() if key != "files"})
    cfg = make_config(sources, batch=case["batch"], sequence_length=case["length"], mixture_tokens=case["tokens"],
                      max_target_sequence_length=case["longest"], dtype="uint16")
    if "offsets" not in case:
        with pytest.raises(DataError, match=r"of data.mixture_tokens"):
            resolve(cfg)
        return
    data = resolve(cfg)
    ends = np.cumsum([part.n_instances for part in data.parts]).tolist()
    assert [Path(part.path).name for part in data.parts] == case["paths"]
    assert [list(pair) for pair in zip([0, *ends[:-1]], ends, strict=True)] == case["offsets"]
    assert fingerprint(cfg.data, data) == case["fingerprint"]


def test_totals_fill_whole_batches_and_stay_within_files():
    rng = np.random.default_rng(0)
    repeated = 0
    for _ in range(200):
        length, batch = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        sizes = {name: rng.integers(1, 400, rng.integers(1, 5)).tolist() for name in "ab"}
        tokens = int(rng.integers(1, sum(map(sum, sizes.values()))))
        ratio = float(rng.uniform(0.1, 0.9))
        sources = {name: MixtureSource(share, sizes[name], 1000.0)
                   for name, share in (("a", ratio), ("b", 1 - ratio))}
        takes = allot(sources, tokens, length, batch)
        assert [name for name, _ in sorted((take.source, 0) for take in takes)] == [take.source for take in takes]
        for take in takes:
            assert 0 <= take.instances <= take.capacity == sizes[take.source][take.file] // length
        total, wanted = sum(take.instances for take in takes), math.ceil(tokens / (batch * length)) * batch
        assert total >= wanted or any(take.full for take in takes), "short only where files end"
        repeated += len(takes) > sum(map(len, sizes.values()))
    assert repeated > 20


def test_rounding_prefers_the_largest_remainder_then_the_later_file():
    takes = allot({"a": MixtureSource(1.0, [64 + 30, 64 + 50, 64 + 30])}, 224, 32, 1)
    # 224 of 302 tokens: 69.7, 84.6 and 69.7 round up to 70, 85 and 70: 2 instances each, remainders 6, 21 and 6.
    assert [take.instances for take in takes] == [2, 3, 2]
    takes = allot({"a": MixtureSource(1.0, [96, 96, 96])}, 200, 32, 1)
    assert [take.instances for take in takes] == [2, 2, 3], "equal remainders"


@pytest.mark.parametrize(("limits", "message"), [
    ({}, r"sources.a: ratio 0.5 of data.mixture_tokens 1,000 needs 500 tokens, but 400 tokens x max_source_fraction 1.0"
         r" x max_repetition 1.0 = 400"),
    ({"max_repetition": 2.0, "max_source_fraction": 0.6}, r"x max_source_fraction 0.6 x max_repetition 2.0 = 480"),
])
def test_too_few_tokens_for_a_ratio_are_refused(make_config, write_tokens, limits, message):
    sources = {"a": SourceConfig(paths=(write_tokens("a.npy", 400),), ratio=0.5, **limits),
               "b": SourceConfig(paths=(write_tokens("b.npy", 300),), ratio=0.5)}
    with pytest.raises(DataError, match=message) as error:
        resolve(make_config(sources, mixture_tokens=1000))
    assert "sources.b" in str(error.value)
    enough = {name: SourceConfig(source.paths, ratio=0.5, max_repetition=2.0) for name, source in sources.items()}
    assert resolve(make_config(enough, mixture_tokens=1000)).n_instances == 64  # 8 batches of 8 instances of 16


def test_blocks_of_a_mixture_stay_whole(make_config, write_tokens):
    cfg = make_config({"a": SourceConfig(paths=(write_tokens("a.npy", 16 * 40),), ratio=1.0)}, mixture_tokens=16 * 30,
                      max_target_sequence_length=64)
    data = resolve(cfg)
    assert [part.n_instances for part in data.parts] == [32]
    assert data.chunk == 4
