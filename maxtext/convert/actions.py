"""What `maxtext convert` and `maxtext checkpoint merge` do with their options (convert/commands.py).

Each returns an exit status, and raises ConvertError or CheckpointError for a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext.config.reason import reason
from maxtext.convert import ConvertError, export, hf, merge, olmo_core, parity, replay, trace
from maxtext.convert.saved import TOKENIZER, open_saved
from maxtext.model.cost import count_params


def _on_the_host() -> None:
    """A trainer may hold this machine's accelerators; converting and averaging need none."""
    jax.config.update("jax_platforms", "cpu")


def import_model(options: argparse.Namespace) -> int:
    """`maxtext convert import`."""
    _on_the_host()
    started = time.monotonic()
    hf.refuse_used(options.out)
    if olmo_core.is_checkpoint(options.source):
        cfg = olmo_core.import_checkpoint(options.source, options.out, options.config, print, options.allow_nonfinite)
    elif options.config is not None:
        raise ConvertError("--config is for checkpoints of OLMo-core; a transformers folder has its own config.json")
    else:
        cfg = hf.import_folder(options.source, options.out, print, options.allow_nonfinite)
    _done(f"wrote {options.out}: {count_params(cfg.model):,} parameters", started)
    if options.config is not None:
        out = Path(options.out).absolute()
        print(f"continue it with: maxtext train {options.config} output_dir={out.parent} run_name={out.name}")
    return 0


def export_model(options: argparse.Namespace) -> int:
    """`maxtext convert export`."""
    _on_the_host()
    started = time.monotonic()
    saved = open_saved(options.checkpoint, options.step)
    rows, model_rows = export.tokens_of(saved)["vocab_size"], saved.cfg.model.vocab_size
    vocabulary = None if options.keep_padding or rows is None or rows >= model_rows else int(rows)
    if not options.shard_gb > 0:
        raise ConvertError(f"--shard-gb {options.shard_gb:g} is not above 0")
    export.export_folder(saved, options.out, options.dtype, int(options.shard_gb * 1e9), vocabulary, print)
    _done(f"wrote {options.out} from {saved.step_dir}", started)
    return 0


def merge_checkpoints(options: argparse.Namespace) -> int:
    """`maxtext checkpoint merge`."""
    _on_the_host()
    started = time.monotonic()
    sources = merge.merge(options.out, options.checkpoints)
    for source in sources:
        print(f"1/{len(sources)} of {source.step_dir}")
    print(f"wrote {options.out} in {time.monotonic() - started:.1f} s")
    return 0


def _done(what: str, started: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak / 2**30 if sys.platform == "darwin" else peak / 2**20
    print(f"{what} in {time.monotonic() - started:.1f} s, peak memory {peak:.2f} GiB")


def trace_model(options: argparse.Namespace) -> int:
    """`maxtext convert trace`."""
    started = time.monotonic()
    if Path(options.out).exists():
        raise ConvertError(f"{options.out} exists; choose another place, or remove it")
    folder = hf.open_folder(options.hf_dir)
    if not folder.config.get("vocab_size"):
        raise ConvertError(f"{folder.path / 'config.json'}: vocab_size is missing")
    tokens_BT, tokens = _tokens(options, (folder.path,), int(folder.config["vocab_size"]))
    found = trace.record(options.hf_dir, tokens_BT)
    trace.save(options.out, found)
    _done(f"wrote {options.out}: {len(found.modules)} modules on {tokens_BT.size} tokens of {tokens}", started)
    return 0


def verify_model(options: argparse.Namespace) -> int:
    """`maxtext convert verify`."""
    recorded = options.trace or options.golden
    if options.hf_dir is None and recorded is None:
        raise ConvertError("give the transformers folder, or a saved --trace or --golden of it")
    saved = open_saved(options.checkpoint, options.step)
    folder = None if options.hf_dir is None else hf.open_folder(options.hf_dir)
    if recorded:
        reference, tokens = trace.load(recorded), f"of {recorded}"
    else:
        assert folder is not None
        rows = min(saved.cfg.model.vocab_size, int(folder.config.get("vocab_size", saved.cfg.model.vocab_size)))
        tokens_BT, tokens = _tokens(options, (folder.path, saved.folder / TOKENIZER), rows)
        reference = trace.record(options.hf_dir, tokens_BT, modules=False)
    if options.save_golden:
        trace.save(options.save_golden, dataclasses.replace(reference, modules={}))
    if reference.tokens_BT.min() < 0 or reference.tokens_BT.max() >= saved.cfg.model.vocab_size:
        raise ConvertError(f"the tokens reach {reference.tokens_BT.max()}, the vocabulary has "
                           f"{saved.cfg.model.vocab_size} rows")
    limits = parity.LIMITS[options.dtype]
    replayed = replay.replay(saved, reference, limits, options.dtype) if options.trace else replay.NOT_REPLAYED
    report: dict[str, Any] = {
        "checkpoint": saved.step_dir,
        "reference": recorded or options.hf_dir,
        "tokens": tokens,
        "dtype": options.dtype,
        **parity.compare(parity.ours(saved, reference.tokens_BT, options.dtype), reference, limits),
        "weights_compared": folder is not None,
        "different_weights": [] if folder is None else parity.compare_weights(saved, folder),
        **replayed,
    }
    if report["first_wrong_block"]:
        report["failures"].insert(0, f"the first part that differs when fed with the reference's input is "
                                     f"{report['first_wrong_block']}: {report['likely_cause']}")
    if report["different_weights"]:
        names = ", ".join(f"{w['name']}{' (' + w['note'] + ')' if w['note'] else ''}"
                          for w in report["different_weights"][:10])
        count = len(report["different_weights"])
        report["failures"].append(f"{count} tensors of {options.hf_dir} are not ours: {names}")
    text = parity.markdown(report)
    target = Path(options.report or saved.folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "parity.json").write_text(json.dumps(report, indent=1) + "\n")
    (target / "parity.md").write_text(text)
    print(text, end="")
    print(f"written: {target / 'parity.json'} and parity.md")
    return 1 if report["failures"] else 0


def _tokens(options: argparse.Namespace, folders: Sequence[Path], vocabulary: int) -> tuple[np.ndarray, str]:
    """Rows of token ids below `vocabulary`, and where they come from; `folders` may have a tokenizer."""
    shape = (options.rows, options.length)
    for name, number in zip(("rows", "length"), shape, strict=True):
        if number < 1:
            raise ConvertError(f"--{name} {number} leaves nothing to compare; give 1 or more")
    if options.text:
        try:
            text, source = Path(options.text).read_text(encoding="utf-8"), options.text
        except (OSError, UnicodeDecodeError) as error:
            raise ConvertError(f"{options.text}: cannot be read: {reason(error)}") from None
    else:
        from pydoc_data.topics import topics

        text, source = "\n".join(topics.values()), "Python's help topics"
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
            if len(ids) < shape[0] * shape[1]:
                raise ConvertError(f"{source} has {len(ids)} tokens, {shape[0]} rows of {shape[1]} need "
                                   f"{shape[0] * shape[1]}; give less with --rows and --length, or a longer --text")
            return np.asarray(ids[: shape[0] * shape[1]], np.int32).reshape(shape), source
    if options.text:
        raise ConvertError(f"no tokenizer.json in {' or '.join(map(str, folders))}, so {options.text} cannot "
                           "be read; leave --text out to compare on random ids")
    print("no tokenizer.json is known: comparing on random ids")
    return np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.int32), "random ids"
