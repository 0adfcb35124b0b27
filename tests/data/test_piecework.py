"""Preparation in pieces: the same bytes with any number of processes, and after a kill."""

import csv
import dataclasses
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from maxtext.data import DataError, encode, piecework, text_files
from maxtext.data.cache import write_whole
from maxtext.data.command import run_prepare as run
from maxtext.data.corpus import open_source
from maxtext.data.documents import read_companion, scan
from maxtext.data.manifest import load_prepared
from maxtext.data.piecework import cut
from maxtext.data.prepare import Options, prepare
from maxtext.data.text_source import Source, Unit
from maxtext.data.tokenizer import load_tokenizer
from maxtext.data.tokens import resolve
from tests.materials import imported

ROOT = Path(__file__).resolve().parents[2]
# A preparation in a process of its own, whose pieces are small; `slow` waits in each piece that is written.
PROGRAM = """
import sys, time
from maxtext.data import command, encode, piecework, text_files
text_files.UNIT_BYTES = piecework.UNIT_BYTES = 40_000
if __name__ == "__main__":
    if sys.argv[1] == "slow":
        write = encode.encode_piece
        def waiting(*arguments):
            time.sleep(0.3)
            return write(*arguments)
        encode.encode_piece = waiting
    sys.exit(command.run_prepare(sys.argv[2:]))
"""


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A file of 20 pieces of 40,000 bytes, with empty texts and repeats."""
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 10_000, 200))) for _ in range(800)]
    texts[5], texts[700] = "", texts[3]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_pieces_gather_small_units_in_order():
    sources = [Source(name, tuple(Unit("text", f"{i}", f"{i}", 30 << 20) for i in range(count)))
               for name, count in (("a", 7), ("b", 1))]
    pieces = cut(sources)
    assert [(piece.number, piece.source, [unit.path for unit in piece.units]) for piece in pieces] == [
        (0, "a", ["0", "1", "2"]), (1, "a", ["3", "4", "5"]), (2, "a", ["6"]), (3, "b", ["0"])]


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (text_files, piecework):
        monkeypatch.setattr(module, "UNIT_BYTES", 40_000)


def options(corpus: Path, out: Path, **changes) -> Options:
    return Options(out, (open_source("a", corpus),), {"a": 0.1}, **({"tokenizer": "bytes"} | changes))


@pytest.fixture
def whole(corpus, tmp_path, small_pieces) -> dict[str, str]:
    """The files that one process writes without a stop."""
    prepare(options(corpus, tmp_path / "whole", workers=1))
    return tree(tmp_path / "whole")


def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(corpus, tmp_path, whole, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = ["--out", str(out), "--source", f"a={corpus}", "--tokenizer", "bytes", "--heldout-fraction", "a=0.1",
            "--workers", "1"]
    process = subprocess.Popen([sys.executable, str(program), "slow", *argv],
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 60
        while len(list(partial.glob("tokens-*/result.json"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()
    done = {path: path.stat().st_mtime_ns for path in partial.glob("tokens-*/result.json")}
    assert 3 <= len(done) < 15
    unfinished = next(iter(done))
    unfinished.unlink()  # as a kill while the piece is written leaves it

    written = []
    encode_documents = encode.encode_documents
    monkeypatch.setattr(encode, "encode_documents",
                        lambda tokenizer, batch: written.append(1) or encode_documents(tokenizer, batch))
    prepare(options(corpus, out, workers=1))
    assert tree(out) == whole
    assert len(written) == len(cut([open_source("a", corpus)])) - len(done) + 1, "what was done stays"
    assert not partial.exists()


def test_several_processes_give_the_same_bytes(corpus, tmp_path, whole):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, str(program), "fast", "--out", str(tmp_path / "out"), "--source", f"a={corpus}",
                    "--tokenizer", "bytes", "--heldout-fraction", "a=0.1", "--workers", "2"], check=True,
                   env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert tree(tmp_path / "out") == whole
    assert len([name for name in whole if name.startswith("train/") and name.endswith(".npy")]) > 10


def test_moving_into_place_can_be_killed_too(corpus, tmp_path, whole, monkeypatch):
    moves = []
    move = encode._move

    def dying(source, target):
        moves.append(target)
        if len(moves) == 7:
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "_move", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(corpus, tmp_path / "out", workers=1))
    prepare(options(corpus, tmp_path / "out", workers=1))
    assert tree(tmp_path / "out") == whole


def test_other_sources_after_a_kill_at_the_end_find_their_pieces(corpus, tmp_path, small_pieces, monkeypatch):
    other = tmp_path / "b.jsonl"
    other.write_text(json.dumps({"text": "one more"}) + "\n")

    def both(out: Path) -> Options:
        return Options(out, (open_source("a", corpus), open_source("b", other)), {"a": 0.1, "b": 0.0},
                       tokenizer="bytes", workers=1)

    moves = []
    move = encode._move

    def dying(source, target):
        moves.append(target)
        if len(moves) == 7:
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "_move", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(corpus, tmp_path / "out", workers=1))
    written = []
    encode_documents = encode.encode_documents
    monkeypatch.setattr(encode, "encode_documents",
                        lambda tokenizer, batch: written.append(1) or encode_documents(tokenizer, batch))
    prepare(both(tmp_path / "out"))
    assert len(written) == 2 + 1, "the pieces that were moved, and the new one"
    prepare(both(tmp_path / "fresh"))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_text_that_changed_after_the_kill_is_read_again(corpus, tmp_path, small_pieces, monkeypatch):
    copy = tmp_path / "a.jsonl"
    copy.write_bytes(corpus.read_bytes())
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maxtext.data.prepare.gather", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(copy, tmp_path / "out", workers=1))
    lines = copy.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join([lines[0].replace(b"1", b"2"), *lines[1:]]))
    assert copy.stat().st_size == corpus.stat().st_size
    prepare(options(copy, tmp_path / "out", workers=1))
    prepare(options(copy, tmp_path / "fresh", workers=1))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_companions_have_the_documents_and_where_they_come_from(corpus, tmp_path, whole):
    data = load_prepared(tmp_path / "whole")
    lines = corpus.read_text().splitlines()
    seen = []
    for file in [*data.train["a"], *data.heldout["a"]]:
        starts, lengths = read_companion(file.path, file.tokens)
        assert np.array_equal([starts, lengths], scan(file.path, data.dtype, file.tokens, data.eos_id))
        tokens = np.fromfile(file.path, data.dtype)
        with gzip.open(file.path.replace(".npy", ".csv.gz"), "rt", newline="") as rows:
            for start, end, name, source, line in csv.reader(rows):
                assert (name, source) == (f"a.jsonl:{line}", "a.jsonl")
                text = bytes(tokens[int(start):int(end) - 1].tolist()).decode()
                assert text == json.loads(lines[int(line) - 1])["text"]
                seen.append(int(line))
    assert sorted(seen) == [i for i in range(1, 801) if i not in (6, 701)]


def test_a_full_disk_is_one_line_and_leaves_no_half_a_file(corpus, tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"a: cannot write \(No space left"):
        write_whole(tmp_path / "a", full)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(encode.TokenWriter, "write", full)
    argv = ["--out", str(tmp_path / "out"), "--source", f"a={corpus}", "--tokenizer", "bytes", "--workers", "1"]
    assert run(argv) == 2
    assert capsys.readouterr().err == "No space left on device\n"


def test_two_at_once_are_refused(corpus, tmp_path):
    with piecework.workshop(tmp_path / "out"), pytest.raises(DataError, match="another process is preparing it"):
        prepare(options(corpus, tmp_path / "out"))


def test_ids_used_twice_are_an_error_or_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}", "id": i % 5}) + "\n" for i in range(6)))
    once = Options(tmp_path / "out", (open_source("a", tmp_path / "a.jsonl"),), {"a": 0.0}, tokenizer="bytes")
    with pytest.raises(DataError, match=r"a.jsonl:6: id '0' was used before; ids decide the split"):
        prepare(once)
    manifest, _ = prepare(dataclasses.replace(once, max_bad=1))
    assert manifest["dropped"] == {"empty": 0, "duplicate": 0, "repeated id": 1, "bad": 0, "special token": 0}
    assert manifest["sources"]["a"]["train"]["documents"] == 5


def test_end_of_document_in_a_text_is_no_boundary(tmp_path):
    """The name of the token is plain text; a file that would make it a boundary is refused."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one <|endoftext|> two"}) + "\n")
    spec = json.loads(_byte_level())
    for special in (True, False):
        for token in spec["added_tokens"]:
            token["special"] = special
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        make = Options(tmp_path / f"out{special}", (open_source("a", path),), {"a": 0.0},
                       tokenizer=tmp_path / "tokenizer.json", bos="<|begin|>" if special else None)
        if not special:
            with pytest.raises(DataError, match=r"a/a.jsonl:1: holds the end-of-document id 0 at token \d"):
                prepare(make)
            continue
        prepare(make)
        data = load_prepared(make.out)
        ids = np.fromfile(data.train["a"][0].path, data.dtype).tolist()
        assert (ids.count(0), ids[-1], ids.count(1), ids[0]) == (1, 0, 1, 1), "end and begin once, at the ends"
        tokenizer = load_tokenizer(data.tokenizer)
        assert tokenizer.decode(ids) == "one <|endoftext|> two"
        assert tokenizer.encode("one <|endoftext|> two") == ids[1:-1]


