"""`maxtext data stats` and `maxtext data overlap` on texts whose lengths, repeats and leaks are known."""

import json

import numpy as np
import pytest

from maxtext.cli import main
from maxtext.data.corpus import open_source
from maxtext.data.prepare import Options, prepare
from maxtext.data.scan import split_of
from maxtext.data.stats import measure, ngrams, places
from maxtext.data.text_source import Document
from tests.data.record_files import write_megatron


def words(seed: int, n: int) -> str:
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(0, 10**6, n))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources a and b; held-out text of a of which one document stands, in other letters, in the training text of b."""
    root = tmp_path_factory.mktemp("stats")
    sides = {part: [f"x{i}" for i in range(60) if split_of(Document(f"x{i}", "", "a"), 0.3) == part]
             for part in ("train", "heldout")}
    held = {name: words(100 + i, 30) for i, name in enumerate(sides["heldout"])}
    first = next(iter(held))
    train = {name: words(i, 40) for i, name in enumerate(sides["train"])}
    b = {f"y{i}": words(1000 + i, 200) for i in range(5)} | {"leak": f"Before, {held[first].upper()}! after"}
    b["twin"] = b["y0"] + " with an end"
    for name, texts in (("a", train | held), ("b", b)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"id": key, "text": text}) + "\n"
                                                    for key, text in texts.items()))
    sources = tuple(open_source(name, root / f"{name}.jsonl") for name in "ab")
    prepare(Options(root / "out", sources, {"a": 0.3, "b": 0.0}, tokenizer="bytes"))
    (root / "task.jsonl").write_text("".join(json.dumps({"q": text}) + "\n" for text in (
        b["y1"][:600], words(5000, 50), "too short", train[sides["train"][0]])))
    return root, len(held), len(train)


def test_ngrams_are_of_words_without_case_and_punctuation():
    assert len(ngrams("a b c d", 3)) == 2
    assert np.array_equal(ngrams("A, b. C", 3), ngrams("a b c", 3))
    assert not np.array_equal(ngrams("a b d", 3), ngrams("a b c", 3))
    assert len(ngrams("a b", 3)) == 0


def test_places_are_those_of_what_stands_in_both():
    every = np.array([2, 3, 5, 9], np.uint64)
    assert places(np.array([1, 3, 4, 9, 10], np.uint64), every).tolist() == [1, 3]
    assert len(places(every, every[:0])) == len(places(every[:0], every)) == 0


def test_stats_count_lengths_shares_duplicates_and_leaks(folder, capsys):
    root, n_held, n_train = folder
    page = root / "page.html"
    assert main(["data", "stats", str(root / "out"), "--json", "--page", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    manifest = json.loads((root / "out" / "dataset.json").read_text())["sources"]
    for name, count in (("a", n_train), ("b", 7)):
        row = found["domains"][name]
        assert (row["documents"], sum(row["lengths"])) == (count, count)
        assert row["tokens"] == manifest[name]["train"]["tokens"]
    assert sum(row["share"] for row in found["domains"].values()) == pytest.approx(1)
    assert found["exact_duplicates"] == 0
    assert found["ngram_duplicates"] == 2, "y0 and its twin"
    heldout = found["heldout"]["a"]
    assert (heldout["documents"], heldout["overlapping"], heldout["ngrams_shared"]) == (n_held, 1, 30 - 12)
    assert "<h2>b: " in page.read_text()
    assert main(["data", "stats", str(root / "out")]) == 0
    assert f"held out a: 1 of {n_held} documents" in capsys.readouterr().out


def test_overlap_by_task_names_the_documents(folder, capsys):
    root, *_ = folder
    argv = ["data", "overlap", str(root / "out"), "--task", f"quiz={root / 'task.jsonl'}", "--text-key", "q"]
    assert main([*argv, "--json"]) == 0
    task = json.loads(capsys.readouterr().out)["tasks"]["quiz"]
    assert (task["documents"], task["with_ngrams"], task["overlapping"], task["which"]) == (4, 3, 2, [1, 4])
    assert main([*argv, "--ngram", "60"]) == 0
    assert "quiz: 1 of 1 documents with 60-grams share one" in capsys.readouterr().out
    for wrong, message in ((["--task", "x"], "--task x: expected NAME=VALUE"), (["--ngram", "0"], "give 1 or more"),
                           (["--task", "quiz=y"], "--task quiz=y: quiz is given twice")):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_text_and_the_same_text_as_ids_are_an_exact_duplicate(tmp_path):
    """Which preparation does not see: it compares texts with texts, and ids with ids."""
    texts = [words(i, 30) for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_megatron(tmp_path / "b", [[list(text.encode())] for text in (texts[1], words(9, 30), texts[3])])
    sources = (open_source("a", tmp_path / "a.jsonl"), open_source("b", tmp_path / "b.bin"))
    prepare(Options(tmp_path / "out", sources, {"a": 0.0, "b": 0.0}, tokenizer="bytes"))
    found = measure(tmp_path / "out", 13)
    assert (found["exact_duplicates"], found["ngram_duplicates"]) == (2, 4)
