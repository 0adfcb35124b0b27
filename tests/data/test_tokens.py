"""Resolving and checking token files: every refusal names file and place; parts, repeats, mixes and documents."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext.config.schema import SourceConfig
from maxtext.data import DataError
from maxtext.data.preflight import check_ids
from maxtext.data.reader import InstanceReader
from maxtext.data.tokens import DOCUMENT_BLOCK_TOKENS, Part, read_documents, resolve

ORACLE = Path(__file__).resolve().parents[1] / "oracles" / "data_loader"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())


def refused(cfg, *patterns):
    with pytest.raises(DataError) as error:
        resolve(cfg)
    for pattern in patterns:
        assert re.search(pattern, str(error.value)), str(error.value)
    return str(error.value)


@pytest.mark.parametrize("run", EXPECTED["runs"], ids=["batch8", "batch4"])
def test_instances_are_those_of_the_reference(make_config, run):
    paths = [str(ORACLE / name) for name in EXPECTED["files"]]
    data = resolve(make_config({"text": paths}, batch=run["gbs_instances"], sequence_length=run["seq"],
                               **{key: EXPECTED[key] for key in ("vocab_size", "eos_id", "pad_id")}))
    assert data.dtype == EXPECTED["dtype"]
    assert data.n_instances == run["num_instances"]
    assert [part.n_tokens for part in data.parts] == list(EXPECTED["files"].values())
    ends = np.cumsum([part.n_instances for part in data.parts])
    assert [[int(end) - part.n_instances, int(end)] for part, end in zip(data.parts, ends, strict=True)] \
        == run["file_offsets"]
    tokens = InstanceReader(data).read(np.array([0, run["num_instances"] - 1]))
    assert tokens.tolist() == [run["instance0_tokens"], run["last_instance_tokens"]]


def test_tails_are_dropped_by_file_and_places_are_exact(make_config, write_tokens):
    a, b = write_tokens("a.npy", np.arange(2, 2 + 37)), write_tokens("b.npy", np.arange(100, 100 + 50))
    data = resolve(make_config({"x": [a, b]}, batch=2))
    assert data.parts == (Part("x", a, 37, 2), Part("x", b, 50, 3))
    reader = InstanceReader(data)
    assert [reader.locate(i) for i in range(5)] == [(a, 0), (a, 16), (b, 0), (b, 16), (b, 32)]
    assert reader.read(np.array([2, 1]))[:, 0].tolist() == [100, 18]


def test_repeat_gives_whole_passes_then_the_first_part_of_each_file(make_config, write_tokens):
    a, b, c = (write_tokens(f"{name}.npy", count) for name, count in (("a", 16 * 10 + 3), ("b", 16 * 5), ("c", 16 * 3)))
    sources = {"x": SourceConfig(paths=(a, b), repeat=2.5), "y": [c]}
    data = resolve(make_config(sources))
    assert [(part.source, part.path, part.n_instances) for part in data.parts] == [
        ("x", a, 10), ("x", b, 5), ("x", a, 10), ("x", b, 5), ("x", a, 5), ("x", b, 2), ("y", c, 3)]
    assert data.n_instances == 40
    reader = InstanceReader(data)
    assert reader.locate(15) == (a, 0), "each occurrence starts again at the beginning of the file"
    assert reader.locate(30) == (a, 0)
    assert reader.locate(36) == (b, 16)
    half = resolve(make_config({"x": SourceConfig(paths=(a,), repeat=0.5)}, batch=2))
    assert [part.n_instances for part in half.parts] == [5]
    # 1.1 as binary is a little more than 1.1, and 0.7 a little less: the decimal that was written counts.
    d = write_tokens("d.npy", 16 * 70)
    for repeat, count in ((1.1, 77), (0.7, 49), (3.0, 210), (1e-2, 0)):
        cfg = make_config({"x": SourceConfig(paths=(d,), repeat=repeat), "y": [c]}, batch=2)
        assert sum(part.n_instances for part in resolve(cfg).parts) == count + 3


def test_paths_globs_and_roots(make_config, write_tokens, tmp_path):
    for name in ("r/b.npy", "r/a.npy", "r/c.bin"):
        write_tokens(name, 64)
    cfg = make_config({"x": SourceConfig(paths=("c.bin", "*.npy"), root=str(tmp_path / "r"))})
    assert [Path(part.path).name for part in resolve(cfg).parts] == ["c.bin", "a.npy", "b.npy"]
    refused(make_config({"x": SourceConfig(paths=("*.none",), root=str(tmp_path / "r"))}),
            r"data.sources.x.paths: no file matches .*/r/\*.none")


def test_mix_file(make_config, write_tokens, tmp_path):
    for name in ("root/toks/two.npy", "root/toks/one.npy"):
        write_tokens(name, 64)
    mix = tmp_path / "mix.txt"
    mix.write_text("# comment\nweb, {TOKENIZER}/two.npy\n\ncode,{TOKENIZER}/one.npy\n")
    source = SourceConfig(mix=str(mix), root=str(tmp_path / "root"), tokenizer_placeholder="toks")
    assert [Path(part.path).name for part in resolve(make_config({"x": source})).parts] == ["two.npy", "one.npy"]
    mix.write_text("web,a.npy\nno comma\n")
    refused(make_config({"x": source}), r"mix.txt:2: expected label,path but found 'no comma'")
    mix.write_text("\n")
    refused(make_config({"x": source}), "names no file")
    refused(make_config({"x": SourceConfig(mix=str(tmp_path / "none.txt"))}), "none.txt: no such mix file")
    refused(make_config({"x": SourceConfig(mix=str(mix), paths=("a",))}), "x: give paths or mix, not both")
    mix.write_text("web,a/{TOKENIZER}/b.npy\n")
    refused(make_config({"x": SourceConfig(mix=str(mix), root="gs://bucket/")}),
            r"gs://bucket/a/allenai/dolma3-tokenizer/b.npy: this URL cannot be opened .*mount the bucket .*or copy")


def test_every_bad_file_is_named_at_once(make_config, write_tokens, tmp_path):
    good = write_tokens("good.npy", 400)
    empty, odd = write_tokens("empty.npy", np.zeros(0)), write_tokens("odd.npy", 401)
    Path(odd).write_bytes(Path(odd).read_bytes()[:-1])
    header = tmp_path / "header.npy"
    np.save(header, np.arange(2, 100, dtype=np.uint16))
    bad_id = write_tokens("id.npy", [5] * 300 + [1000] + [5] * 10)
    missing = str(tmp_path / "missing.npy")
    cfg = make_config({"x": [good, empty, odd, str(header), bad_id, missing, str(tmp_path)]})
    message = refused(
        cfg, r"empty.npy: is empty \(0 bytes\)", r"odd.npy: 801 bytes .* 2 bytes \(1 left over at byte offset 800\)",
        r"header.npy: starts with a .npy header at byte offset 0",
        r"id.npy: id 1000 at byte offset 600 is not below vocab_size 1000", r"missing.npy: No such file",
        r": is a folder")
    assert "good.npy" not in message
    assert message.count("\n") == 5


def test_bad_eval_file_is_refused_too(make_config, write_tokens):
    good, empty = write_tokens("good.npy", 400), write_tokens("empty.npy", np.zeros(0))
    refused(make_config({"x": [good]}, eval_sets={"held": [empty]}), "empty.npy: is empty")
    refused(make_config({"x": [good]}, eval_sets={"held": []}), "eval.sets.held.paths: is empty")
    data = resolve(make_config({"x": [good]}, eval_sets={"held": [good]}))
    assert data.eval_sets == {"held": (good,)}


def test_short_files_are_skipped_but_a_batch_must_exist(make_config, write_tokens):
    long, short = write_tokens("long.npy", 16 * 8), write_tokens("short.npy", 15)
    assert [part.n_instances for part in resolve(make_config({"x": [short, long]})).parts] == [0, 8]
    refused(make_config({"x": [short, write_tokens("less.npy", 16 * 7 + 15)]}),
            r"one epoch has 7 instances of data.sequence_length 16 tokens, but train.global_batch is 8: "
            r".*short.npy 15 // 16 = 0, .*less.npy 127 // 16 = 7")


@pytest.mark.parametrize(("written", "read", "count"), [("uint32", "uint16", 400), ("uint32", "uint16", 90_001),
                                                        ("uint16", "uint8", 400), ("uint32", "uint8", 400)])
def test_wider_file_read_as_narrower_is_refused(make_config, write_tokens, written, read, count):
    vocab = 256 if read == "uint8" else 1000
    tokens = np.random.default_rng(0).integers(2, vocab, count)
    path = write_tokens("wide.npy", tokens, np.dtype(written))
    refused(make_config({"x": [path]}, dtype=read, vocab_size=vocab),
            rf"wide.npy: looks like {written} tokens, read as {read}")
    resolve(make_config({"x": [path]}, dtype=written, vocab_size=vocab))


def test_large_ids_of_a_uint32_file_read_as_uint16_are_refused(make_config, write_tokens):
    tokens = np.random.default_rng(0).integers(2, 100278, 4000)
    path = write_tokens("wide.npy", tokens, np.uint32)
    refused(make_config({"x": [path]}, vocab_size=60000),
            r"wide.npy: (looks like uint32|id \d+ at byte offset \d+ is not below vocab_size 60000)")
    resolve(make_config({"x": [path]}, vocab_size=100278))


def test_narrower_file_read_as_wider_is_refused_with_a_hint(make_config, write_tokens):
    path = write_tokens("narrow.npy", 400, np.uint16)
    refused(make_config({"x": [path]}, dtype="uint32"),
            r"narrow.npy: id \d+ at byte offset 0 is not below vocab_size 1000; read as uint16 all ids fit")


def test_sampling_reaches_the_end_of_a_large_file(make_config, write_tokens):
    tokens = np.full(400_000, 5)
    tokens[-3] = 5000
    refused(make_config({"x": [write_tokens("a.npy", tokens)]}), r"a.npy: id 5000 at byte offset 799994")


def test_contradictions_of_the_settings_are_refused(make_config, write_tokens):
    path = write_tokens("a.npy", 400)
    refused(make_config({"x": [path]}, vocab_size=None, eos_id=None),
            "data.vocab_size: is not set", "data.eos_id: is not set")
    refused(make_config({"x": [path]}, eos_id=1000), "data.eos_id: 1000 is not below data.vocab_size 1000")
    refused(make_config({"x": [path]}, pad_id=5000), "data.pad_id: 5000")
    refused(make_config({"x": [path]}, model_vocab=999), "model.vocab_size: 999 is below the 1000 ids")
    refused(make_config({"x": [path]}, dtype="uint8"), "uint8 ends at 255, but data.vocab_size is 1000")
    refused(make_config({}), "data.sources: is empty")
    refused(make_config({"x": []}), "x: gives neither paths nor mix, and there is no data.prepared")


def prepared_config(make_config, folder, sources=None, **data):
    return make_config(sources, prepared=str(folder), model_vocab=data.pop("model_vocab", 512),
                       **{"vocab_size": None, "eos_id": None, "pad_id": None} | data)


def test_prepared_folder_supplies_everything(make_config, prepared):
    data = resolve(prepared_config(make_config, prepared))
    assert (data.vocab_size, data.eos_id, data.pad_id, data.dtype) == (512, 1, 2, np.uint16)
    assert [part.source for part in data.parts] == ["code", "prose"]
    assert set(data.eval_sets) == {"code", "prose"}
    assert data.token_bytes is not None
    assert data.token_bytes.shape == (512,)
    assert Path(data.tokenizer or "").is_file()


def test_sources_of_a_prepared_folder_can_be_weighted(make_config, prepared, write_tokens):
    cfg = prepared_config(make_config, prepared, {"prose": SourceConfig(repeat=3), "code": SourceConfig()})
    assert [part.source for part in resolve(cfg).parts] == ["prose"] * 3 + ["code"]
    mine = write_tokens("mine.npy", np.random.default_rng(0).integers(3, 512, 400))
    cfg = prepared_config(make_config, prepared, {"mine": [mine], "code": SourceConfig()})
    assert [part.source for part in resolve(cfg).parts] == ["mine", "code"]
    refused(prepared_config(make_config, prepared, {"pros": SourceConfig()}), "sources.pros: .* did you mean 'prose'")
    refused(prepared_config(make_config, prepared, {"mine": SourceConfig()}),
            "has only code, prose; name those, or drop it with data.sources.mine=null")


def test_prepared_folder_must_agree_with_the_config_and_itself(make_config, prepared, tmp_path):
    refused(prepared_config(make_config, prepared, vocab_size=600), "data.vocab_size: 600 contradicts .* with 512")
    refused(prepared_config(make_config, prepared, dtype="uint32"), "data.dtype: uint32 contradicts .* holds uint16")
    refused(prepared_config(make_config, prepared, model_vocab=500), "model.vocab_size: 500 is below the 512")
    refused(prepared_config(make_config, tmp_path / "none"), r"dataset.json: not found; write it with `maxtext")
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    (copy / "train" / "code-00000.npy").write_bytes(bytes(2000))
    refused(prepared_config(make_config, copy), r"code-00000.npy: 2000 bytes hold 1000 uint16 tokens, but the manifest")
    shutil.copytree(prepared, copy, dirs_exist_ok=True)
    resolve(prepared_config(make_config, copy))
    manifest = json.loads((copy / "dataset.json").read_text())
    for change, message in (({"version": 2}, "format version 2"), ({"format": "x"}, "not a data set"),
                            ({"sources": None}, "incomplete"), ({"dtype": "float32"}, "incomplete"),
                            ({"vocab_size": 511}, r"has shape \(512,\), but vocab_size is 511")):
        (copy / "dataset.json").write_text(json.dumps(manifest | change))
        refused(prepared_config(make_config, copy), message)
    (copy / "dataset.json").write_text("{")
    refused(prepared_config(make_config, copy), "cannot read")


def test_fingerprint_knows_content_order_and_cutting_but_not_the_folder(make_config, write_tokens):
    def of(*paths, **data):
        return resolve(make_config({"x": list(paths)}, batch=2, **data)).fingerprint

    tokens = np.random.default_rng(0).integers(2, 1000, 400)
    changed = tokens.copy()
    changed[7] = 3
    a, b = write_tokens("a.npy", tokens), write_tokens("b.npy", tokens)
    first = of(a, b)
    assert of(write_tokens("moved/a.npy", tokens), write_tokens("moved/b.npy", tokens)) == first
    others = {of(b, a), of(a), of(a, b, b), of(a, b, sequence_length=8),
              of(write_tokens("changed/a.npy", changed), b), of(write_tokens("cut/a.npy", tokens[:399]), b)}
    assert len(others | {first}) == 7


def test_check_ids_names_the_first_bad_id():
    check_ids(np.array([[3, 9]], np.uint32), 10, "f", 0)
    with pytest.raises(DataError, match="f: id 10 at byte offset 408 is not below vocab_size 10"):
        check_ids(np.array([1, 2, 10, 11, 2**32 - 1], np.uint32), 10, "f", 100)


def test_documents_are_read_whole_with_their_end(write_tokens):
    documents = [[5, 6, 0], [0], [7, 0]]
    a = write_tokens("a.npy", [5, 6, 0, 0, 7, 0, 8, 9])
    b = write_tokens("b.npy", [4, 0])
    read = list(read_documents([a, b], np.dtype("<u2"), 0))
    assert [ids.tolist() for ids in read] == [*documents, [4, 0]], "text after the last end of document is left out"
    with pytest.raises(DataError, match=r"c.npy: no end of document \(id 0\) in its 3 tokens"):
        list(read_documents([write_tokens("c.npy", [1, 2, 3])], np.dtype("<u2"), 0))
    with pytest.raises(DataError, match="is empty"):
        list(read_documents([write_tokens("d.npy", [])], np.dtype("<u2"), 0))


def test_documents_longer_than_a_block_stay_whole(write_tokens, monkeypatch):
    assert DOCUMENT_BLOCK_TOKENS > 1000
    tokens = np.random.default_rng(0).integers(0, 12, 5000)
    tokens[-1] = 0
    tokens[1000:3000] = 7
    path = write_tokens("a.npy", tokens)
    whole = list(read_documents([path], np.dtype("<u2"), 0))
    monkeypatch.setattr("maxtext.data.tokens.DOCUMENT_BLOCK_TOKENS", 64)
    blocks = list(read_documents([path], np.dtype("<u2"), 0))
    assert [ids.tolist() for ids in blocks] == [ids.tolist() for ids in whole]
    assert np.array_equal(np.concatenate(whole), tokens)
    assert max(map(len, whole)) > 2000
