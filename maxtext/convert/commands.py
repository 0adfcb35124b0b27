"""`maxtext convert import | export | verify`: weights of other formats in and out, and proof that they are equal."""

from __future__ import annotations

import argparse
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
from maxtext.convert import ConvertError, hf, olmo_core, parity
from maxtext.convert.saved import TOKENIZER, Saved, open_saved
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
    commands = parser.add_subparsers(required=True, metavar="import | export | verify")
    add = commands.add_parser("import", help="a transformers folder, or a checkpoint of OLMo-core, to one of ours")
    add.set_defaults(function=_import)
    add.add_argument("source", help="folder with config.json and weights, or step folder of OLMo-core")
    add.add_argument("out", help="new folder; train.init_from, eval and export open it")
    add.add_argument("--config", help="OLMo-core only: our config of the same run; then OUT is a run to be continued")
    give = commands.add_parser("export", help="a checkpoint of ours to a folder that transformers loads")
    give.set_defaults(function=_export)
    give.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    give.add_argument("out", metavar="hf_dir", help="new folder")
    give.add_argument("--step", type=int, help="this step; the newest good one by default")
    give.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as imported, or float32")
    give.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file, in 10^9 bytes (5)")
    give.add_argument("--keep-padding", action="store_true", help="write all rows of a padded vocabulary")
    check = commands.add_parser("verify", help="run both sides on the same tokens and report every difference")
    check.set_defaults(function=_verify)
    check.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    check.add_argument("hf_dir", help="the transformers folder")
    check.add_argument("--step", type=int, help="this step; the newest good one by default")
    check.add_argument("--golden", metavar="FILE.npz", help="input_ids, logits, hidden_states instead of transformers")
    check.add_argument("--save-golden", metavar="FILE.npz", help="keep what transformers computes as a golden")
    check.add_argument("--text", metavar="FILE", help="text to compare on; a text of Python's own help by default")
    check.add_argument("--rows", type=int, default=4, help="rows of tokens (4)")
    check.add_argument("--length", type=int, default=512, help="tokens in a row (512)")
    check.add_argument("--dtype", choices=tuple(parity.LIMITS), default="float32", help="of our computation (float32)")
    check.add_argument("--report", metavar="DIR", help="where parity.json and parity.md go (the checkpoint's folder)")
    return parser


def _on_the_host() -> None:
    """A trainer may hold this machine's accelerators; converting needs none."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _import(options: argparse.Namespace) -> int:
    _on_the_host()
    started = time.monotonic()
    hf.refuse_used(options.out)
    if olmo_core.is_checkpoint(options.source):
        cfg = olmo_core.import_checkpoint(options.source, options.out, options.config, print)
    elif options.config is not None:
        raise ConvertError("--config is for checkpoints of OLMo-core; a transformers folder has its own config.json")
    else:
        cfg = hf.import_folder(options.source, options.out, print)
    _done(f"wrote {options.out}: {count_params(cfg.model):,} parameters", started)
    if options.config is not None:
        out = Path(options.out).absolute()
        print(f"continue it with: maxtext train {options.config} output_dir={out.parent} run_name={out.name}")
    return 0


def _export(options: argparse.Namespace) -> int:
    _on_the_host()
    started = time.monotonic()
    saved = open_saved(options.checkpoint, options.step)
    rows, model_rows = hf.tokens_of(saved)["vocab_size"], saved.cfg.model.vocab_size
    vocabulary = None if options.keep_padding or rows is None or rows >= model_rows else int(rows)
    if not options.shard_gb > 0:
        raise ConvertError(f"--shard-gb {options.shard_gb:g} is not above 0")
    hf.export_folder(saved, options.out, options.dtype, int(options.shard_gb * 1e9), vocabulary, print)
    _done(f"wrote {options.out} from {saved.step_dir}", started)
    return 0


def _done(what: str, started: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak / 2**30 if sys.platform == "darwin" else peak / 2**20
    print(f"{what} in {time.monotonic() - started:.1f} s, peak memory {peak:.2f} GiB")


def _verify(options: argparse.Namespace) -> int:
    saved = open_saved(options.checkpoint, options.step)
    folder = hf.open_folder(options.hf_dir)
    if options.golden:
        reference, tokens = parity.golden(options.golden), f"of {options.golden}"
    else:
        rows = min(saved.cfg.model.vocab_size, int(folder.config.get("vocab_size", saved.cfg.model.vocab_size)))
        tokens_BT, tokens = _tokens(options, saved, rows)
        reference = parity.transformers_trace(options.hf_dir, tokens_BT)
    if options.save_golden:
        parity.save_golden(options.save_golden, reference)
    if reference.tokens_BT.min() < 0 or reference.tokens_BT.max() >= saved.cfg.model.vocab_size:
        raise ConvertError(f"the tokens reach {reference.tokens_BT.max()}, the vocabulary has "
                           f"{saved.cfg.model.vocab_size} rows")
    limits = parity.LIMITS[options.dtype]
    report: dict[str, Any] = {
        "checkpoint": saved.step_dir,
        "reference": options.golden or options.hf_dir,
        "tokens": tokens,
        "dtype": options.dtype,
        **parity.compare(parity.ours(saved, reference.tokens_BT, options.dtype), reference, limits),
        "different_weights": parity.compare_weights(saved, folder),
    }
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


def _tokens(options: argparse.Namespace, saved: Saved, vocabulary: int) -> tuple[np.ndarray, str]:
    """Rows of token ids below `vocabulary`, and where they come from."""
    shape = (options.rows, options.length)
    if options.text:
        try:
            text, source = Path(options.text).read_text(encoding="utf-8"), options.text
        except (OSError, UnicodeDecodeError) as error:
            raise ConvertError(f"{options.text}: cannot be read: {reason(error)}") from None
    else:
        from pydoc_data.topics import topics

        text, source = "\n".join(topics.values()), "Python's help topics"
    for folder in (Path(options.hf_dir), saved.folder / TOKENIZER):
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
            if len(ids) < shape[0] * shape[1]:
                raise ConvertError(f"{source} has {len(ids)} tokens, {shape[0]} rows of {shape[1]} need "
                                   f"{shape[0] * shape[1]}; give less with --rows and --length, or a longer --text")
            return np.asarray(ids[: shape[0] * shape[1]], np.int32).reshape(shape), source
    if options.text:
        raise ConvertError(f"no tokenizer.json in {options.hf_dir} or beside the checkpoint, so {options.text} cannot "
                           "be read; leave --text out to compare on random ids")
    print("no tokenizer.json is known: comparing on random ids")
    return np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.int32), "random ids"
