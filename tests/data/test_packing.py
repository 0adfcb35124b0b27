"""Best-fit packing: the reference's placement and run, files that are damaged or repeated, and what a row may hold."""

import gzip
import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError, packing
from maxtext.data.packing import PackingPlan, best_fit, first_fit, sort_longest_first
from maxtext.data.pipeline import make_batches, reading
from maxtext.data.reader import StepSource
from maxtext.data.tokens import resolve

ORACLES = Path(__file__).resolve().parents[1] / "oracles"
GOLDEN = json.loads((ORACLES / "instances" / "packing.json").read_text())
EOS, PAD = 0, 1


def bounds(golden):
    lengths = np.array(golden["doc_lens"])
    starts = np.cumsum(lengths) - lengths
    return starts, starts + lengths


def numpy_sorts_as_the_reference_did():
    ends = [np.stack(bounds(golden), 1)[np.argsort(-np.array(golden["doc_lens"]))] for golden in GOLDEN]
    return all(got.tolist() == golden["sorted_doc_indices"] for got, golden in zip(ends, GOLDEN, strict=True))


same_ties = pytest.mark.skipif(not numpy_sorts_as_the_reference_did(),
                               reason="numpy's argsort leaves equal keys in another order on this CPU")


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden["max_len"]))
def test_placement_of_the_reference(golden):
    lengths = [end - start for start, end in golden["sorted_doc_indices"]]
    bin_of = best_fit(lengths, golden["max_len"])
    assert [np.flatnonzero(bin_of == i).tolist() for i in range(bin_of.max() + 1)] \
        == golden["instances_docids_in_sorted_order"]


@same_ties
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden["max_len"]))
def test_order_of_the_reference(golden):
    order = sort_longest_first(np.array(golden["doc_lens"]), stable=False)
    assert np.stack(bounds(golden), 1)[order].tolist() == golden["sorted_doc_indices"]


def test_stable_order_keeps_the_order_of_equal_lengths():
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    order = sort_longest_first(lengths, stable=True)
    assert sorted(range(1000), key=lambda i: (-lengths[i], i)) == order.tolist()


def slow_best_fit(lengths, capacity):
    """The bin with the least space that is enough; among equals the one that has had that space longest."""
    spaces, since, bin_of = [], [], []
    for item, length in enumerate(lengths):
        fits = [(spaces[i], since[i], i) for i in range(len(spaces)) if spaces[i] >= length]
        if fits:
            number = min(fits)[2]
        else:
            number = len(spaces)
            spaces.append(capacity)
            since.append(item)
        spaces[number] -= length
        since[number] = item
        bin_of.append(number)
    return bin_of


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 64, 100, 255, 256, 257, 1023])
def test_placement_agrees_with_a_slow_one(capacity):
    rng = np.random.default_rng(capacity)
    for decreasing in (True, False):
        lengths = np.minimum(rng.geometric(min(1, 2.5 / capacity), 300), capacity)
        lengths = sorted(lengths.tolist(), reverse=True) if decreasing else lengths.tolist()
        assert best_fit(lengths, capacity).tolist() == slow_best_fit(lengths, capacity)


def test_reference_run_has_the_same_document_lengths(reference_run):
    # Lengths do not depend on the order of equally long documents, so this holds on every CPU.
    record, cfg = reference_run("f2_packed_yarn", document_masking=True)
    data = resolve(cfg)
    assert data.n_instances == record["n_instances"]
    assert [Path(data.parts[i].path).name for i in data.packing.file_order] == record["path_order"]
    batches = make_batches(cfg, data)
    for number, step in enumerate(record["steps"], 1):
        assert batches.instance_ids(number).tolist() == step["ids"]
        batch = next(batches)
        assert [np.bincount(row).tolist() for row in batch.segments_BT] == step["lengths"]
        assert 1 - batch.weights_BT.mean() == pytest.approx(step["masked"], abs=1e-7)
        if number <= 3:
            assert (batch.weights_BT.sum(axis=1) + 1).tolist() == record["real_tokens"][number - 1]
    batches.close()