def _byte_level() -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(["some text"], tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer.to_str()


def test_tiktoken_by_name_is_kept_whole(tmp_path, monkeypatch):
    tiktoken = imported("tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding("tiny", pat_str=r"\s?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 100257})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "tiny", encoding)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the <|endoftext|> é"}) + "\n")
    prepare(Options(tmp_path / "out", (open_source("a", tmp_path / "a.jsonl"),), {"a": 0.0}, tokenizer="tiktoken:tiny"))
    data = load_prepared(tmp_path / "out")
    assert (data.vocab_size, data.eos_id, data.dtype.name) == (100258, 100257, "uint32")
    ids = np.fromfile(data.train["a"][0].path, data.dtype).tolist()
    assert ids == [*encoding.encode_ordinary("the <|endoftext|> é"), 100257]
    monkeypatch.undo()
    assert load_tokenizer(data.tokenizer).encode("the <|endoftext|> é") == ids[:-1]


def test_a_large_vocabulary_refuses_narrow_files(make_config, write_tokens):
    path = write_tokens("a.npy", 1000)
    with pytest.raises(DataError, match=r"uint16 ends at 65535, but data.vocab_size is 100278"):
        resolve(make_config({"x": [path]}, vocab_size=100278, dtype="uint16"))
    wide = write_tokens("b.npy", np.random.default_rng(0).integers(0, 65536, 1000), np.uint16)
    with pytest.raises(DataError, match=r"is not below vocab_size 100278; read as uint16 all ids fit"):
        resolve(make_config({"x": [wide]}, vocab_size=100278))
