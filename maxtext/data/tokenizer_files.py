"""Tokenizers beside SentencePiece and Hugging Face's: bytes, and tiktoken's."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from maxtext.config.reason import reason
from maxtext.data import DataError
from maxtext.data.text_source import optional
from maxtext.data.tokenizer import EOS_NAMES, PAD_NAMES, Tokenizer, cpu_count

BYTE_NAMES = {"<|endoftext|>": 256, "<|pad|>": 257, "<|begin|>": 258}


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, then end of document, padding and begin of document."""

    kind = "bytes"

    def __init__(self, where: str = "bytes", eos: str | None = None, pad: str | None = None):
        for name, option in ((eos, "--eos"), (pad, "--pad")):
            if name is not None and name not in BYTE_NAMES:
                raise DataError(f"{where}: has no token {name!r} ({option}) but {', '.join(BYTE_NAMES)}")
        super().__init__([*(bytes([i]) for i in range(256)), b"", b"", b""], BYTE_NAMES[eos or "<|endoftext|>"],
                         BYTE_NAMES[pad or "<|pad|>"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    @property
    def special_names(self) -> tuple[str, ...]:
        return tuple(BYTE_NAMES)

    def named_id(self, name: str) -> int | None:
        return BYTE_NAMES.get(name)


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken, from a file that has all of it: see `tiktoken_file`."""

    kind = "tiktoken"

    def __init__(self, data: bytes, where: str, eos: str | None = None, pad: str | None = None, threads: int = 0):
        tiktoken = optional("tiktoken", where)
        try:
            spec = json.loads(data)
            ranks = {base64.b64decode(piece): rank for piece, rank in spec["ranks"].items()}
            special: dict[str, int] = spec["special_tokens"]
            self._encoding = tiktoken.Encoding(spec["name"], pat_str=spec["pattern"], mergeable_ranks=ranks,
                                               special_tokens=special)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: not a tiktoken encoding of `maxtext data prepare` ({reason(error)}); name one "
                            "with --tokenizer tiktoken:NAME") from error
        self._special = special
        pieces = [b""] * (max([*ranks.values(), *special.values()]) + 1)
        for piece, rank in ranks.items():
            pieces[rank] = piece
        eos_id = self._named(eos, EOS_NAMES, where, "--eos")
        if eos_id is None:
            raise DataError(f"{where}: has none of {', '.join(EOS_NAMES)}; name the token with --eos")
        pad_id = self._named(pad, PAD_NAMES, where, "--pad")
        super().__init__(pieces, eos_id, eos_id if pad_id is None else pad_id)
        self._threads = threads or cpu_count()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)

    @property
    def special_names(self) -> tuple[str, ...]:
        return tuple(self._special)

    def named_id(self, name: str) -> int | None:
        return self._special.get(name)

    def _named(self, name: str | None, guesses: Sequence[str], where: str, option: str) -> int | None:
        if name is not None and name not in self._special:
            raise DataError(f"{where}: has no token {name!r} ({option}) but {', '.join(self._special)}")
        return self._special[name] if name else next((self._special[g] for g in guesses if g in self._special), None)


def tiktoken_file(name: str) -> bytes:
    """All of an encoding that tiktoken knows by name: its pattern, ranks and special tokens, as JSON.

    Raises:
      DataError: tiktoken is not installed, does not know it, or cannot fetch it.
    """
    tiktoken = optional("tiktoken", f"--tokenizer tiktoken:{name}")
    try:
        encoding: Any = tiktoken.get_encoding(name)
    except ValueError as error:
        raise DataError(f"--tokenizer tiktoken:{name}: {reason(error)}") from error
    except Exception as error:  # one of the many errors of fetching a file
        raise DataError(f"--tokenizer tiktoken:{name}: cannot be fetched ({type(error).__name__}); tiktoken needs the "
                        "network once: copy its folder TIKTOKEN_CACHE_DIR from a machine that has it, or give a "
                        "tokenizer.json") from error
    ranks = {base64.b64encode(piece).decode(): rank for piece, rank in encoding._mergeable_ranks.items()}
    return json.dumps({"name": name, "pattern": encoding._pat_str, "special_tokens": encoding._special_tokens,
                       "ranks": ranks}, indent=0).encode()
