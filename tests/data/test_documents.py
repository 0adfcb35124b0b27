"""Documents in instances: the numbers of the reference's run, and borders at every edge of an instance."""

import gzip
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxtext.config.schema import InstanceFilterConfig
from maxtext.data import DataError, documents
from maxtext.data.documents import read_companion, scan, segments, segments_of_lengths
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve

EOS = 9


def lengths_of(segments_T):
    return np.bincount(segments_T).tolist()


def test_reference_run_has_the_same_documents(reference_run):
    record, cfg = reference_run("f1_docmask_fsl", document_masking=True)
    batches = make_batches(cfg, resolve(cfg))
    several = 0
    for number, step in enumerate(record["steps"], 1):
        assert batches.instance_ids(number).tolist() == step["ids"]
        batch = next(batches)
        assert batch.segments_BT.dtype == np.int32
        assert [lengths_of(row) for row in batch.segments_BT] == step["lengths"]
        assert (np.diff(batch.segments_BT, axis=1) >= 0).all()
        # Masking changes no target: the first token of the next document is one too.
        assert 1 - batch.weights_BT.mean() == pytest.approx(step["masked"], abs=1e-7)
        several += sum(len(lengths) > 1 for lengths in step["lengths"])
        if number <= 3:
            assert hashlib.sha256(batch.tokens_BT.astype("<i4").tobytes()).hexdigest() \
                == record["first_batches_sha256"][number - 1]
    batches.close()
    assert several > 200


@pytest.mark.parametrize(("tokens", "want"), [
    ([1, 2, 3, 4], [4]), ([1, 2, 3, EOS], [4]), ([EOS, 1, 2, 3], [1, 3]), ([EOS] * 4, [1, 1, 1, 1]),
    ([1, EOS, EOS, 2], [2, 1, 1]), ([1, EOS, 2, EOS], [2, 2]), ([1, 2, EOS, 7], [3, 1]),
])
def test_documents_end_with_their_end_of_document(tokens, want):
    assert lengths_of(segments(np.array([tokens, tokens]), EOS)[1]) == want


def test_numbers_start_at_0_in_each_row():
    assert segments(np.array([[EOS, EOS, 1], [1, 2, 3]]), EOS).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_known_lengths_count_where_no_end_of_document_stands():
    tokens = np.array([[1, 2, 3, EOS, 5, 6, 0, 0], [1, EOS, 3, 4, 5, 6, 7, 8], [1, 2, 3, EOS, EOS, EOS, EOS, EOS]])
    numbers = segments_of_lengths([np.array([2, 2, 2]), np.array([8]), np.array([2, 2])], tokens, EOS)
    assert numbers.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3], [0] * 8, [0, 0, 1, 1, 2, 3, 4, 5]]


def test_a_file_is_scanned_in_blocks(write_tokens, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 12, 500)
    path = write_tokens("a.npy", tokens)
    want = scan(path, np.dtype("<u2"), 500, EOS)
    ends = np.flatnonzero(tokens == EOS) + 1
    assert np.array_equal(want[0], np.append(0, ends[:-1]))
    assert np.array_equal(want[0] + want[1], ends)
    monkeypatch.setattr(documents, "SCAN_BLOCK_TOKENS", 7)
    got = scan(path, np.dtype("<u2"), 500, EOS)
    assert [a.tolist() for a in got] == [a.tolist() for a in want]
    with pytest.raises(DataError, match=r"a.npy: no end of document \(id 77\) in its 500 tokens"):
        scan(path, np.dtype("<u2"), 500, 77)


def write_companion(path, text):
    with gzip.open(path, "wt") as file:
        file.write(text)


def test_companion_file_gives_the_documents(tmp_path):
    write_companion(tmp_path / "part.0.csv.gz", "0,5,id,where,7\n5,6\n8,12\n")
    starts, lengths = read_companion(str(tmp_path / "part.0.npy"), 12)
    assert (starts.tolist(), lengths.tolist()) == ([0, 5, 8], [5, 1, 4])


@pytest.mark.parametrize(("text", "message"), [
    ("0,5\n5,13\n", r"a.csv.gz:2: \[5, 13\] is not a document inside the 12 tokens"),
    ("0,5\n-1,3\n", r":2: \[-1, 3\] is not"), ("3,3\n", r":1: \[3, 3\] is not"), ("", "has no document inside"),
    ("start,end\n0,5\n", r"lines must be start,end\[,...\] in tokens"), ("0\n", "lines must be start,end"),
])
def test_companion_that_does_not_fit_is_refused(tmp_path, text, message):
    write_companion(tmp_path / "a.csv.gz", text)
    with pytest.raises(DataError, match=message):
        read_companion(str(tmp_path / "a.npy"), 12)


def test_missing_or_cut_companion_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a.csv.gz: No such file .*documents of .*a.npy.*document_boundaries: eos"):
        read_companion(str(tmp_path / "a.npy"), 12)
    write_companion(tmp_path / "a.csv.gz", "0,5\n" * 1000)
    data = Path(tmp_path / "a.csv.gz").read_bytes()
    Path(tmp_path / "a.csv.gz").write_bytes(data[:-10])
    with pytest.raises(DataError, match="cannot be decompressed"):
        read_companion(str(tmp_path / "a.npy"), 12)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_abstract_batch_is_what_comes(make_config, write_tokens, on, kind):
    cfg = make_config({"x": [write_tokens("a.npy", 16 * 60)]}, document_masking=on,
                      instance_filter=InstanceFilterConfig(enabled=on))
    data = resolve(cfg)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"), axis_types=(kind,) * 2)
    for sharding in (None, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))):
        batches = make_batches(cfg, data, sharding)
        abstract, batch = batches.abstract(), next(batches)
        batches.close()
        assert (batch.segments_BT is not None, batch.rejected_B is not None) == (on, on)
        assert jax.tree.structure(abstract) == jax.tree.structure(batch)
        for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(batch), strict=True):
            assert (want.shape, want.dtype) == (got.shape, got.dtype)
            if sharding is not None:
                assert got.sharding.is_equivalent_to(want.sharding, len(want.shape))
                assert {shard.data.shape for shard in got.addressable_shards} == {(2, *want.shape[1:])}
        if sharding is not None:
            with jax.set_mesh(mesh):
                compiled = jax.jit(lambda b: jax.tree.map(jnp.sum, b)).lower(abstract).compile()
                assert compiled(batch).weights_BT == 8 * 15
