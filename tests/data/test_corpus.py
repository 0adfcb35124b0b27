"""Readers: exact text, stable names, errors with file and line."""

import gzip
import json

import pytest

from maxtext.data import DataError
from maxtext.data.corpus import STDLIB_FILE_BYTES, open_source, read_source, read_stdlib, read_topics


def read(name, path):
    return list(read_source(open_source(name, path)))


def test_folder_keeps_text_and_sorts_names(tmp_path):
    for name, data in {"b/two.md": b"two\r\n", "a.txt": b"\xef\xbb\xbfone", "b/one.py": b"x\n", "c.bin": b"no",
                       ".hidden/x.txt": b"no", "b/.x.txt": b"no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    documents = read("d", tmp_path)
    assert [(d.name, d.text, d.domain) for d in documents] == [
        ("a.txt", "\ufeffone", "d"), ("b/one.py", "x\n", "d"), ("b/two.md", "two\r\n", "d")]


def test_text_file_is_cut_at_blank_lines_without_loss(tmp_path):
    text = "".join(f"paragraph {i} " * 40 + "\r\n\n" for i in range(20)) + "tail\x0bof text"
    (tmp_path / "book.txt").write_bytes(text.encode())
    documents = read("d", tmp_path / "book.txt")
    assert "".join(d.text for d in documents) == text
    assert len(documents) == 5
    assert documents[0].name == "book.txt:1"
    assert documents[1].name == "book.txt:11"


def test_jsonl(tmp_path):
    rows = [{"text": "one", "id": "x"}, {"text": "é\n\u2028"}, {"text": "three", "id": 7}]
    data = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (tmp_path / "a.jsonl").write_text(data)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(data)
    assert [(d.name, d.text) for d in read("d", tmp_path / "a.jsonl")] == [
        ("x", "one"), ("a.jsonl:2", "é\n\u2028"), ("7", "three")]
    assert [d.text for d in read("d", tmp_path / "a.jsonl.gz")] == ["one", "é\n\u2028", "three"]


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "x"', r"a.jsonl:2: not JSON: .* column 13"),
    ('{"txt": "x"}', r'a.jsonl:2: expected an object with a string under "text"'),
    ('["x"]', r"a.jsonl:2: expected an object"),
    ('{"text": 3}', r"a.jsonl:2: expected an object"),
    ('{"text": "a\\ud800"}', r"a.jsonl:2: character 1 of the text is a lone surrogate"),
    ('{"text": "a", "id": [1]}', r'a.jsonl:2: "id" must be'),
    (b'{"text": "\xff"}', r"a.jsonl:2: byte 0xff in column 11 is not UTF-8"),
])
def test_jsonl_errors_name_file_and_line(tmp_path, line, message):
    data = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok", "id": "same"}\n' + data + b"\n")
    with pytest.raises(DataError, match=message):
        read("d", tmp_path / "a.jsonl")


def test_other_errors_name_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xe9\n")
    with pytest.raises(DataError, match=r"a.txt:2: byte 0xe9 at offset 7 is not UTF-8"):
        read("d", tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        open_source("d", tmp_path / "none")
    (tmp_path / "a.pdf").write_bytes(b"")
    with pytest.raises(DataError, match=r"d=.*a.pdf: expected a folder"):
        open_source("d", tmp_path / "a.pdf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"d=.*empty: no .txt, .md, .py, .jsonl.* file in this folder"):
        read("d", tmp_path / "empty")
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a.jsonl.gz: cannot read"):
        read("d", tmp_path / "a.jsonl.gz")


def test_standard_library_has_code_and_neither_tests_nor_topics():
    documents = list(read_stdlib())
    names = [d.name for d in documents]
    assert len(documents) > 200
    assert names == sorted(set(names))
    assert "textwrap.py" in names
    assert not [n for n in names if {"test", "tests", "site-packages", "pydoc_data", "encodings"} & set(n.split("/"))]
    assert max(len(d.text.encode()) for d in documents) <= STDLIB_FILE_BYTES
    assert [d.name for d in read_stdlib()] == names


def test_topics_do_not_repeat_each_other():
    topics = {d.name: d.text for d in read_topics()}
    assert len(topics) > 40
    paragraphs = {name: {" ".join(p.split()) for p in text.split("\n\n") if len(p) > 60}
                  for name, text in topics.items()}
    for name, own in paragraphs.items():
        others = set().union(*(paragraphs[other] for other in topics if len(topics[other]) > len(topics[name])))
        assert len(own & others) <= len(own) / 2, name
