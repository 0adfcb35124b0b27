"""Every kind of source gives the same documents with their places, and says where a record is no document."""

import gzip
import json
import os
import sys

import numpy as np
import pytest

from maxtext.data import DataError, text_source
from maxtext.data.command import run_prepare as run
from maxtext.data.corpus import open_source, read_source, read_units
from maxtext.data.text_records import parse_example
from maxtext.data.text_source import Bad
from tests.data.record_files import TEXTS, example, field, jsonl, rows, tfrecord, varint, write_megatron, write_tfds
from tests.materials import imported

BOM = b"\xef\xbb\xbf"


def read(path, **options):
    return list(read_source(open_source("d", path, **options)))


VARIANTS = {
    "plain": jsonl(), "byte-order mark": BOM + jsonl(), "carriage returns": jsonl(end="\r\n"),
    "no final newline": jsonl()[:-1], "blank lines": jsonl().replace(b"\n", b"\n\n \r\n"),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_are_the_same_documents_however_they_are_written(tmp_path, name, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl.zst":
        pa = pytest.importorskip("pyarrow")
        with pa.output_stream(path, compression="zstd") as file:
            file.write(VARIANTS[name])
    else:
        path.write_bytes(gzip.compress(VARIANTS[name]) if suffix.endswith("gz") else VARIANTS[name])
    documents = read(path)
    assert [document.text for document in documents] == TEXTS
    lines = [3 * i + 1 if name == "blank lines" else i + 1 for i in range(20)]
    assert [(document.file, document.place) for document in documents] == [(path.name, line) for line in lines]


def test_a_line_of_50_megabytes_is_a_document(tmp_path):
    long = [*TEXTS[:3], "long " * 10_000_000, *TEXTS[3:]]
    (tmp_path / "a.jsonl").write_bytes(jsonl(long))
    documents = read(tmp_path / "a.jsonl")
    assert [document.text == text for document, text in zip(documents, long, strict=True)] == [True] * 21


@pytest.mark.parametrize("unit", [1, 100, 300, 1 << 20])
def test_a_large_file_is_cut_between_lines_with_the_same_numbers(tmp_path, monkeypatch, unit):
    from maxtext.data import text_files

    for data in (BOM + jsonl(), jsonl()[:-1], VARIANTS["blank lines"]):
        (tmp_path / "a.jsonl").write_bytes(data)
        whole = read(tmp_path / "a.jsonl")
        for block in (7, 1 << 20):
            with monkeypatch.context() as patch:
                patch.setattr(text_files, "UNIT_BYTES", unit)
                patch.setattr(text_files, "COUNT_BLOCK", block)
                source = open_source("d", tmp_path / "a.jsonl")
                assert list(read_source(source)) == whole
                assert sum(part.size for part in source.units) == len(data)
                assert len(source.units) >= min(20, len(data) // (2 * unit))


@pytest.mark.parametrize(("line", "why"), [
    (b'{"text": "bad \xff"}', "byte 0xff in column 15 is not UTF-8"),
    (b'{"txt": "x"}', 'expected an object with a string under "text"'),
    (b'{"text": null}', 'expected an object with a string under "text"'),
    (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "not JSON that can be read: Exceeds the limit (4300 digits)"),
    (b'{"text": ' + b"[" * 100_000, "JSON that is nested too deeply"),
    (b'{"text": "x", "id": "a\\ud800"}', "character 1 of the id is a lone surrogate"),
])
def test_a_bad_line_is_an_error_with_its_place_or_counted(tmp_path, capsys, line, why):
    lines = jsonl().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join([*lines[:7], line + b"\n", *lines[7:12], line + b"\n", *lines[12:]]))
    with pytest.raises(DataError, match=r"a.jsonl:8: ") as error:
        read(path)
    assert why in str(error.value)
    found = list(read_units(open_source("d", path).units, "d"))
    assert [document.text for document in found if not isinstance(document, Bad)] == TEXTS
    assert [bad.where for bad in found if isinstance(bad, Bad)] == [f"{path}:8", f"{path}:14"]

    argv = ["--out", str(tmp_path / "out"), "--source", f"d={path}", "--tokenizer", "bytes", "--heldout-fraction",
            "d=0"]
    assert run(argv) == 2
    assert f"{path}:8: {why}" in (printed := capsys.readouterr().err)
    assert "--max-bad N" in printed
    assert run([*argv, "--max-bad", "1"]) == 2
    assert "2 bad records, but --max-bad is 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*argv, "--max-bad", "2"]) == 0
    assert "left out: 2 bad" in (printed := capsys.readouterr().out)
    assert f"{path}:14: {why}" in printed
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["sources"]["d"]["train"]["documents"] == 20


def test_text_with_a_bad_byte_is_named_by_line(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"one\n" + b"word " * 500 + b"\n\n" + b"tw\xff\n" + b"word " * 500 + b"\n\nend")
    found = list(read_units(open_source("d", tmp_path / "book.txt").units, "d"))
    assert found[1] == Bad(f"{tmp_path / 'book.txt'}:4", "byte 0xff in column 3 is not UTF-8")
    assert [document.place for document in found[::2]] == [1, 7]


def test_folders_and_globs_take_all_formats_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.jsonl").write_bytes(jsonl(TEXTS[:2]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS[2:4])))
    (tmp_path / "c.txt").write_text(TEXTS[4], newline="")
    assert [(d.name, d.text) for d in read(tmp_path)] == [
        ("a.jsonl.gz:1", TEXTS[2]), ("a.jsonl.gz:2", TEXTS[3]), ("c.txt", TEXTS[4]), ("b/x.jsonl:1", TEXTS[0]),
        ("b/x.jsonl:2", TEXTS[1])]
    assert [d.name for d in read(f"{tmp_path}/**/*.jsonl*")] == ["a.jsonl.gz:1", "a.jsonl.gz:2", "b/x.jsonl:1",
                                                                 "b/x.jsonl:2"]


def test_a_name_may_have_the_mark_of_a_split(tmp_path):
    (tmp_path / "c#").mkdir()
    (tmp_path / "c#" / "a.txt").write_text("text")
    assert [d.text for path in (tmp_path / "c#", tmp_path / "c#" / "a.txt") for d in read(path)] == ["text"] * 2
    with pytest.raises(DataError, match=r"a.txt#train: only a data set in a folder has splits"):
        read(tmp_path / "c#" / "a.txt#train")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "m.bin"])
