"""Tokenizers: lossless for every text, exact byte counts, the same model from the same text."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from maxtext.data import DataError
from maxtext.data.tokenizer import (
    CHECKED_AT_ONCE,
    JsonTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_sentencepiece,
)

TEXT = Path(__file__).resolve().parents[1] / "fixtures" / "text"
TEXTS = [path.read_text(encoding="utf-8") for path in sorted(TEXT.glob("*/*.txt"))]
ODD = [
    "", " ", "  ", "\n", "\n\n\n", "\t", "\r\n", "a\r\nb\rc\n", "  leading", "trailing  ", "a  b   c", " " * 999,
    "\tif x:\n\t\ty = 1\n", "def f(x):\n    return x\n\n\n", "0123456789 3.14e-05", "a" * 5000,
    "\x00", "a\x00b\x00\x00", "\x01\x02\x1f\x7f\x80", "x\x0b\x0cy\x85z", "\ufeffbom",
    "\u2581", "\u2581\u2581a \u2581", "a\u2581b", "\u2585\u2047", "\u00a0\u2003\u3000\u200b\u2028\u2029",
    "e\u0301 \u00e9 \u212b \u00c5", "\ufb01\u2460\u00bd\uff21", "\U0001f600", "\U0010ffff\ue000\ufffd\ufffe",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7", "日本語 中文 한국어", "العربية עברית",
    "<s></s><unk><pad>", "<0x0A><0xE2>", "<|endoftext|>",
]


@pytest.fixture(scope="module")
def proto() -> bytes:
    return train_sentencepiece(iter(TEXTS), 512)


@pytest.fixture(scope="module")
def byte_level() -> str:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>", "<|pad|>"],
                                             show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model.train_from_iterator(TEXTS[:10], trainer)
    model.add_tokens(["plain_added"])
    return model.to_str()


@pytest.fixture(scope="module", params=["sentencepiece", "tokenizer.json"])
def tokenizer(request, proto, byte_level):
    return SentencePieceTokenizer(proto) if request.param == "sentencepiece" else JsonTokenizer(byte_level)


@pytest.mark.parametrize("text", ODD, ids=[ascii(text)[:24] for text in ODD])
def test_any_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [found.tolist() for found in tokenizer.encode_exactly([text], ["odd"])] == [ids]
    assert tokenizer.token_bytes()[ids].sum(dtype=np.int64) == len(text.encode())


def test_real_text_survives(tokenizer):
    lengths = tokenizer.token_bytes()
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert lengths[ids].sum(dtype=np.int64) == len(text.encode())
        assert len(ids) < 0.7 * len(text.encode()), "merges are used"


def test_every_character_survives_sentencepiece(proto):
    tokenizer = SentencePieceTokenizer(proto)
    texts = [f"a{chr(c)}b" for c in [*range(0, 0xD800, 7), *range(0xE000, 0x110000, 997), *range(0x2570, 0x2590)]]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text


def test_random_text_survives(tokenizer):
    generator = np.random.default_rng(0)
    alphabet = [*" \n\t\r\x00\u2581ab01<>|_", "\U0001f600", "é", "中"]
    for _ in range(200):
        text = "".join(generator.choice(alphabet, generator.integers(0, 60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_never_made_from_text_and_have_no_bytes(tokenizer):
    for text in ("<s></s><unk><pad>", "<|endoftext|><|pad|>"):
        assert not {tokenizer.eos_id, tokenizer.pad_id} & set(tokenizer.encode(text))
    assert tokenizer.token_bytes()[tokenizer.eos_id] == tokenizer.token_bytes()[tokenizer.pad_id] == 0
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"
    assert tokenizer.eos_id != tokenizer.pad_id
    assert max(tokenizer.eos_id, tokenizer.pad_id) < tokenizer.vocab_size == len(tokenizer.token_bytes())


def test_tokens_have_ids_by_their_names(tokenizer, byte_level):
    assert tokenizer.named_id("<pad>" if tokenizer.kind == "sentencepiece" else "<|pad|>") == tokenizer.pad_id
    assert tokenizer.named_id("no such piece") is None
    assert tokenizer.encode_prompt("in it") == tokenizer.encode("in it")  # neither file adds a start
    other = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # DeepSeek's
    assert JsonTokenizer(byte_level.replace("<|endoftext|>", other)).eos_id == 0


def test_added_token_that_is_not_special_has_its_own_bytes(byte_level):
    tokenizer = JsonTokenizer(byte_level)
    ids = tokenizer.encode("x plain_added y")
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.token_bytes()[tokenizer.vocab_size - 1] == len("plain_added")


def test_digits_stand_alone():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(iter([*TEXTS, "in 2024 " * 100_000]), 512))
    assert [tokenizer.pieces[i] for i in tokenizer.encode("2024")] == [b"2", b"0", b"2", b"4"]


def test_training_repeats_and_merges_newlines(proto):
    assert train_sentencepiece(iter(TEXTS), 512) == proto
    tokenizer = SentencePieceTokenizer(proto)
    assert tokenizer.vocab_size == 512
    assert any(b"\n" in piece and len(piece) > 1 for piece in tokenizer.pieces), "newlines take part in merges"


def test_files(tmp_path, proto, byte_level):
    (tmp_path / "a.model").write_bytes(proto)
    (tmp_path / "tokenizer.json").write_text(byte_level, encoding="utf-8")
    assert load_tokenizer(tmp_path / "a.model").kind == "sentencepiece"
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_id == 0
    assert load_tokenizer(tmp_path / "tokenizer.json", eos="<|pad|>", pad="<|endoftext|>").eos_id == 1
    assert load_tokenizer(tmp_path / "a.model", eos="<pad>").eos_id == 2
    (tmp_path / "bad.model").write_bytes(b"no model")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("a")
    for name, message in (("none.model", "cannot read"), ("bad.model", "not a SentencePiece model"),
                          ("bad.json", "not a tokenizer.json"), ("vocab.txt", "not .txt")):
        with pytest.raises(DataError, match=rf"{name}.*{message}"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match=r"no token '<none>' \(--eos\)"):
        load_tokenizer(tmp_path / "tokenizer.json", eos="<none>")
    with pytest.raises(DataError, match="no piece '<none>'"):
        load_tokenizer(tmp_path / "a.model", eos="<none>")


@pytest.mark.parametrize("at_once", [4, CHECKED_AT_ONCE])
def test_lossy_tokenizer_is_refused_with_document_and_place(byte_level, monkeypatch, at_once):
    monkeypatch.setattr("maxtext.data.tokenizer.CHECKED_AT_ONCE", at_once)
    spec = json.loads(byte_level) | {"normalizer": {"type": "Lowercase"}}
    tokenizer = JsonTokenizer(json.dumps(spec))
    tokenizer.encode_exactly(["all lower"], ["fine"])
    with pytest.raises(DataError, match=r"document code/a.py: .* at byte 4: b'Upper' becomes b'upper'"):
        tokenizer.encode_exactly(["all lower", "all Upper"], ["fine", "code/a.py"])
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode_exactly(["\ud800"], ["x"])


def test_sentencepiece_like_json_knows_its_bytes():
    model = tokenizers.models.BPE(
        vocab={"<eos>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "\u2581": 257, "a": 258, "\u2581a": 259},
        merges=[("\u2581", "a")], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("\u2581", " "),
                                                      tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    loaded = JsonTokenizer(tokenizer.to_str())
    ids = loaded.encode_exactly(["a a\n é"], ["x"])[0]
    assert loaded.token_bytes()[ids].tolist() == [1, 2, 1, 1, 1, 1]
    assert loaded.pad_id == loaded.eos_id == 0
    with pytest.raises(DataError, match="changes the text at byte 0"):
        loaded.encode_exactly(["\u2581"], ["x"])


def test_unknown_decoder_is_refused(byte_level):
    with pytest.raises(DataError, match="WordPiece"):
        JsonTokenizer(json.dumps(json.loads(byte_level) | {
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))


def test_vocabulary_size_is_checked():
    with pytest.raises(DataError, match="--vocab-size 100 is below 300"):
        train_sentencepiece(iter(TEXTS), 100)
    little_text = ["a short text, of few words"] * 20
    with pytest.raises(DataError) as little:  # what it advises is then done
        train_sentencepiece(iter(little_text), 2048)
    most = int(re.fullmatch(r"--vocab-size 2048: so little text gives at most (\d+) pieces; give --vocab-size \1 .*"
                            r"more text, or --tokenizer bytes", str(little.value))[1])
    assert SentencePieceTokenizer(train_sentencepiece(iter(little_text), most)).vocab_size == most
    many = ["".join(chr(0x4E00 + i) for i in range(400)) * 3]
    with pytest.raises(DataError) as wide:
        train_sentencepiece(iter(many), 400)
    least = int(re.fullmatch(r"--vocab-size 400: the characters of this text alone take (\d+) pieces; give "
                             r"--vocab-size \1 or more, or --tokenizer bytes", str(wide.value))[1])
    assert SentencePieceTokenizer(train_sentencepiece(iter(many), least)).vocab_size == least
    with pytest.raises(DataError, match="--vocab-size 2048: SentencePiece cannot train on this text: INTERNAL"):
        train_sentencepiece(iter([]), 2048)
