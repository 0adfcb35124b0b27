"""Streams of Hugging Face datasets and Ray Data: the tokens, their order and position, and the end of the files."""

import dataclasses
import gzip
import itertools
import json
import sys

import jax
import numpy as np
import pytest

from maxtext.config import schema
from maxtext.data import DataError
from maxtext.data.corpus import open_source
from maxtext.data.journal import Jump
from maxtext.data.pipeline import make_batches
from maxtext.data.prepare import Options, prepare
from maxtext.data.staged_order import make_order
from maxtext.data.tokens import resolve
from tests.data.batches import hosts_rows, loss_of, read, tokens_of
from tests.data.record_files import TEXTS, jsonl
from tests.materials import imported
from tests.tiny import tiny_model

EOS, PAD = 256, 257  # of the bytes
T, B = 64, 4
STREAM = np.concatenate([[*text.encode(), EOS] for text in TEXTS])  # a pass over the files


@pytest.fixture(scope="module")
def ray_cluster():
    ray = imported("ray")
    imported("aiohttp")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(params=["hf", "ray"])
def kind(request):
    if request.param == "hf":
        imported("datasets")
    else:
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Format -> three files with the 20 texts in order."""
    folder, cuts = tmp_path_factory.mktemp("texts"), (0, 7, 8, 20)
    found = {"jsonl": [], "gz": [], "parquet": []}
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        for form, suffix in (("jsonl", "jsonl"), ("gz", "jsonl.gz"), ("parquet", "parquet")):
            path = folder / f"{number}.{suffix}"
            found[form].append(str(path))
            if form == "parquet":
                parquet.write_table(pa.table({"text": TEXTS[first:last]}), path, row_group_size=4)
            else:
                data = jsonl(TEXTS[first:last])
                path.write_bytes(data if form == "jsonl" else gzip.compress(data))
    return found


@pytest.fixture
def config(make_config, tmp_path):
    """Returns f(kind, paths, **changes of the stream and of the data section) -> Config of a stream of bytes."""
    (tmp_path / "tokenizer.bytes").touch()

    def make(kind, paths, tail="drop", key="text", batch=B, **data):
        stream = schema.StreamConfig(kind=kind, paths=tuple(paths), tokenizer=str(tmp_path / "tokenizer.bytes"),
                                     tail=tail, key=key)
        return make_config({}, batch=batch, **{"sequence_length": T, "vocab_size": 259, "eos_id": EOS, "pad_id": PAD,
                                               "stream": stream, "document_masking": True} | data)

    return make


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet"])
def test_a_stream_is_the_documents_in_the_order_of_the_files_pass_after_pass(kind, form, files, config, tmp_path):
    cfg = config(kind, files[form])
    per_pass = len(STREAM) // (B * T)
    assert per_pass * B * T < len(STREAM), "the test needs a tail"
    found, states = read(cfg, 2 * per_pass)
    one = STREAM[:per_pass * B * T].reshape(-1, T)
    assert np.array_equal(tokens_of(found), np.concatenate([one, one]))
    assert [state["stream"]["epoch"] for state in states] == [1] * (per_pass + 1) + [2] * per_pass
    assert states[-1]["source_tokens"] == {"stream": 2 * per_pass * B * T}
    assert max(int(batch.segments_BT.max()) for batch in found) > 0
    # The ids that preparation writes for the same texts.
    options = Options(tmp_path / "out", (open_source("a", files["jsonl"][0]),), {"a": 0.0}, tokenizer="bytes")
    prepare(options)
    ids = np.fromfile(tmp_path / "out" / "train" / "a-00000.npy", np.uint16)
    assert np.array_equal(ids, STREAM[:len(ids)])


@pytest.mark.parametrize("packing", ["chunk", "padded"])
def test_stops_at_five_places_and_other_hosts_repeat_and_miss_nothing(kind, files, config, packing, monkeypatch):
    monkeypatch.setattr("maxtext.data.stream.ENCODE_ROWS", 2)
    monkeypatch.setattr("maxtext.data.stream.ANCHOR_ROWS", 3)
    form = "parquet" if kind == "hf" else "jsonl"  # which Ray Data opens in a fraction of the time
    cfg = config(kind, files[form], tail="pad", packing=packing, prefetch=2)
    whole, states = read(cfg, 16)
    assert states[-1]["stream"]["epoch"] > 1, "the stops are in several passes"
    assert any(state["stream"]["anchor"] for state in states) == (kind == "hf"), "Ray Data has no positions"
    for stop, hosts in zip((0, 3, 5, 9, 14), (2, 4, 1, 4, 2), strict=True):
        parts = [read(cfg, 2, states[stop], rows)[0] for rows in hosts_rows(B, hosts)[:2]]
        for place in range(2):
            for host, rows in enumerate(hosts_rows(B, hosts)[:2]):
                want = jax.tree.map(lambda array, rows=rows: array[rows], whole[stop + place])
                jax.tree.map(np.testing.assert_array_equal, parts[host][place], want)
    for stop in range(15) if kind == "hf" else ():  # cheap enough to stop everywhere, before and after its positions
        assert np.array_equal(tokens_of(read(cfg, 1, states[stop])[0]), whole[stop].tokens_BT)
    again, ends = read(cfg, 2, states[14])
    assert ends[-1] == states[-1]
    assert np.array_equal(tokens_of(again), tokens_of(whole[14:]))


def test_padded_rows_are_one_document_each(kind, files, config):
    found, _ = read(config(kind, files["jsonl"], packing="padded", tail="pad"), len(TEXTS) // B)
    rows = [row[:real].tolist() for batch in found
            for row, real in zip(batch.tokens_BT, batch.real_B.tolist(), strict=True)]
    assert rows == [[*text.encode(), EOS][:T] for text in TEXTS]


def test_drop_and_raise_at_the_end_of_the_files(kind, files, config):
    found, _ = read(config(kind, files["parquet"], packing="padded", batch=8), 4)
    real = [int((row != PAD).sum()) for row in tokens_of(found)]
    want = [len([*text.encode(), EOS][:T]) for text in TEXTS[:16]]
    assert real == [*want, *want], "20 documents are two batches of 8, then the next pass"
    cfg = config(kind, files["parquet"], packing="padded", batch=8, tail="raise")
    batches = make_batches(cfg, resolve(cfg))
    next(batches), next(batches)
    with pytest.raises(DataError, match=r"pass 1 ends with [\d,]+ tokens in 4 of the 8 rows of a batch, and "
                                        r"data.stream.tail is raise; write drop or pad"):
        next(batches)
    batches.close()
    even, _ = read(config(kind, files["parquet"], packing="padded", batch=5, tail="raise"), 8)
    assert np.array_equal(tokens_of(even[:4]), tokens_of(even[4:])), "nothing is left, nothing is refused"
    with pytest.raises(DataError, match="a pass over the files is less than a batch of 32 x 64 tokens"):
        read(config(kind, files["parquet"], packing="padded", batch=32), 1)


@pytest.mark.parametrize("packing", ["chunk", "padded"])
def test_a_padded_tail_changes_no_loss(kind, files, config, packing):
    """The loss of the short batch is that of its real rows, whatever the padding id; padding is never rejected."""
    rule = schema.InstanceFilterConfig(enabled=True)
    losses = []
    for pad_id in (PAD, 65):
        cfg = config(kind, files["parquet"], tail="pad", packing=packing, batch=8, pad_id=pad_id, instance_filter=rule)
        cfg = dataclasses.replace(cfg, model=tiny_model(vocab_size=259, n_layers=1, layer_pattern=("full",)),
                                  train=dataclasses.replace(cfg.train, compute_dtype="float32"))
        count = 3 if packing == "padded" else -(-len(STREAM) // (8 * T))
        last = read(cfg, count)[0][-1]
        full = int((last.real_B > 0).sum())
        assert 0 < full < 8
        assert (last.weights_BT[full:] == 0).all()
        assert not last.rejected_B.any()
        alone = jax.tree.map(lambda array, full=full: array[:full], last)
        losses += [loss_of(cfg, last), loss_of(cfg, alone)]
    np.testing.assert_allclose(losses, losses[0], rtol=2e-6)  # sums over 8 and fewer rows round differently


def test_batches_that_were_passed_over(kind, files, config):
    cfg = config(kind, files["jsonl"])
    whole, _ = read(cfg, 6)
    found, states = read(cfg, 3, jumps=(Jump(4, 1, 2, 4),))
    assert np.array_equal(tokens_of(found), tokens_of([whole[0], *whole[4:6]]))
    again, _ = read(cfg, 1, states[2])
    assert np.array_equal(tokens_of(again), tokens_of(whole[5:6]))


def test_lists_of_ids_are_taken_as_they_are(kind, config, tmp_path):
    documents = [[5, 6, 7], [8], [9] * 70, [10, 11, EOS]]
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in documents))
    found, _ = read(config(kind, [str(path)], key="ids", batch=1, tail="pad"), 2)
    want = np.concatenate([[*document, EOS] for document in [*documents[:3], documents[3][:-1]]])
    got = tokens_of(found).ravel()
    assert got[:len(want)].tolist() == want.tolist()
    assert (got[len(want):] == PAD).all()


@pytest.mark.parametrize(("line", "message"), [
    ({"text": None}, r'data.stream:2: expected an object with a string under "text"'),
    ({"txt": "b"}, r'data.stream:2: expected an object with a string under "text"'),
    ({"text": [-1]}, r'data.stream:2: "text" is neither a text nor a list of ids'),
    ({"text": [999]}, r"id 999 is not below the 259 ids"),
])
def test_a_row_that_is_no_document_is_named(config, tmp_path, line, message):
    imported("datasets")
    path = tmp_path / "bad.jsonl"
    first = {"text": [3]} if isinstance(line.get("text"), list) else {"text": "a"}
    path.write_text(json.dumps(first) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=message):
        read(config("hf", [str(path)], batch=1, sequence_length=8, tail="pad"), 1)


def test_files_that_changed_or_are_not_there_are_refused(files, config, tmp_path, monkeypatch):
    imported("datasets")
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    cfg = config("hf", [str(path)])
    _, states = read(cfg, 2)
    path.write_bytes(jsonl([*TEXTS[:-1], TEXTS[-1].upper()]))
    with pytest.raises(DataError, match=r"cannot continue at step 2: the data \(fingerprint\) is"):
        read(cfg, 1, states[-1])
    with pytest.raises(DataError, match=r"data.stream: the files have changed since the run was saved"):
        read(cfg, 1, read(cfg, 0)[1][0] | {"stream": states[-1]["stream"] | {"offset": 10**6}})
    for paths, message in (([tmp_path / "b.jsonl"], r"data.stream.paths: .*b.jsonl: no such file"),
                           ([tmp_path / "*.nothing"], r"no such file"),
                           ([path, files["parquet"][0]], r"files that end in .jsonl, .parquet; give files of one of")):
        with pytest.raises(DataError, match=message):
            resolve(config("hf", map(str, paths)))
    with pytest.raises(DataError, match=r"data.vocab_size: is 300, but .* has 259 ids"):
        read(config("hf", [str(path)], vocab_size=300), 1)
    with pytest.raises(DataError, match="a stream is read once, in order, so the batch of a step cannot be worked"):
        make_order(cfg, resolve(cfg))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"data.stream.kind hf: needs datasets, .* pip install 'maxtext\[datasets\]'"):
        make_batches(cfg, resolve(cfg))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"data.stream.kind ray: needs ray, .* pip install 'maxtext\[ray\]'"):
        make_batches(config("ray", [str(path)]), resolve(cfg))


def test_other_ids_for_the_same_text_are_refused(config, tmp_path):
    """A position inside a document would mean another place, and the rest of the pass other text."""
    imported("datasets")
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    cfg = config("hf", [str(path)])
    _, states = read(cfg, 1)
    read(cfg, 0, states[-1])
    with pytest.raises(DataError, match=r"cannot continue at step 1: the data \(fingerprint\) is"):
        read(config("hf", [str(path)], eos_id=PAD), 0, states[-1])
    (tmp_path / "tokenizer.bytes").write_text("another tokenizer")
    with pytest.raises(DataError, match=r"cannot continue at step 1: the data \(fingerprint\) is"):
        read(cfg, 0, states[-1])
    (tmp_path / "tokenizer.bytes").unlink()
    with pytest.raises(DataError, match=r"data.stream.tokenizer: .*tokenizer.bytes: cannot read"):
        resolve(cfg)


def test_the_start_table_says_how_a_stream_goes_on(files, config, kind):
    cfg = config(kind, files["jsonl"])
    batches = make_batches(cfg, resolve(cfg))
    told = batches.describe()["stream"]
    batches.close()
    assert told == {"hf": "Hugging Face datasets, 3 files in order, not shuffled; resumes exactly; tail drop",
                    "ray": "Ray Data, 3 files in order, not shuffled; resumes exactly, but reads its pass from the "
                           "start again; tail drop"}[kind]