def test_a_file_that_is_gone_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(jsonl())
    if name == "m.bin":
        write_megatron(tmp_path / "m", [[[1, 2]]], "<u2", 8)
    source = open_source("d", tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: .*No such file"):
        list(read_source(source))
    if name == "m.bin":
        with pytest.raises(DataError, match=r"m.idx: cannot read the index of .*m.bin: No such file"):
            read(tmp_path / "m")


def test_damaged_compressed_data_is_refused(tmp_path):
    data = bytearray(gzip.compress(jsonl()))
    data[20:29] = b"\xff" * 9
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(DataError, match=r"a.jsonl.gz: cannot read \(Error -3"):
        read(tmp_path / "a.jsonl.gz")


def test_cut_compressed_files_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    data = os.urandom(60_000).hex()
    with pa.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as file:
        file.write(jsonl([data, data]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl([data, data])))
    for name in ("a.jsonl.zst", "a.jsonl.gz"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1000])
        with pytest.raises(DataError, match=f"{name}: cannot read"):
            read(tmp_path / name)


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    table = pa.table({"body": TEXTS, "id": [f"n{i}" for i in range(20)], "x": range(20)})
    pq.write_table(table, path, row_group_size=6)
    source = open_source("d", path, "body")
    assert len(source.units) == 4
    documents = list(read_source(source))
    assert [(d.name, d.text, d.place) for d in documents] == [(f"n{i}", t, i + 1) for i, t in enumerate(TEXTS)]
    with pytest.raises(DataError, match=r"a.parquet: has no column 'text' but body, id, x; .*--text-key"):
        open_source("d", path)
    pq.write_table(pa.table({"text": [*TEXTS[:3], None]}), path)
    with pytest.raises(DataError, match=r'a.parquet:4: expected an object with a string under "text"'):
        read(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file"):
        read(path)


@pytest.mark.parametrize("kind", ["example", "json"])
def test_array_record(tmp_path, kind, monkeypatch):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.array_record-00000-of-00001"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows():
        writer.write(json.dumps(row).encode() if kind == "json" else
                     example(**{key: value.encode() for key, value in row.items()}))
    writer.write(b"neither")
    writer.write(b'{"text": ' + b"[" * 100_000)
    writer.close()
    monkeypatch.setattr(text_source, "UNIT_BYTES", 500)
    source = open_source("d", path)
    assert len(source.units) > 2
    found = list(read_units(source.units, "d"))
    assert [(d.name, d.text, d.place) for d in found[:-2]] == [(f"n{i}", t, i + 1) for i, t in enumerate(TEXTS)]
    assert [bad.where for bad in found[-2:]] == [f"{path}:21", f"{path}:22"]
    assert all("neither a tf.train.Example nor JSON" in bad.why for bad in found[-2:])


def test_tfrecord(tmp_path):
    path = tmp_path / "a.tfrecord"
    data = tfrecord([example(text=text.encode()) for text in TEXTS])
    path.write_bytes(data)
    assert [(d.name, d.text) for d in read(path)] == [(f"a.tfrecord:{i + 1}", t) for i, t in enumerate(TEXTS)]
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    with pytest.raises(DataError, match=r"a.tfrecord:1: the checksum of the record"):
        read(path)
    path.write_bytes(data[:-30])
    with pytest.raises(DataError, match=r"a.tfrecord:20: the file ends inside this record"):
        read(path)
    path.write_bytes(b"no record at all, but text")
    with pytest.raises(DataError, match=r"a.tfrecord:1: the length of the record is damaged"):
        read(path)


def test_example_has_its_single_values_alone():
    def feature(name: bytes, kind: int, value: bytes) -> bytes:
        return field(1, field(1, name) + field(2, field(kind, value)))

    record = field(1, feature(b"text", 1, field(1, b"hi")) + feature(b"n", 3, field(1, varint(300)))
                   + feature(b"many", 1, field(1, b"a") + field(1, b"b")) + feature(b"x", 2, field(1, b"1234")))
    assert parse_example(record) == {"text": b"hi", "n": 300}
    for broken in (field(9, b""), record[:-1], b"plain text"):
        with pytest.raises(ValueError, match=r"belong|no end|wire"):
            parse_example(broken)


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_megatron_pairs_keep_their_tokens(tmp_path, capsys, dtype, code):
    documents = [[list(text.encode()), [256]] if i % 2 else [list(text.encode())] for i, text in enumerate(TEXTS)]
    write_megatron(tmp_path / "m", documents, dtype, code)
    argv = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--heldout-fraction", "d=0"]
    assert run([*argv, "--source", f"d={tmp_path / 'm'}"]) == 0
    tokens = np.fromfile(tmp_path / "out" / "train" / "d-00000.npy", "<u2")
    assert tokens.tolist() == [i for text in TEXTS for i in [*text.encode(), 256]], "one end of document each"
    write_megatron(tmp_path / "m", [[[1, 2, 900]]], dtype, code)
    assert run([*argv, "--source", f"d={tmp_path / 'm.bin'}", "--force"]) == 2
    assert "document d/m.bin:1: id 900 is not below the 259 ids" in capsys.readouterr().err
    (tmp_path / "m.bin").write_bytes(b"12")
    assert run([*argv, "--source", f"d={tmp_path / 'm.bin'}", "--force"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_hugging_face_folder(tmp_path, monkeypatch):
    datasets = imported("datasets")
    table = datasets.Dataset.from_list(rows())
    datasets.DatasetDict(train=table, test=table.select(range(3))).save_to_disk(tmp_path / "set")
    table.save_to_disk(tmp_path / "one")
    monkeypatch.setattr(text_source, "UNIT_BYTES", 1000)
    for path, count in ((tmp_path / "set", 20), (f"{tmp_path / 'set'}#test", 3), (tmp_path / "one", 20)):
        documents = read(path)
        assert [(d.name, d.text, d.place) for d in documents] == [
            (f"n{i}", t, i + 1) for i, t in enumerate(TEXTS[:count])]
    with pytest.raises(DataError, match="has no split 'none' but train, test"):
        read(f"{tmp_path / 'set'}#none")


def test_tensorflow_datasets_folder(tmp_path):
    folder = write_tfds(tmp_path)
    documents = read(folder)
    assert sorted((d.name, d.text) for d in documents) == sorted((f"n{i}", t) for i, t in enumerate(TEXTS))
    assert [d.place for d in documents] == list(range(1, 21))
    assert len(read(f"{folder}#test")) == 3
    assert "tensorflow" not in sys.modules


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "datasets", "google_crc32c"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "a.tfrecord").write_bytes(b"")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text("{}")
    for path, message in (("a.parquet", r"needs pyarrow, .* pip install 'maxtext\[data\]'"),
                          ("a.tfrecord", r"needs google_crc32c, .*\[data\]"),
                          ("set", r"needs datasets, .*\[datasets\]")):
        with pytest.raises(DataError, match=message):
            read(tmp_path / path)
