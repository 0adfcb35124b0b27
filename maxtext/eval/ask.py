"""Texts that a checkpoint, or a transformers folder, goes on from: `maxtext generate`, `maxtext.generate`.

The model is only read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.manifest import load_prepared
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval.completion import Completion, Prompts, Stops, ends_beside
from maxtext.eval.opened import Subject, Weights, config_over, on_these_devices, open_subject
from maxtext.generate.cache import cast_decoder
from maxtext.generate.sampler import Sampling
from maxtext.parallel.mesh import make_mesh


def complete(model: str, prompts: Sequence[str], open_transformers: Callable[[str], Weights], *,
             overrides: Sequence[str] = (), step: int | None = None, tokens: int = 64, temperature: float = 0.0,
             top_k: int | None = None, top_p: float = 1.0, seed: int = 0, stop: Sequence[str] = (),
             context: int | None = None, tokenizer: str | None = None, eos: str | None = None,
             note: Callable[[str], None] = print) -> tuple[float, list[Completion]]:
    """What `model` goes on with, and the seconds that it took, compilation included.

    Args:
      model, step, open_transformers: as of `open_subject`.
      overrides: `key=value`, over the model's own config.
      tokens: most tokens to add to each prompt.
      temperature, top_k, top_p: as of `Sampling`.
      seed: of the samples.
      stop: ids, special tokens or texts that end a completion, beside the end of a document.
      context: most tokens of a prompt and its completion; None: those that the model was trained with.
      tokenizer: a tokenizer.json or a SentencePiece *.model; None: that beside the weights, or of the run's data.
      eos: end of a document, where the tokenizer does not say it.
      note: is told what a person should know.

    Raises:
      ConfigError, NoModelError, CheckpointError, DataError, MeshError: for what was asked.
    """
    sampling = _sampling(tokens, temperature, top_k, top_p, seed, context)
    with open_subject(model, step, open_transformers) as subject:
        cfg = on_these_devices(config_over(subject.config_text, overrides), overrides, note)
        path = _tokenizer_file(tokenizer, subject, cfg)
        loaded = load_tokenizer(path, eos=eos)
        asked = Prompts(prompts, loaded, cfg, tokens, context or cfg.data.sequence_length)
        stops = Stops(loaded, ends_beside(path), stop)
        mesh = make_mesh(cfg)
        with jax.set_mesh(mesh):
            params = subject.params(cfg.model, mesh)
            params = jax.jit(cast_decoder, static_argnums=1)(params, jnp.dtype(cfg.train.compute_dtype))
            began = time.perf_counter()
            completions = asked.complete(params, sampling, seed, stops)
            return time.perf_counter() - began, completions


def read_prompts(prompts: Sequence[str], file: str | None) -> list[str]:
    """The prompts, and those of a file. Raises DataError for a file that cannot be read, and when there are none."""
    texts = list(prompts)
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(f"--prompts-file {file}: cannot be read: {reason(error)}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                texts.append(_json_prompt(line, f"{file}:{number}") if file.endswith(".jsonl") else line)
    if not texts:
        raise DataError("there is nothing to go on from; give --prompt TEXT, or --prompts-file FILE that holds prompts")
    return texts


def _json_prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(f'{where}: neither a JSON string nor an object such as {{"prompt": "Once"}}')
    return text


def _sampling(tokens: int, temperature: float, top_k: int | None, top_p: float, seed: int,
              context: int | None) -> Sampling:
    if context is not None and context < 2:
        raise DataError(f"--context {context} has no room for a prompt and a token; give 2 or more")
    if temperature == 0 and (top_k is not None or top_p != 1):
        raise DataError("--top-k and --top-p choose among samples, but --temperature 0 takes the likeliest token; give "
                        "--temperature too, such as 1")
    if tokens < 1:
        raise DataError(f"--tokens {tokens} adds nothing; give 1 or more")
    if not 0 <= seed < 1 << 32:
        raise DataError(f"--seed {seed}: give a number from 0 to {(1 << 32) - 1}")
    try:
        return Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise DataError(f"--{str(error).replace('_', '-')}") from None


def _tokenizer_file(asked: str | None, subject: Subject, cfg: Config) -> Path:
    """That asked for, else that beside the weights, else that of the run. Raises DataError when there is none."""
    named = asked or subject.tokenizer or cfg.eval.tokenizer
    if named is not None:
        return Path(named)
    if cfg.data.prepared is None:
        raise DataError(f"{subject.where} has neither tokenizer.json nor tokenizer.model beside its weights, and its "
                        "config names none; give --tokenizer FILE, a tokenizer.json or a SentencePiece *.model")
    try:
        return load_prepared(cfg.data.prepared).tokenizer
    except DataError as error:
        raise DataError(f"the run's tokenizer is not where it was: {error}; or give --tokenizer FILE") from None
