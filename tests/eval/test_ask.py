"""`maxtext generate` on a transformers folder with a tokenizer of its own (a run is asked in train/test_samples.py)."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import pytest
import tokenizers

from maxtext.cli import main
from maxtext.data import DataError
from maxtext.data.tokenizer import JsonTokenizer
from maxtext.eval.completion import Stops, ends_beside
from tests.convert.folders import edited

LETTERS = ["\u0120", *string.ascii_lowercase, "the"]  # byte-level: the first is a space
EOS, BOS, TURN, FIRST = 0, 1, 2, 3


def write_tokenizer(path: Path) -> str:
    """Letters, spaces and one word; texts start with <s>, as the file says. Far fewer ids than the model has rows."""
    special = ["<|endoftext|>", "<s>", "<turn>"]
    vocabulary = {token: i for i, token in enumerate([*special, *LETTERS, "th"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    made.save(str(path))
    return path.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def sharpen(tensors):  # so that contexts matter
        tensors.update({name: tensor * 4 for name, tensor in tensors.items() if "norm" not in name})

    folder = edited("olmo3", tmp_path_factory.mktemp("hf") / "model", sharpen)
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture
def ask(folder, capsys):
    def run(*words: str) -> list[dict]:
        assert main(["generate", str(folder), "--tokens", "12", "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_prompts_from_words_and_files(folder, ask, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat\n\n on the mat\n")
    (tmp_path / "b.jsonl").write_text('"a line"\n{"prompt": "a line", "id": 7}\n')
    found = ask("--prompt", "once", "--prompts-file", str(tmp_path / "a.txt"))
    assert [one["prompt"] for one in found] == ["once", "the cat", " on the mat"]
    for one in found:
        assert len(one["ids"]) == 12 or one["stopped"]
        assert max(one["ids"]) < FIRST + len(LETTERS) + 1 < 256
        assert one["text"] == "".join([*"???", *LETTERS, "th"][i] for i in one["ids"] if i >= FIRST).replace("\u0120",
                                                                                                             " ")
    assert len({one["text"] for one in found}) == 3
    again = ask("--prompts-file", str(tmp_path / "b.jsonl"))
    assert again[0] == again[1]  # greedy
    assert main(["generate", str(folder), "--tokens", "12", "--prompt", "once", "--prompt", "the cat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"once{found[0]['text']}\n--------------------\nthe cat{found[1]['text']}\n"
    assert "tokens in" in captured.err


def test_what_ends_a_completion(folder, ask):
    (whole,) = ask("--prompt", "the cat")
    assert not whole["stopped"]
    ids, text = whole["ids"], whole["text"]
    place = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    (by_id,) = ask("--prompt", "the cat", "--stop", str(ids[place]))
    assert (by_id["ids"], by_id["stopped"]) == (ids[: place + 1], True)
    stop = text[4:7]  # over several tokens
    (by_text,) = ask("--prompt", "the cat", "--stop", stop)
    assert (by_text["text"], by_text["stopped"]) == (text[: text.index(stop)], True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, ids[place]]}))
    try:
        assert ask("--prompt", "the cat") == [by_id]
    finally:
        (folder / "generation_config.json").unlink()


def test_samples_depend_on_the_seed(ask):
    words = ("--temperature", "1", "--top-k", "20", "--top-p", "0.9", "--prompt", "the cat", "--prompt", "the cat")
    first = ask(*words)
    assert first[0]["ids"] != first[1]["ids"]  # each prompt has a sample of its own
    assert ask(*words, "--seed", "0") == first
    assert ask(*words, "--seed", "1") != first


@pytest.mark.parametrize(("words", "message"), [
    ([], "there is nothing to go on from; give --prompt TEXT"),
    (["--prompts-file", "absent.txt"], "--prompts-file absent.txt: cannot be read: No such file"),
    (["--prompt", "a" * 120], "has 121 tokens, and with 12 more 133, above the context of 128; shorten it"),
    (["--prompt", "a", "--tokens", "0"], "--tokens 0 adds nothing; give 1 or more"),
    (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 is below 0"),
    (["--prompt", "a", "--temperature", "1", "--top-k", "0"], "--top-k 0 leaves no token"),
    (["--prompt", "a", "--temperature", "inf"], "--temperature inf leaves nothing of what the model says"),
    (["--prompt", "a", "--top-k", "5"], "but --temperature 0 takes the likeliest token; give --temperature too"),
    (["--prompt", "a", "--context", "0"], "--context 0 has no room for a prompt and a token"),
    (["--prompt", "a", "--stop", ""], "--stop is empty; give an id, the name of a token, or a text"),
    (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "--top-p 2.0 is no probability"),
    (["--prompt", "a", "--seed", "-1"], "--seed -1: give a number from 0"),
    (["--prompt", "a", "--stop", "999"], "--stop 999: the tokenizer's ids end at 31"),
    (["--prompt", "a", "--step", "1"], "is a transformers folder, which has no steps"),
    (["--prompt", "a", "--tokenizer", "absent.json"], "absent.json: cannot read the tokenizer"),
    (["--prompt", "a", "--eos", "<none>"], "has no token '<none>' (--eos)"),
    (["--prompt", "a", "mesh.fsdp=3"], "but there are 8"),
    (["--prompt", "a", "model.n_heads=3"], "the model's own config:"),
    (["--prompt", "a", "model.d_model=none"], "model.d_model: none is not an integer"),
])
def test_mistakes_are_one_message_and_exit_code_2(folder, capsys, words, message):
    assert main(["generate", str(folder), "--tokens", "12", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_its_tokenizer(tmp_path, folder, prepared_text, capsys):
    bare = edited("olmo3", tmp_path / "bare")
    assert main(["generate", str(bare), "--prompt", "a"]) == 2
    assert (f"{bare} has neither tokenizer.json nor tokenizer.model beside its weights, and its config names none; "
            "give --tokenizer FILE") in capsys.readouterr().err
    other = str(next(prepared_text.glob("*.model")))  # of 384 ids, for a model of 256
    assert main(["generate", str(bare), "--prompt", "the quick brown fox", "--tokenizer", other]) == 2
    assert "but model.vocab_size is 256: this is not the tokenizer of this model" in capsys.readouterr().err
    assert main(["generate", str(bare), "--prompt", "", "--tokenizer", other]) == 2
    assert "prompt '' is empty" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "absent"), "--prompt", "a"]) == 2
    assert "absent does not exist; give a run" in capsys.readouterr().err


def test_a_sentencepiece_model_beside_the_weights_is_found(tmp_path, prepared_text, capsys):
    bare = edited("olmo3", tmp_path / "bare")
    shutil.copy(next(prepared_text.glob("*.model")), bare / "tokenizer.model")
    assert main(["convert", "import", str(bare), str(tmp_path / "imported")]) == 0
    for model in (bare, tmp_path / "imported"):  # its 384 ids do not fit this model, so it was read
        capsys.readouterr()
        assert main(["generate", str(model), "--prompt", "the quick brown fox"]) == 2
        assert "but model.vocab_size is 256: this is not the tokenizer of this model" in capsys.readouterr().err


def test_a_prompt_starts_as_the_tokenizer_s_documents_do(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    the, a = FIRST + LETTERS.index("the"), FIRST + LETTERS.index("a")
    assert tokenizer.encode_prompt("the") == [BOS, the]
    assert tokenizer.encode_prompt("") == [BOS]
    assert tokenizer.encode("the") == [the]
    # Names of special tokens are these in a prompt, and plain text in documents, before and after.
    assert tokenizer.encode_prompt("<turn>a") == [BOS, TURN, a]
    assert TURN not in tokenizer.encode("<turn>a")


def test_stops_are_ids_names_or_texts(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    a, the, th, h = (FIRST + [*LETTERS, "th"].index(token) for token in ("a", "the", "th", "h"))
    assert Stops(tokenizer, []).ids == {EOS}
    assert Stops(tokenizer, [7], ["9", "<turn>"]).ids == {EOS, 7, 9, TURN}
    stops = Stops(tokenizer, [], ["h", "a cat"])
    assert stops.ids == {EOS, h, th, the}  # every token that holds the text
    assert a not in stops.ids
    assert [stops.cut(text) for text in ("on a cat h", "xh", "none")] == ["on ", "x", "none"]
    with pytest.raises(DataError, match="--stop 32: the tokenizer's ids end at 31"):
        Stops(tokenizer, [], ["32"])


@pytest.mark.parametrize(("text", "expected"), [
    ('{"eos_token_id": 5}', [5]), ('{"eos_token_id": [5, 6]}', [5, 6]), ('{"eos_token_id": null}', []), ("{}", []),
    ("[]", []), ("torn{", [])])
def test_ends_of_generation_config(tmp_path, text, expected):
    assert ends_beside(tmp_path / "tokenizer.json") == []
    (tmp_path / "generation_config.json").write_text(text)
    assert ends_beside(tmp_path / "tokenizer.json") == expected
