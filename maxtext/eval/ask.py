"""`maxtext generate MODEL --prompt TEXT`: texts that a checkpoint, or a transformers folder, goes on from.

The model is only read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from maxtext.checkpoint.manager import CheckpointError
from maxtext.config.load import ConfigError
from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.manifest import load_prepared
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval.completion import Completion, Prompts, Stops, ends_beside
from maxtext.eval.opened import NoModelError, Subject, Weights, config_over, on_these_devices, open_subject
from maxtext.generate.cache import cast_decoder
from maxtext.generate.sampler import Sampling
from maxtext.parallel.mesh import MeshError, make_mesh
from maxtext.parallel.runtime import prepare_runtime


def run(argv: Sequence[str], open_transformers: Callable[[str], Weights]) -> int:
    """The verb. Returns the exit status: 0 done, 2 a mistake in what was asked for.

    Args:
      open_transformers: as of `open_subject`.
    """
    parser = argparse.ArgumentParser(prog="maxtext generate", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a run, an imported model, a folder of checkpoints, one step's, "
                        "or a transformers folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the model's own config, such as "
                        "train.compute_dtype=float32 mesh.tensor=2")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="to go on from; repeatable")
    parser.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; in a .jsonl file each line is a "
                        "JSON string, or an object with a prompt")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="most tokens added to each (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among this many likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest tokens that "
                        "together have this probability (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--stop", action="append", default=[], metavar="ID_OR_TEXT", help="what ends a completion, "
                        "beside the end of a document; repeatable")
    parser.add_argument("--context", type=int, metavar="N", help="most tokens of a prompt and its completion (those "
                        "that the model was trained with)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json or a SentencePiece *.model; by default "
                        "that beside the weights, or of the run's data")
    parser.add_argument("--eos", metavar="TOKEN", help="end of a document, where the tokenizer does not say it")
    parser.add_argument("--step", type=int, help="this step; the newest good one by default")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: prompt, text, ids, stopped")
    options = parser.parse_intermixed_args(argv)
    prepare_runtime()
    try:
        texts = _texts(options.prompt, options.prompts_file)
        sampling = _sampling(options)
        with open_subject(options.model, options.step, open_transformers) as subject:
            began, completions = _complete(options, subject, texts, sampling)
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return 2
    except (NoModelError, CheckpointError, DataError, MeshError) as error:
        print(error, file=sys.stderr)
        return 2
    if jax.process_index() == 0:
        _print(completions, options.json, time.perf_counter() - began)
    return 0


def _texts(prompts: list[str], file: str | None) -> list[str]:
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


def _sampling(options: argparse.Namespace) -> Sampling:
    if options.context is not None and options.context < 2:
        raise DataError(f"--context {options.context} has no room for a prompt and a token; give 2 or more")
    if options.temperature == 0 and (options.top_k is not None or options.top_p != 1):
        raise DataError("--top-k and --top-p choose among samples, but --temperature 0 takes the likeliest token; give "
                        "--temperature too, such as 1")
    if options.tokens < 1:
        raise DataError(f"--tokens {options.tokens} adds nothing; give 1 or more")
    if not 0 <= options.seed < 1 << 32:
        raise DataError(f"--seed {options.seed}: give a number from 0 to {(1 << 32) - 1}")
    try:
        return Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise DataError(f"--{str(error).replace('_', '-')}") from None


def _complete(options: argparse.Namespace, subject: Subject, texts: list[str],
              sampling: Sampling) -> tuple[float, list[Completion]]:
    """When generation began, and what came of it."""
    cfg = config_over(subject.config_text, options.overrides)
    cfg = on_these_devices(cfg, options.overrides, lambda text: print(text, file=sys.stderr))
    path = _tokenizer_file(options.tokenizer, subject, cfg)
    tokenizer = load_tokenizer(path, eos=options.eos)
    prompts = Prompts(texts, tokenizer, cfg, options.tokens, options.context or cfg.data.sequence_length)
    stops = Stops(tokenizer, ends_beside(path), options.stop)
    mesh = make_mesh(cfg)
    with jax.set_mesh(mesh):
        params = subject.params(cfg.model, mesh)
        params = jax.jit(cast_decoder, static_argnums=1)(params, jnp.dtype(cfg.train.compute_dtype))
        began = time.perf_counter()
        return began, prompts.complete(params, sampling, options.seed, stops)


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


def _print(completions: list[Completion], as_json: bool, seconds: float) -> None:
    for i, one in enumerate(completions):
        if as_json:
            print(json.dumps({"prompt": one.prompt, "text": one.text, "ids": one.ids, "stopped": one.stopped}))
        else:
            print(*["-" * 20] * (i > 0), one.prompt + one.text, sep="\n")
    count = sum(len(one.ids) for one in completions)
    print(f"{count} tokens in {seconds:.1f} s, compilation included", file=sys.stderr)