@same_ties
@pytest.mark.parametrize("workers", [0, 2])
def test_reference_run_has_the_same_tokens(reference_run, workers):
    record, cfg = reference_run("f2_packed_yarn", workers=workers)
    batches = make_batches(cfg, resolve(cfg))
    for want in record["first_batches_sha256"]:
        batch = next(batches)
        assert batch.segments_BT is None
        assert hashlib.sha256(batch.tokens_BT.astype("<i4").tobytes()).hexdigest() == want
    batches.close()


@pytest.fixture
def files(write_tokens):
    """Three files of documents with their own ids, some longer than 16 tokens, each file with a tail without end."""
    rng, paths = np.random.default_rng(0), []
    for number, name in enumerate("abc"):
        documents = [[*(rng.integers(2, 1000, length)), EOS] for length in rng.integers(1, 24, 40)]
        paths.append(write_tokens(f"{name}.npy", [*np.concatenate(documents), *range(2, 5 + number)]))
    return paths


def documents_of(path):
    tokens = np.fromfile(path, np.uint16)
    return [document.tolist() for document in np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]]


@pytest.fixture
def read_epoch(make_config):
    """Returns f(files, **data) -> (Config, ResolvedData, all batches of the first epoch)."""

    def read(files, repeat=1, batch=1, **data):
        cfg = make_config({"x": SourceConfig(paths=tuple(files), repeat=repeat)}, batch=batch,
                          **{"packing": "best_fit", "packing_group": 2, "document_masking": True} | data)
        resolved = resolve(cfg)
        batches = make_batches(cfg, resolved)
        rows = [next(batches) for _ in range(resolved.n_instances // batch)]
        batches.close()
        return cfg, resolved, rows

    return read


def test_each_document_stands_whole_in_one_instance_and_in_one_segment(files, read_epoch):
    _, data, batches = read_epoch(files, pad_id=PAD)
    read, cut = [], 0
    for batch in batches:
        tokens, numbers, weights = batch.tokens_BT[0], batch.segments_BT[0], batch.weights_BT[0]
        real = int(weights.sum()) + 1
        assert not (tokens[:real] == PAD).any()
        assert (tokens[real:] == PAD).all()
        assert weights.tolist() == [1.0] * (real - 1) + [0.0] * (17 - real)
        for number in range(numbers.max() + 1):
            document = tokens[numbers == number].tolist()
            if document[0] == PAD:
                assert number == numbers.max()
                continue
            read.append(document)
            # A document that was cut fills its instance: nothing shares its segment.
            assert document[-1] == EOS or (len(document) == 16 and numbers.max() == 0)
            cut += document[-1] != EOS
    want = [document[:16] for path in files for document in documents_of(path)]
    assert sorted(read) == sorted(want)
    assert cut == sum(len(d) > 16 for path in files for d in documents_of(path)) > 10
    assert sum(data.packing.summary["truncated"]) == cut
    assert sum(data.packing.summary["documents"]) == len(want)
    assert data.packing.summary["tokens"] == [sum(len(d[:16]) for d in documents_of(path)) for path in files]


def test_targets_are_counted_exactly_and_the_padding_id_does_not_matter(files, read_epoch):
    _, _, plain = read_epoch(files, pad_id=PAD)
    weights = np.concatenate([batch.weights_BT for batch in plain])
    kept = [document[:16] for path in files for document in documents_of(path)]
    assert weights.sum() == sum(map(len, kept)) - len(plain)
    for pad_id in (EOS, 999):  # also the end of document, and an id that real text has
        _, _, other = read_epoch(files, pad_id=pad_id)
        assert np.array_equal(np.concatenate([batch.weights_BT for batch in other]), weights)


def test_packing_is_within_groups_of_files(files, read_epoch):
    _, data, _ = read_epoch(files)
    documents, first = data.packing.arrays()
    groups = [{file // 2 for file in documents["file"][a:b].tolist()}
              for a, b in itertools.pairwise(first.tolist())]
    assert all(len(group) == 1 for group in groups)
    assert {tuple(group) for group in groups} == {(0,), (1,)}
    whole = read_epoch(files, packing_group=3)[1]
    assert whole.n_instances <= data.n_instances


def test_seed_permutes_the_files(files, read_epoch):
    orders = {seed: tuple(read_epoch(files, packing_seed=seed)[1].packing.file_order) for seed in (None, 0, 1, 123)}
    assert orders[None] == (0, 1, 2)
    assert len(set(orders.values())) > 2
    plan = PackingPlan(tuple("abcde"), (1,) * 5, np.dtype("<u2"), EOS, 16, 2, 123, False, False)
    assert plan.file_order() == [3, 1, 4, 2, 0], "the reference's, of five files"


def test_repeated_files_are_packed_again(files, read_epoch):
    _, data, batches = read_epoch(files, repeat=2, packing_group=8)
    ids = np.concatenate([batch.tokens_BT[batch.weights_BT.cumsum(axis=1) > 0] for batch in batches])
    assert [part.path for part in data.parts] == files * 2
    once = sum(len(d[:16]) for path in files for d in documents_of(path))
    assert sum(data.packing.summary["tokens"]) == 2 * once
    assert ids.size > once


def test_hosts_workers_and_restarts_see_the_same_rows(files, make_config):
    def opened(**data):
        cfg = make_config({"x": files}, batch=4, packing="best_fit", document_masking=True, packing_group=2, **data)
        return make_batches(cfg, resolve(cfg))

    straight = opened()
    want = [next(straight) for _ in range(30)]  # more than one epoch
    state = None
    for number, batches in enumerate((opened(workers=2), opened(prefetch=0))):
        if state is not None:
            batches.set_state(state)
        for batch in want[15 * number:15 * number + 15]:
            got = next(batches)
            for name in ("tokens_BT", "segments_BT", "weights_BT"):
                assert np.array_equal(getattr(got, name), getattr(batch, name))
        state = batches.get_state()
        batches.close()
    # A host that needs some rows reads exactly those.
    for rows in ([0, 1], [3], [1, 2]):
        source = StepSource(straight._order, straight._reader, np.array(rows), straight._rules)
        got = source[7]
        assert np.array_equal(got["tokens"], want[7].tokens_BT[rows])
        assert np.array_equal(got["segments"], want[7].segments_BT[rows])
        assert np.array_equal(got["real"] - 1, want[7].weights_BT[rows].sum(axis=1))
    straight.close()


def test_packing_is_worked_out_once(files, read_epoch, monkeypatch):
    cfg, data, batches = read_epoch(files)
    [path] = Path(cfg.output_dir, "data_order").glob("packing_*.bin")
    good = path.read_bytes()
    with monkeypatch.context() as context:
        context.setattr(packing, "_write", lambda *_: pytest.fail("worked out again"))
        assert resolve(cfg).fingerprint == data.fingerprint
    for damaged in (good[:-1], good + b" ", good[:100], b"", b"x" * len(good)):
        path.write_bytes(damaged)
        assert resolve(cfg).fingerprint == data.fingerprint
        assert path.read_bytes() == good
    monkeypatch.setattr(packing, "FILES_AT_ONCE", 1)
    path.unlink()
    assert resolve(cfg).packing.summary == data.packing.summary
    assert batches


def test_fingerprint_knows_every_setting_and_the_result(files, read_epoch, monkeypatch):
    prints = {read_epoch(files, **change)[1].fingerprint
              for change in ({}, {"packing_group": 3}, {"packing_seed": 1}, {"packing": "chunk", "packing_group": 8},
                             {"sequence_length": 32})}
    assert len(prints) == 5
    cfg, data, _ = read_epoch(files)
    assert resolve(cfg).fingerprint == data.fingerprint
    # Another CPU whose sort leaves ties in another order makes another packing, and must not continue this run.
    [path] = [path for path in Path(cfg.output_dir, "data_order").glob("packing_*.bin")
              if packing._open(path).summary == data.packing.summary]
    path.unlink()
    monkeypatch.setattr(packing, "sort_longest_first",
                        lambda lengths, stable: np.lexsort((-np.arange(len(lengths)), -lengths)))
    assert resolve(cfg).fingerprint != data.fingerprint


def test_documents_from_companions(files, read_epoch, tmp_path):
    for path in files:
        tokens = len(np.fromfile(path, np.uint16))
        with gzip.open(Path(path).with_suffix(".csv.gz"), "wt") as file:  # every 5 tokens, whatever the ids say
            file.writelines(f"{start},{min(start + 5, tokens)},id\n" for start in range(0, tokens, 5))
    cfg, data, batches = read_epoch(files, document_boundaries="csv", sequence_length=12)
    # Two documents of 5 fit beside each other; the padding behind them is a third segment.
    numbers = np.concatenate([batch.segments_BT for batch in batches if batch.weights_BT.sum() == 9])
    assert len(numbers) > 100
    assert (numbers == np.repeat([0, 1, 2], [5, 5, 2])).all()
    tokens = np.concatenate([batch.tokens_BT[0][:10] for batch in batches if batch.weights_BT.sum() == 9])
    assert (tokens == EOS).any()
    companion = Path(files[0]).with_suffix(".csv.gz")
    with gzip.open(companion, "wt") as file:
        file.write("0,4\n")
    assert resolve(cfg).fingerprint != data.fingerprint
    shutil.rmtree(cfg.output_dir)
    companion.unlink()
    with pytest.raises(DataError, match=r"a.csv.gz: No such file.*document_boundaries: eos"):
        resolve(cfg)


def test_file_without_documents_is_refused_and_nothing_is_left(write_tokens, make_config):
    cfg = make_config({"x": [write_tokens("a.npy", 200), write_tokens("b.npy", [2, 3, EOS] * 40)]}, batch=1,
                      packing="best_fit")
    with pytest.raises(DataError, match=r"a.npy: no end of document \(id 0\)"):
        resolve(cfg)
    assert [path.suffix for path in Path(cfg.output_dir, "data_order").iterdir()] == [".lock"]


def test_bad_id_in_a_packed_document_is_named_by_its_place(files, make_config):
    cfg = make_config({"x": files}, batch=1, packing="best_fit")
    data = resolve(cfg)
    with open(files[1], "r+b") as file:
        file.seek(20)
        file.write(np.array([1000], "<u2").tobytes())
    batches = make_batches(cfg, data)
    with pytest.raises(DataError, match=r"b.npy: id 1000 at byte offset 20 is not below vocab_size 1000"):
        list(itertools.islice(batches, data.n_instances))
    batches.close()


def test_too_few_packed_documents_are_refused(files, make_config):
    with pytest.raises(DataError, match=r"instances of packed documents, but train.global_batch is 5000"):
        resolve(make_config({"x": files}, batch=5000, packing="best_fit"))


def test_describe_counts_real_tokens(files, make_config):
    cfg = make_config({"x": files[:1], "y": files[1:]}, batch=4, packing="best_fit")
    batches = make_batches(cfg, resolve(cfg))
    info = batches.describe()
    batches.close()
    assert json.loads(json.dumps(info)) == info
    kept = {name: sum(len(d[:16]) for path in paths for d in documents_of(path))
            for name, paths in (("x", files[:1]), ("y", files[1:]))}
    assert {name: row["tokens"] for name, row in info["sources"].items()} == kept
    assert sum(row["share"] for row in info["sources"].values()) == pytest.approx(1)
    assert info["tokens_per_epoch"] == sum(kept.values())
    assert info["packing"]["padding"] == pytest.approx(1 - sum(kept.values()) / 16 / info["instances_per_epoch"])


def test_what_stands_before_a_document_does_not_change_its_share(write_tokens, read_epoch):
    """[A|B] and [A'|B]: B's tokens, targets, weights and segment are the same; the model's part is tested there."""
    rows = {}
    for name, first in (("one", 2), ("other", 500)):
        a, b = [*range(first, first + 9), EOS], [*range(900, 904), EOS]
        _, data, [batch] = read_epoch([write_tokens(f"{name}.npy", [*a, *b])])
        assert data.n_instances == 1
        assert batch.segments_BT.tolist() == [[0] * 10 + [1] * 5 + [2]]
        assert batch.weights_BT.tolist() == [[1.0] * 14 + [0.0] * 2]
        rows[name] = batch
    one, other = rows["one"], rows["other"]
    assert not np.array_equal(one.tokens_BT[:, :9], other.tokens_BT[:, :9])
    for name in ("tokens_BT", "targets_BT", "weights_BT"):
        assert np.array_equal(getattr(one, name)[:, 10:], getattr(other, name)[:, 10:])


@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_first_fit_agrees_with_a_slow_one(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 300).tolist()
    spaces, want = [], []
    for length in lengths:
        number = next((i for i, space in enumerate(spaces) if space >= length), len(spaces))
        spaces += [capacity] * (number == len(spaces))
        spaces[number] -= length
        want.append(number)
    assert first_fit(lengths, capacity).tolist() == want


@pytest.mark.parametrize("kind", ["best_fit", "first_fit", "padded"])
@pytest.mark.parametrize("pad_id", [EOS, PAD])
def test_documents_around_the_length_of_an_instance(write_tokens, read_epoch, kind, pad_id):
    """Lengths L-1, L, L+1, 3L and of an end of document alone, L = 16: cut ones end in their own segment."""
    lengths = [15, 16, 17, 48, 1, 2, 5]
    documents = [[*(100 * i + np.arange(n - 1) % 90 + 2), EOS] for i, n in enumerate(lengths, 1)]
    path = write_tokens("a.npy", np.concatenate(documents))
    group = {} if kind == "padded" else {"packing_group": 1}
    _, data, batches = read_epoch([path], packing=kind, pad_id=pad_id, **{"packing_group": 8} | group)
    kept = sorted([int(i) for i in document[:16]] for document in documents)
    read = []
    for batch in batches:
        tokens, numbers, real = batch.tokens_BT[0], batch.segments_BT[0], int(batch.real_B[0])
        read += [tokens[:real][numbers[:real] == number].tolist() for number in np.unique(numbers[:real])]
        assert batch.weights_BT[0].tolist() == [1.0] * (real - 1) + [0.0] * (17 - real)
    assert sorted(read) == kept, "each segment is one document"
    assert len(batches) == {"best_fit": 5, "first_fit": 5, "padded": 7}[kind]
    tokens = sum(map(len, kept))
    assert reading(data) == {"tokens": sum(lengths), "trained": tokens - len(batches), "dropped": sum(lengths) - tokens,
                             "padding": pytest.approx(1 - tokens / 16 / len(batches))}


def test_first_fit_keeps_the_order_of_documents(write_tokens, read_epoch):
    lengths = [10, 3, 12, 3, 4]
    path = write_tokens("a.npy", np.concatenate([[*(100 * i + np.arange(n - 1) + 2), EOS]
                                                 for i, n in enumerate(lengths, 1)]))
    _, data, _ = read_epoch([path], packing="first_fit")
    documents, first = data.packing.arrays()
    assert [documents["length"][a:b].tolist() for a, b in itertools.pairwise(first.tolist())] == [[10, 3, 3], [12, 4]]
