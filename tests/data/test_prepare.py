"""`maxtext data prepare`: a split that never mixes, exact files, byte-identical repeats, no harm to other folders."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext.data import DataError
from maxtext.data.command import run_prepare as run
from maxtext.data.corpus import open_source, read_source
from maxtext.data.manifest import load_prepared
from maxtext.data.prepare import Options, prepare
from maxtext.data.scan import split_of
from maxtext.data.text_source import Document, Source
from maxtext.data.tokenizer import load_tokenizer, train_sentencepiece
from maxtext.data.tokens import read_documents

TEXT = Path(__file__).resolve().parents[1] / "fixtures" / "text"


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def source(folder: Path, name: str, texts: dict[str, str]) -> Source:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    return open_source(name, path)


def texts(count: int, word: str = "words") -> dict[str, str]:
    return {f"doc{i}": f"document {i} has some {word} and a number {i * i}\n" * 20 for i in range(count)}


def test_files_hold_the_documents_of_their_split(prepared):
    data = load_prepared(prepared)
    tokenizer = load_tokenizer(data.tokenizer)
    index = [json.loads(line) for line in (prepared / "files.jsonl").read_text().splitlines()]
    assert data.dtype == np.uint16
    assert (data.vocab_size, data.eos_id, data.pad_id) == (512, 1, 2)
    for part, files in (("train", data.train), ("heldout", data.heldout)):
        for domain, entries in files.items():
            rows = [row for row in index if (row["domain"], row["split"]) == (domain, part)]
            documents = list(read_documents([file.path for file in entries], data.dtype, data.eos_id))
            assert len(rows) == len(documents) > 0
            for row, ids in zip(rows, documents, strict=True):
                text = (TEXT / domain / row["name"]).read_bytes().decode()
                assert ids[-1] == data.eos_id
                assert data.eos_id not in ids[:-1]
                assert tokenizer.decode(ids) == text
                assert row["tokens"] == len(ids)
                assert row["sha256"] == hashlib.sha256(text.encode()).hexdigest()
                assert data.token_bytes[ids].sum(dtype=np.int64) == len(text.encode())


def test_manifest_counts_and_hashes_are_true(prepared):
    manifest = json.loads((prepared / "dataset.json").read_text())
    index = [json.loads(line) for line in (prepared / "files.jsonl").read_text().splitlines()]
    for domain, parts in manifest["sources"].items():
        for part in ("train", "heldout"):
            rows = [row for row in index if (row["domain"], row["split"]) == (domain, part)]
            entry = parts[part]
            assert entry["documents"] == len(rows)
            assert entry["tokens"] == sum(row["tokens"] for row in rows) == sum(f["tokens"] for f in entry["files"])
            assert entry["bytes"] == sum((TEXT / domain / row["name"]).stat().st_size for row in rows)
            for file in entry["files"]:
                data = (prepared / file["path"]).read_bytes()
                assert hashlib.sha256(data).hexdigest() == file["sha256"]
                assert len(data) == 2 * file["tokens"]
    model = (prepared / manifest["tokenizer"]["file"]).read_bytes()
    assert manifest["tokenizer"]["sha256"] == hashlib.sha256(model).hexdigest()


def test_no_held_out_document_is_in_training(prepared):
    index = [json.loads(line) for line in (prepared / "files.jsonl").read_text().splitlines()]
    split = {part: [row for row in index if row["split"] == part] for part in ("train", "heldout")}
    assert not {row["sha256"] for row in split["train"]} & {row["sha256"] for row in split["heldout"]}
    data = load_prepared(prepared)
    train = {domain: b"".join(Path(file.path).read_bytes() for file in files) for domain, files in data.train.items()}
    for domain, files in data.heldout.items():
        for ids in read_documents([file.path for file in files], data.dtype, data.eos_id):
            assert ids.tobytes() not in train[domain]


def test_the_tokenizer_sees_the_training_split_only(tmp_path, text_options, prepared):
    rows = [json.loads(line) for line in (prepared / "files.jsonl").read_text().splitlines()]
    kept = [(TEXT / row["domain"] / row["name"]).read_bytes().decode()
            for row in rows if row["split"] == "train"]
    assert train_sentencepiece(iter(kept), 512) == (prepared / "tokenizer.model").read_bytes()


def test_two_runs_are_byte_identical(tmp_path, text_options, prepared):
    _, written = prepare(text_options(tmp_path / "other_name" / "again"))
    assert written
    assert tree(tmp_path / "other_name" / "again") == tree(prepared)
    assert [path.name for path in (tmp_path / "other_name").iterdir()] == ["again"], "nothing temporary stays"


def test_prepare_is_idempotent_and_replaces_only_when_told(tmp_path, prepared, text_options):
    out = tmp_path / "data"
    shutil.copytree(prepared, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    manifest, written = prepare(text_options(out))
    assert not written
    assert manifest == json.loads((prepared / "dataset.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(DataError, match=r"other texts or options.*--force"):
        prepare(text_options(out, vocab_size=400))
    with pytest.raises(DataError, match="other texts or options"):
        prepare(text_options(out, heldout={"code": 0.2, "prose": 0.3}))
    assert tree(out) == tree(prepared)
    manifest, written = prepare(text_options(out, vocab_size=400, force=True))
    assert written
    assert manifest["vocab_size"] == 400
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_damaged_data_set_is_named(tmp_path, prepared, text_options):
    out = tmp_path / "data"
    shutil.copytree(prepared, out)
    file = out / "train" / "code-00000.npy"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train/code-00000.npy: missing or of the wrong size"):
        prepare(text_options(out))


def test_foreign_folder_is_never_replaced(tmp_path, text_options):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    for force in (False, True):
        with pytest.raises(DataError, match="is not empty and holds no data set"):
            prepare(text_options(tmp_path / "home", force=force))
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious"
    with pytest.raises(DataError, match="is a file"):
        prepare(text_options(tmp_path / "home" / "thesis.txt", force=True))
    with pytest.raises(DataError, match=r"below: cannot be made \(.*\); give --out a place that you may write"):
        prepare(text_options(tmp_path / "home" / "thesis.txt" / "below"))


def test_failure_leaves_nothing_behind(tmp_path, text_options, prepared):
    out = tmp_path / "data"
    shutil.copytree(prepared, out)
    with pytest.raises(DataError, match="--vocab-size 200000"):
        prepare(text_options(out, vocab_size=200000, force=True))
    assert tree(out) == tree(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_same_text_under_two_names_is_kept_once(tmp_path):
    first = texts(40)
    twins = first | {f"twin of {name}": text for name, text in first.items()} | {"empty": ""}
    sources = (source(tmp_path / "text", "a", twins),
               source(tmp_path / "text", "b", texts(40, "other") | {"c": first["doc3"]}))
    options = Options(tmp_path / "d", sources,
                      {"a": 0.3, "b": 0.3}, 320)
    straddling = [name for name in first if split_of(Document(name, "", "a"), 0.3)
                  != split_of(Document(f"twin of {name}", "", "a"), 0.3)]
    assert straddling, "the names alone would put the same text on both sides"
    manifest, _ = prepare(options)
    assert (manifest["duplicates_dropped"], manifest["empty_dropped"]) == (41, 1)
    rows = [json.loads(line) for line in (tmp_path / "d" / "files.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["sha256"] for row in rows}) == 80


def test_split_depends_on_the_name_alone():
    names = [f"name{i}" for i in range(2000)]
    held = [name for name in names if split_of(Document(name, "text", "d"), 0.1) == "heldout"]
    assert 140 < len(held) < 260
    assert all(split_of(Document(name, "other text", "d"), 0.1) == "heldout" for name in held)
    assert all(split_of(Document(name, "", "d"), 0.2) == "heldout" for name in held), "a larger fraction only adds"


def test_every_domain_needs_both_sides(tmp_path):
    with pytest.raises(DataError, match=r"source a: 3 training and 0 held-out documents with .* a=0.001"):
        prepare(Options(tmp_path / "d", (source(tmp_path / "text", "a", texts(3)),), {"a": 0.001}, 320))
    with pytest.raises(DataError, match=r"source a: 0 training"):
        prepare(Options(tmp_path / "d", (source(tmp_path / "text", "a", {}),), {"a": 0.5}, 320))
    manifest, _ = prepare(Options(tmp_path / "d", (source(tmp_path / "text", "a", texts(3)),), {"a": 0.0}, 320))
    assert manifest["sources"]["a"]["heldout"]["documents"] == 0
    assert load_prepared(tmp_path / "d").heldout == {}


def test_given_tokenizer_and_command_line(tmp_path, prepared, capsys):
    argv = ["--out", str(tmp_path / "d"), "--source", f"mine={TEXT / 'prose'}", "--tokenizer",
            str(prepared / "tokenizer.model"), "--heldout-fraction", "mine=0.3"]
    assert run(argv) == 0
    printed = capsys.readouterr().out
    assert "mine    train" in printed
    assert "vocabulary 512" in printed
    assert (tmp_path / "d" / "tokenizer.model").read_bytes() == (prepared / "tokenizer.model").read_bytes()
    assert run(argv) == 0
    assert "already holds this data set" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "message"), [
    (["--corpus", "python", "--source", "a=b"], "not both"),
    (["--source", "a"], "--source a: expected NAME=VALUE .*, such as --source mine=a$"),
    (["--source", "../a=x"], "expected NAME=VALUE"),
    (["--source", f"a={TEXT}", "--source", f"a={TEXT}"], "given twice"),
    (["--source", f"a={TEXT}", "--heldout-fraction", "b=0.1"], "there is no source b, only a"),
    (["--source", f"a={TEXT}", "--heldout-fraction", "a=1"], "from 0 to below 1"),
    (["--source", f"a={TEXT}", "--heldout-fraction", "a=nan"], "from 0 to below 1"),
    (["--source", f"a={TEXT}", "--tokenizer", "none.model"],
     "--tokenizer none.model: no such file; give .* tokenizer.json that is here, bytes, or tiktoken:NAME"),
    (["--source", f"a={TEXT}", "--tokenizer", __file__],
     f"^--tokenizer {re.escape(__file__)}: a tokenizer is a SentencePiece"),
    (["--source", f"a={TEXT}", "--eos", "x"], "--tokenizer"),
])
def test_wrong_arguments_exit_2_with_one_line(tmp_path, capsys, argv, message):
    assert run(["--out", str(tmp_path / "d"), *argv]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert re.search(message, printed.err.removesuffix("\n"))
    assert not (tmp_path / "d").exists()


def test_byte_vocabulary_would_be_uint8_and_large_ones_wider():
    from maxtext.data.manifest import smallest_dtype

    assert [smallest_dtype(n).name for n in (2, 256, 257, 65536, 65537, 100278)] == [
        "uint8", "uint8", "uint16", "uint16", "uint32", "uint32"]


@pytest.mark.parametrize("change", [{"doc5": "changed"}, None])
def test_text_that_changes_between_the_two_readings_is_refused(tmp_path, monkeypatch, change):
    options = Options(tmp_path / "d", (source(tmp_path / "text", "a", texts(20)),), {"a": 0.3}, tokenizer="bytes")

    def changed(*arguments):
        source(tmp_path / "text", "a", texts(20) | change if change else texts(19))
        return module_write(*arguments)

    from maxtext.data import prepare as module

    module_write = module._write
    monkeypatch.setattr(module, "_write", changed)
    with pytest.raises(DataError, match=r"while .* was being read"):
        prepare(options)
    assert not (tmp_path / "d").exists()


def test_committed_excerpt_is_small():
    assert sum(path.stat().st_size for path in TEXT.rglob("*")) < 1_000_000
    assert (TEXT / "LICENSE-PSF.txt").is_file()
    assert len(list(read_source(open_source("prose", TEXT / "prose")))) > 20
