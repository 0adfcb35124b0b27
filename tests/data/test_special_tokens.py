"""Names of special tokens inside texts: what each policy writes, counts and refuses, with every kind of tokenizer."""

import json

import numpy as np
import pytest
import tokenizers

from maxtext import cli
from maxtext.data.manifest import load_prepared
from maxtext.data.tokenizer import load_tokenizer, train_sentencepiece
from tests.data.conftest import TEXT

EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    """Kind -> (what --tokenizer takes, a name that is special in it)."""
    folder = tmp_path_factory.mktemp("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.train_from_iterator(["some text"], tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS, "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(["some text of words </s> and </ s>"] * 20, 300))
    return {"json": (folder / "tokenizer.json", EOS), "sentencepiece": (folder / "tokenizer.model", "</s>"),
            "bytes": ("bytes", EOS)}


@pytest.fixture
def run(tmp_path, tokenizer_files, capsys):
    """Returns f(kind, policy, *options) -> (exit code, manifest, texts by document, standard error)."""

    def prepare(kind, policy, *options):
        tokenizer, name = tokenizer_files[kind]
        texts = ["plain", f"one {name} two", f"{name[:3]}{name}{name[3:]}three", "plain again"]
        path, out = tmp_path / "a.jsonl", tmp_path / f"{kind}-{policy}{len(options)}"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        # By the other name of the verb.
        code = cli.main(["data", "tokenize", "--out", str(out), "--source", f"a={path}", "--tokenizer", str(tokenizer),
                         "--heldout-fraction", "a=0", "--special-tokens", policy, *options])
        told = capsys.readouterr()
        if code:
            return code, None, None, told.err
        data = load_prepared(out)
        ids = np.fromfile(data.train["a"][0].path, data.dtype)
        found = load_tokenizer(data.tokenizer)
        documents = np.split(ids, np.flatnonzero(ids == found.eos_id) + 1)[:-1]
        decoded = [found.decode(document[:-1].tolist()) for document in documents]
        for text, document in zip(decoded, documents, strict=True):
            # The same ids in preparation (and so in training) and wherever a text is evaluated.
            assert found.encode(text) == document[:-1].tolist()
        return code, json.loads((out / "dataset.json").read_text()), decoded, told.out

    return prepare


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "bytes"])
def test_each_policy(run, tokenizer_files, kind):
    name = tokenizer_files[kind][1]
    nested = f"{name[:3]}{name}{name[3:]}three"
    code, manifest, texts, _ = run(kind, "literal")
    assert (code, texts) == (0, ["plain", f"one {name} two", nested, "plain again"])
    assert manifest["special_tokens"] == "literal"
    code, manifest, texts, _ = run(kind, "strip")
    assert (code, texts) == (0, ["plain", "one  two", "three", "plain again"])
    code, manifest, texts, told = run(kind, "drop")
    assert (code, texts) == (0, ["plain", "plain again"])
    assert manifest["dropped"]["special token"] == 2
    assert "left out: 2 special token" in told


def test_refused_with_the_place_or_counted_in_the_budget(run):
    code, _, _, told = run("bytes", "refuse")
    assert code == 2
    assert told == (f"a.jsonl:2: document a.jsonl:2: holds the name of the special token {EOS} at character 4. "
                    "Mend it, or let --max-bad N leave up to N such records out\n")
    code, manifest, texts, _ = run("bytes", "refuse", "--max-bad", "2")
    assert (code, texts, manifest["dropped"]["bad"]) == (0, ["plain", "plain again"], 2)


def test_policies_are_other_data_sets_even_where_nothing_is_found(tmp_path, capsys):
    """A stream takes its policy from the folder whose tokenizer it has."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "plain"}) + "\n")
    words = ["data", "prepare", "--out", str(tmp_path / "out"), "--source", f"a={path}", "--tokenizer", "bytes",
             "--heldout-fraction", "a=0", "--special-tokens"]
    assert cli.main([*words, "drop"]) == cli.main([*words, "drop"]) == 0
    assert load_prepared(tmp_path / "out").special_tokens == "drop"
    assert cli.main([*words, "strip"]) == 2
    assert "holds a data set made from other texts or options" in capsys.readouterr().err


def test_a_trained_tokenizer_has_its_names_too(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    texts = [file.read_text() for file in sorted((TEXT / "prose").iterdir())[:5]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "a </s> b"]))
    assert cli.main(["data", "prepare", "--out", str(tmp_path / "out"), "--source", f"a={path}", "--vocab-size", "384",
                     "--heldout-fraction", "a=0", "--special-tokens", "drop"]) == 0
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert manifest["dropped"]["special token"] == 1
    assert set(load_tokenizer(tmp_path / "out" / "tokenizer.model").special_names) == {"<unk>", "</s>", "<pad>"}
