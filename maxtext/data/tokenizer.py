"""Tokenizers as a table from id to bytes, so that decoding, byte counts and the lossless check are one line each.

SentencePiece marks a space as U+2581 inside its pieces, so that character is the only one which it cannot carry itself:
here it is always encoded as its three byte tokens. With that, encode and decode are exact for every text.
"""

from __future__ import annotations

import array
import io
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.config.reason import reason
from maxtext.data import DataError

SPACE_MARK = "\u2581"
EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]",
             "<\uff5cend\u2581of\u2581sentence\uff5c>")
PAD_NAMES = ("<|pad|>", "<pad>", "<|padding|>", "[PAD]")
TRAINED_NAMES = ("<unk>", "</s>", "<pad>")  # of the special ids of `train_sentencepiece`

CHECKED_AT_ONCE = 1 << 25  # bytes; the check takes some twelve times as many
SUFFIXES = (".model", ".json", ".bytes")
KINDS = "a tokenizer is a SentencePiece *.model, a Hugging Face tokenizer.json, a *.tiktoken.json or a *.bytes"


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Tokenizer:
    """What the framework needs from a tokenizer.

    Attributes:
      kind: "sentencepiece", "tokenizer.json", "tiktoken" or "bytes".
      pieces: the bytes that each id stands for; empty for special ids.
      eos_id, pad_id: ids of end of document and of padding.
    """

    kind: str

    def __init__(self, pieces: Sequence[bytes], eos_id: int, pad_id: int):
        self.pieces = tuple(pieces)
        self._table: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self.eos_id = eos_id
        self.pad_id = pad_id

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        return len(self.pieces)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens; the name of a special token inside a text is plain text."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that a model goes on from: with the start that its documents have, if the file gives one.

        The name of a special token inside the text is that token, where the file has such names.
        """
        return self.encode(text)

    def named_id(self, name: str) -> int | None:
        """The id of a token by its spelling in the file, None when there is none."""
        raise NotImplementedError

    @property
    def special_names(self) -> tuple[str, ...]:
        """The spellings of the special tokens."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for; special ids stand for none."""
        return b"".join(map(self.pieces.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not whole UTF-8 characters become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each id, shape (vocab_size,), uint8 or uint16; 0 for special ids."""
        lengths = np.array([len(piece) for piece in self.pieces])
        return lengths.astype(np.uint8 if lengths.max() < 256 else np.uint16)

    def encode_exactly(self, texts: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
        """`encode_batch`, uint32, that refuses to lose a byte: bits per byte and decoded text would be wrong otherwise.

        Raises:
          DataError: names the document that does not survive encoding and decoding, and where it first differs.
        """
        wanted = []
        for text, name in zip(texts, names, strict=True):
            try:
                wanted.append(text.encode())
            except UnicodeEncodeError as error:
                raise DataError(f"document {name}: the text has a lone surrogate, which no UTF-8 file can "
                                "hold") from error
        batch = [np.frombuffer(array.array("I", ids), np.uint32) for ids in self.encode_batch(texts)]
        if self._stand_for(batch, wanted):
            return batch
        for want, name, ids in zip(wanted, names, batch, strict=True):
            got = self.decode_bytes(ids.tolist())
            if got != want:
                place = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
                             min(len(want), len(got)))
                raise DataError(
                    f"document {name}: this tokenizer changes the text at byte {place}: {want[place:place + 16]!r} "
                    f"becomes {got[place:place + 16]!r}. Use a tokenizer without normalisation, dummy prefix and "
                    "unknown tokens, or leave --tokenizer out to train one")
        return batch

    def _stand_for(self, batch: Sequence[np.ndarray], wanted: Sequence[bytes]) -> bool:
        """Whether the ids stand for these bytes; False also for more bytes than this is good for.

        All at once, because a look-up of each id in Python costs as much as a twentieth of its making.
        """
        if not batch or sum(map(len, wanted)) > CHECKED_AT_ONCE:
            return False
        if self._table is None:
            sizes = np.array([len(piece) for piece in self.pieces], np.int32)
            starts = np.cumsum(sizes, dtype=np.int32) - sizes
            self._table = np.frombuffer(b"".join(self.pieces), np.uint8), sizes, starts
        letters, sizes, starts = self._table
        lengths = [int(sizes[ids].sum()) for ids in batch]
        if lengths != list(map(len, wanted)):
            return False
        ids = np.concatenate(batch)
        per_id = sizes[ids]
        first = np.cumsum(per_id, dtype=np.int32) - per_id  # of each id in the bytes of all
        places = np.repeat(starts[ids] - first, per_id)
        places += np.arange(len(places), dtype=np.int32)
        return letters[places].tobytes() == b"".join(wanted)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model."""

    kind = "sentencepiece"

    def __init__(self, proto: bytes, where: str = "the model", eos: str | None = None, pad: str | None = None,
                 threads: int = 0):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise DataError(f"{where}: not a SentencePiece model ({error})") from error
        model = self._model
        size = model.vocab_size()
        pieces = [_sentencepiece_bytes(model, i) for i in range(size)]
        eos_id = model.eos_id() if eos is None else _sentencepiece_id(model, eos, where)
        if eos_id < 0:
            raise DataError(f"{where}: the model has no end-of-sentence id; name the piece to use with --eos")
        pad_id = model.pad_id() if pad is None else _sentencepiece_id(model, pad, where)
        # A model without padding pads with the end of document, as most causal models do: padding is never a target.
        super().__init__(pieces, eos_id, eos_id if pad_id < 0 else pad_id)
        byte_ids = {model.id_to_piece(i): i for i in range(size) if model.is_byte(i)}
        self._mark_ids = [byte_ids.get(f"<0x{byte:02X}>", model.unk_id()) for byte in SPACE_MARK.encode()]
        self._threads = threads or cpu_count()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [text.split(SPACE_MARK) for text in texts]
        encoded = iter(self._model.encode([part for text in parts for part in text], num_threads=self._threads))
        batch = []
        for text in parts:
            ids = next(encoded)
            for _ in text[1:]:
                ids = ids + self._mark_ids + next(encoded)
            batch.append(ids)
        return batch

    @property
    def special_names(self) -> tuple[str, ...]:
        return tuple(self._model.id_to_piece(i) for i, piece in enumerate(self.pieces) if not piece)

    def named_id(self, name: str) -> int | None:
        i = self._model.piece_to_id(name)
        return i if self._model.id_to_piece(i) == name else None


class JsonTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`: byte-level BPE (GPT-2's byte alphabet) or SentencePiece-like pieces."""

    kind = "tokenizer.json"

    def __init__(self, text: str, where: str = "tokenizer.json", eos: str | None = None, pad: str | None = None):
        import tokenizers

        try:
            spec = json.loads(text)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{where}: not a tokenizer.json ({reason(error)})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {token["content"]: bool(token["special"]) for token in spec.get("added_tokens") or []}
        self._special_names = tuple(name for name, special in added.items() if special)
        to_bytes = _piece_decoder(spec.get("decoder"), where)
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for piece, i in vocabulary.items():
            if piece not in added:
                pieces[i] = to_bytes(piece)
            elif not added[piece]:
                pieces[i] = piece.encode()
        eos_id = _named_id(vocabulary, eos, EOS_NAMES, where, "--eos")
        assert eos_id is not None
        pad_id = _named_id(vocabulary, pad, PAD_NAMES, where, "--pad", required=False)
        super().__init__(pieces, eos_id, eos_id if pad_id is None else pad_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return self._tokenizer.encode(text).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    @property
    def special_names(self) -> tuple[str, ...]:
        return self._special_names

    def named_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)


def find_tokenizer(folder: str | Path) -> Path | None:
    """The tokenizer among the files of a model: Hugging Face's, else SentencePiece's; None: there is neither."""
    return next((file for name in ("tokenizer.json", "tokenizer.model") if (file := Path(folder, name)).is_file()),
                None)


def load_tokenizer(path: str | Path, eos: str | None = None, pad: str | None = None, threads: int = 0) -> Tokenizer:
    """Reads a tokenizer: SentencePiece (`*.model`), Hugging Face (`*.json`), tiktoken (`*.tiktoken.json`) or `*.bytes`.

    Args:
      path: the file.
      eos, pad: pieces to use as end of document and padding where the file does not say or says otherwise.
      threads: to encode a batch with; 0: one a CPU. (That of Hugging Face reads RAYON_NUM_THREADS.)

    Raises:
      DataError: the file is missing, of another kind, or has no end-of-document id.
    """
    from maxtext.data.tokenizer_files import ByteTokenizer, TiktokenTokenizer  # they are Tokenizers too

    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
    if path.name.endswith(".tiktoken.json"):
        return TiktokenTokenizer(data, str(path), eos, pad, threads)
    if path.suffix == ".json":
        return JsonTokenizer(data.decode("utf-8", errors="replace"), str(path), eos, pad)
    if path.suffix == ".model":
        return SentencePieceTokenizer(data, str(path), eos, pad, threads)
    if path.suffix == ".bytes":
        return ByteTokenizer(str(path), eos, pad)
    raise DataError(f"{path}: {KINDS}, not {path.suffix or 'a file without suffix'}")


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a lossless SentencePiece BPE model; the same texts in the same order give the same bytes.

    Ids: 0 unknown (never produced, as all bytes are in the vocabulary), 1 end of document, 2 padding, 3-258 the bytes,
    then merges. Newlines are ordinary characters, so pieces such as "):\\n" exist.

    Raises:
      DataError: the vocabulary is too small for the bytes or too large for the text.
    """
    import sentencepiece

    if vocab_size < 300:
        raise DataError(f"--vocab-size {vocab_size} is below 300: 259 ids are bytes and special tokens, and the rest "
                        "must hold the text's characters")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=vocab_size,
            normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, split_digits=True, byte_fallback=True, character_coverage=0.9995,
            unk_id=0, eos_id=1, pad_id=2, bos_id=-1, max_sentence_length=1 << 30, input_sentence_size=0,
            num_threads=min(8, cpu_count()), minloglevel=2)
    except RuntimeError as error:
        raise DataError(_untrainable(vocab_size, " ".join(str(error).split()))) from error
    return model.getvalue()


def _untrainable(vocab_size: int, detail: str) -> str:
    """What to do where SentencePiece refuses a text; `detail` is its own message."""
    if most := re.search(r"Please set it to a value <= (\d+)", detail):
        return (f"--vocab-size {vocab_size}: so little text gives at most {most[1]} pieces; give --vocab-size "
                f"{most[1]} (a model may have more rows than its tokenizer), more text, or --tokenizer bytes")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", detail):
        return (f"--vocab-size {vocab_size}: the characters of this text alone take {least[1]} pieces; give "
                f"--vocab-size {least[1]} or more, or --tokenizer bytes")
    return f"--vocab-size {vocab_size}: SentencePiece cannot train on this text: {detail}"


def _sentencepiece_bytes(model: Any, i: int) -> bytes:
    piece = model.id_to_piece(i)
    if model.is_byte(i):
        return bytes([int(piece[3:5], 16)])
    if model.is_control(i) or model.is_unknown(i) or model.is_unused(i):
        return b""
    return piece.replace(SPACE_MARK, " ").encode()


def _sentencepiece_id(model: Any, piece: str, where: str) -> int:
    i = model.piece_to_id(piece)
    if i == model.unk_id():
        raise DataError(f"{where}: has no piece {piece!r}")
    return i


def _named_id(vocabulary: dict[str, int], name: str | None, guesses: Sequence[str], where: str, option: str,
              required: bool = True) -> int | None:
    if name is not None:
        if name not in vocabulary:
            raise DataError(f"{where}: has no token {name!r} ({option})")
        return vocabulary[name]
    for guess in guesses:
        if guess in vocabulary:
            return vocabulary[guess]
    if required:
        raise DataError(f"{where}: has none of {', '.join(guesses)}; name the token with {option}")
    return None


def _piece_decoder(decoder: dict[str, Any] | None, where: str) -> Any:
    """The function from a piece's spelling to its bytes, chosen by the file's decoder."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def byte_level(piece: str) -> bytes:
            if any(c not in alphabet for c in piece):
                raise DataError(f"{where}: piece {piece!r} is not in the byte-level alphabet")
            return bytes(alphabet[c] for c in piece)

        return byte_level
    if kinds & {"ByteFallback", "Metaspace"}:

        def marked(piece: str) -> bytes:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(SPACE_MARK, " ").encode()

        return marked
    raise DataError(f"{where}: its decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor "
                    "SentencePiece-like, so the bytes of a token are not known")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible alphabet: printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
