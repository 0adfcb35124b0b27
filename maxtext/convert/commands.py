"""`maxtext convert import | export | trace | verify`: weights of other formats in and out, and proof that they fit."""

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

import numpy as np

from maxtext.checkpoint.manager import CheckpointError
from maxtext.config.reason import placed, reason
from maxtext.convert import ConvertError, export, hf, olmo_core, parity, replay, trace
from maxtext.convert.saved import TOKENIZER, open_saved
from maxtext.model.cost import count_params


def run(argv: Sequence[str]) -> int:
    """The verb. Returns the exit status: 0 done, 1 not the same model (verify), 2 a mistake in what was asked for."""
    options = _parser().parse_args(argv)
    try:
        return options.function(options)
    except (ConvertError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full, a folder that cannot be written
        print(f"error: {placed(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxtext convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="import | export | trace | verify")
    add = commands.add_parser("import", help="a transformers folder, or a checkpoint of OLMo-core, to one of ours")
    add.set_defaults(function=_import)
    add.add_argument("source", help="folder with config.json and weights, or step folder of OLMo-core")
    add.add_argument("out", help="new folder; train.init_from, eval and export open it")
    add.add_argument("--config", help="OLMo-core only: our config of the same run; then OUT is a run to be continued")
    add.add_argument("--allow-nonfinite", action="store_true", help="take NaN and infinite values over as they are")
    give = commands.add_parser("export", help="a checkpoint of ours to a folder that transformers loads")
    give.set_defaults(function=_export)
    give.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    give.add_argument("out", metavar="hf_dir", help="new folder")
    give.add_argument("--step", type=int, help="this step; the newest good one by default")
    give.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as imported, or float32")
    give.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file, in 10^9 bytes (5)")
    give.add_argument("--keep-padding", action="store_true", help="write all rows of a padded vocabulary")
    record = commands.add_parser("trace", help="what each module of transformers computes on a text, as one file")
    record.set_defaults(function=_trace)
    record.add_argument("hf_dir", help="the transformers folder")
    record.add_argument("out", metavar="FILE.npz", help="new file; verify --trace replays it, without torch")
    _add_text(record, rows=1, length=128)
    check = commands.add_parser("verify", help="run both sides on the same tokens and report every difference")
    check.set_defaults(function=_verify)
    check.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    check.add_argument("hf_dir", nargs="?", help="the transformers folder; with --trace or --golden it may be left out")
    check.add_argument("--step", type=int, help="this step; the newest good one by default")
    saved = check.add_mutually_exclusive_group()
    saved.add_argument("--trace", metavar="FILE.npz",
                       help="of maxtext convert trace: names the first part that is wrong, and the likely cause")
    saved.add_argument("--golden", metavar="FILE.npz", help="input_ids, logits, hidden_states instead of transformers")
    check.add_argument("--save-golden", metavar="FILE.npz", help="keep what transformers computes as a golden")
    _add_text(check, rows=4, length=512)
    check.add_argument("--dtype", choices=tuple(parity.LIMITS), default="float32", help="of our computation (float32)")
    check.add_argument("--report", metavar="DIR", help="where parity.json and parity.md go (the checkpoint's folder)")
    return parser


def _add_text(parser: argparse.ArgumentParser, rows: int, length: int) -> None:
    parser.add_argument("--text", metavar="FILE", help="text to compare on; a text of Python's own help by default")
    parser.add_argument("--rows", type=int, default=rows, help=f"rows of tokens ({rows})")
    parser.add_argument("--length", type=int, default=length, help=f"tokens in a row ({length})")


def _on_the_host() -> None:
    """A trainer may hold this machine's accelerators; converting needs none."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _import(options: argparse.Namespace) -> int:
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


def _export(options: argparse.Namespace) -> int:
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


def _done(what: str, started: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak / 2**30 if sys.platform == "darwin" else peak / 2**20
    print(f"{what} in {time.monotonic() - started:.1f} s, peak memory {peak:.2f} GiB")


def _trace(options: argparse.Namespace) -> int:
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


def _verify(options: argparse.Namespace) -> int:
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
