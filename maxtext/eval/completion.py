"""Texts that a model goes on from: encoded and checked once, completed with any weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.tokenizer import Tokenizer
from maxtext.generate.engine import generate
from maxtext.generate.sampler import Sampling
from maxtext.model.decoder import Decoder


class Completion(NamedTuple):
    """What a model adds to a prompt.

    Attributes:
      ids: the new tokens, with the one that ended them.
      text: of the ids, up to the first stop text.
      stopped: whether a stop ended it, and not the number of tokens.
    """

    prompt: str
    ids: list[int]
    text: str
    stopped: bool


class Stops:
    """What ends a completion: the ends of a document, and stops that were asked for."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], words: Sequence[str] = ()) -> None:
        """Each word is an id, the name of a special token, or a text. Raises DataError for an id that is none."""
        self.ids, self.texts = {tokenizer.eos_id, *ends}, []
        for word in words:
            if not word:
                raise DataError("--stop is empty; give an id, the name of a token, or a text")
            named = tokenizer.named_id(word)
            if word.isdecimal():
                if int(word) >= tokenizer.vocab_size:
                    raise DataError(f"--stop {word}: the tokenizer's ids end at {tokenizer.vocab_size - 1}")
                self.ids.add(int(word))
            elif named is not None and not tokenizer.pieces[named]:
                self.ids.add(named)
            else:
                # A token that holds the text ends the row; a text over several tokens is only found afterwards.
                self.texts.append(word)
                self.ids |= {i for i, piece in enumerate(tokenizer.pieces) if word.encode() in piece}

    def cut(self, text: str) -> str:
        """The text up to its first stop."""
        return text[: min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)]


def ends_beside(tokenizer: Path) -> list[int]:
    """The ids that end a text as a generation_config.json beside a tokenizer.json says; none when it says nothing."""
    try:
        found = json.loads((tokenizer.parent / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)]


class Prompts:
    """Texts to go on from, for models of one config."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, cfg: Config, tokens: int, context: int) -> None:
        """Encodes the texts.

        Args:
          tokens: most tokens to add to each.
          context: most tokens of a text with what is added.

        Raises:
          DataError: a text that is empty, too long, or encoded with ids that the model does not have.
        """
        self.texts, self._tokenizer, self._model, self._tokens = tuple(texts), tokenizer, cfg.model, tokens
        self._dtype, self._ids = cfg.train.compute_dtype, [tokenizer.encode_prompt(text) for text in texts]
        for text, ids in zip(texts, self._ids, strict=True):
            shown = repr(text if len(text) <= 40 else text[:40] + "...")
            if not ids:
                raise DataError(f"prompt {shown} is empty: this tokenizer starts a text with no token of its own; give "
                                "at least one character")
            if max(ids) >= cfg.model.vocab_size:
                raise DataError(f"prompt {shown} has the token {max(ids)}, but model.vocab_size is "
                                f"{cfg.model.vocab_size}: this is not the tokenizer of this model")
            if len(ids) + tokens > context:
                raise DataError(f"prompt {shown} has {len(ids)} tokens, and with {tokens} more {len(ids) + tokens}, "
                                f"above the context of {context}; shorten it, or ask for fewer tokens")

    def complete(self, params: Decoder, sampling: Sampling, seed: int, stops: Stops) -> list[Completion]:
        """Completes every text, on the current mesh."""
        stop_ids = {i for i in stops.ids if i < self._model.vocab_size}
        found = generate(params, self._model, self._ids, self._tokens, sampling=sampling, seed=seed, stop_ids=stop_ids,
                         dtype=self._dtype, vocabulary=self._tokenizer.vocab_size)
        completions = []
        for prompt, ids in zip(self.texts, found, strict=True):
            whole = self._tokenizer.decode(ids)
            text = stops.cut(whole)
            completions.append(Completion(prompt, ids, text, ids[-1] in stop_ids or text != whole))
        return completions
