"""`maxtext data prepare | inspect | stats | overlap` on the command line; `--help` needs neither numpy nor jax."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.config.arguments import Arguments
from maxtext.config.reason import placed, reason
from maxtext.data import DataError
from maxtext.data.special_tokens import POLICIES

if TYPE_CHECKING:
    from maxtext.data.prepare import Options

DEFAULT_OUT = "data/quickstart"
DEFAULT_HELDOUT = 0.02
# Small enough that an evaluation of the quickstart takes seconds: about 40,000 tokens of code and 16,000 of prose.
CORPUS_HELDOUT = {"code": 0.015, "prose": 0.12}
NGRAM = 13  # words; stats.py says why


def run_prepare(argv: Sequence[str]) -> int:
    """The verb `maxtext data prepare`.

    Returns:
      Exit code: 0 prepared (or already there), 2 when the arguments or texts cannot be used.
    """
    args = _prepare_arguments(argv)
    from maxtext.data.prepare import prepare  # here and below, behind the parser

    begin = time.monotonic()
    try:
        options = _options(args)
        manifest, written = prepare(options)
    except (DataError, OSError) as error:
        print(placed(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    if not written:
        print(f"{options.out} already holds this data set; nothing to do")
    print(summary(options.out, manifest))
    if written:
        print(f"prepared in {time.monotonic() - begin:.1f} s")
    return 0


def _prepare_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="maxtext data prepare", description="Turn text into a tokenizer and OLMo-format token files.")
    add = parser.add_argument
    add("--out", default=DEFAULT_OUT, metavar="DIR", help="folder to write (default: %(default)s)")
    add("--corpus", choices=("python",), help="built-in text: this Python's library sources (code) and help topics "
        "(prose); the default without --source")
    add("--source", action="append", default=[], metavar="NAME=PATH", help="a domain: a folder, file or glob of "
        ".txt, .md, .py (a single one is cut at blank lines into documents), .jsonl (.gz, .zst), .parquet, "
        "ArrayRecord, TFRecord or Megatron .bin; or the folder of a data set of TensorFlow Datasets or Hugging Face "
        "datasets (#SPLIT); repeatable")
    add("--text-key", default="text", metavar="KEY", help="of the text in JSON, Parquet and records (default: text)")
    add("--max-bad", type=int, default=0, metavar="N", help="leave out up to N records that are not documents, and "
        "count them (default: the first is an error)")
    add("--workers", type=int, metavar="N", help="processes (default: one a CPU); the result does not depend on it")
    add("--vocab-size", type=int, default=2048, metavar="N", help="of the trained tokenizer (default: %(default)s)")
    add("--tokenizer", metavar="FILE", help="use this SentencePiece .model, tokenizer.json, "
        "`bytes` or `tiktoken:NAME` instead of training one")
    add("--eos", metavar="TOKEN", help="end-of-document token of --tokenizer, where it cannot be guessed")
    add("--pad", metavar="TOKEN", help="padding token of --tokenizer")
    add("--bos", metavar="TOKEN", help="token of --tokenizer to begin every document with (default: none)")
    add("--special-tokens", choices=POLICIES, default="literal", help="names of special tokens inside a text: plain "
        "text (default), a bad record, a document left out and counted, or a name taken out of the text")
    add("--heldout-fraction", action="append", default=[], metavar="NAME=F",
        help=f"share of a domain's documents to hold out (default: {DEFAULT_HELDOUT}); repeatable")
    add("--force", action="store_true", help="replace a data set that stands in DIR")
    return parser.parse_args(list(argv))


def _options(args: argparse.Namespace) -> Options:
    """What to prepare. Raises DataError: options that contradict each other or name no source."""
    from maxtext.data.corpus import open_source, python_corpus
    from maxtext.data.prepare import Options

    if args.corpus and args.source:
        raise DataError("give --corpus or --source, not both")
    paths = pairs(args.source, "--source")
    sources = tuple(open_source(name, path, args.text_key) for name, path in paths.items()) or tuple(python_corpus())
    names = [source.name for source in sources]
    heldout = {name: DEFAULT_HELDOUT if paths else CORPUS_HELDOUT[name] for name in names}
    for name, text in pairs(args.heldout_fraction, "--heldout-fraction").items():
        if name not in heldout:
            raise DataError(f"--heldout-fraction {name}={text}: there is no source {name}, only {', '.join(names)}")
        heldout[name] = _fraction(name, text)
    for name in ("max_bad", "workers"):
        value = getattr(args, name)
        if value is not None and value < (name == "workers"):
            raise DataError(f"--{name.replace('_', '-')} {value}: give {int(name == 'workers')} or more")
    if args.tokenizer is None and (args.eos or args.pad or args.bos):
        raise DataError("--eos, --pad and --bos name tokens of a --tokenizer; a trained one has its own")
    _check_tokenizer(args.tokenizer)
    out = Path(os.path.abspath(args.out)) if args.out in ("", ".", "..") else Path(args.out)
    return Options(out, sources, heldout, args.vocab_size, args.tokenizer, args.eos, args.pad, args.bos, args.max_bad,
                   args.special_tokens, args.workers, args.force)


def _check_tokenizer(given: str | None) -> None:
    """Raises DataError where --tokenizer names nothing that could be one, before any text is read."""
    if given is None or given == "bytes" or given.startswith("tiktoken:"):
        return
    from maxtext.data.tokenizer import KINDS, SUFFIXES

    if not Path(given).is_file():
        raise DataError(f"--tokenizer {given}: no such file; give a SentencePiece .model or a Hugging Face "
                        "tokenizer.json that is here, bytes, or tiktoken:NAME; without --tokenizer one is "
                        "trained on the text")
    if Path(given).suffix not in SUFFIXES:
        raise DataError(f"--tokenizer {given}: {KINDS}; without --tokenizer one is trained on the text")


def pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """The values of a repeatable option NAME=VALUE, by name.

    Raises:
      DataError: one is of another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise DataError(f"{option} {item}: expected NAME=VALUE with a NAME of letters, digits, _ . and -, such as "
                            f"{option} mine={value if equals and value else item}")
        if name in found:
            raise DataError(f"{option} {item}: {name} is given twice")
        found[name] = value
    return found


def _fraction(name: str, text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise DataError(f"--heldout-fraction {name}={text}: expected a number from 0 to below 1")
    return fraction


def summary(out: Path, manifest: dict[str, Any]) -> str:
    """The table that a person sees at the end."""
    rows = [("source", "split", "documents", "tokens", "bytes", "bytes/token")]
    for name, source in manifest["sources"].items():
        for part in ("train", "heldout"):
            entry = source[part]
            ratio = f"{entry['bytes'] / entry['tokens']:.2f}" if entry["tokens"] else "-"
            rows.append((name, part, f"{entry['documents']:,}", f"{entry['tokens']:,}", f"{entry['bytes']:,}", ratio))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    dropped = [f"{count:,} {why}" for why, count in manifest["dropped"].items() if count]
    lines.append(f"{out}: {manifest['tokenizer']['kind']} vocabulary {manifest['vocab_size']:,}, eos "
                 f"{manifest['eos_id']}, {manifest['dtype']} tokens; left out: {', '.join(dropped) or 'none'}")
    return "\n".join([*lines, *(f"left out: {text}" for text in manifest["bad_shown"])])


def run_inspect(argv: Sequence[str]) -> int:
    """The verb `maxtext data inspect`; 0, or 2 when the config, the data or the place cannot be used."""
    parser = Arguments(
        prog="maxtext data inspect", description="What stands in the batch of an update, before the guards of a run "
        "leave out rows (`maxtext data audit` says which).")
    parser.add_argument("config", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="update, from 1")
    parser.add_argument("--row", type=int, metavar="R", help="row of the batch, from 0 (default: all)")
    parser.add_argument("--json", action="store_true", help="all values, as one JSON object")
    args = parser.parse_intermixed_args(list(argv))
    from maxtext.config.load import ConfigError, find_config, load
    from maxtext.config.show import print_problems

    try:
        cfg = load(find_config(args.config), args.overrides)
    except ConfigError as error:
        return print_problems(error)
    from maxtext.data.inspect import inspect, show

    try:
        found = inspect(cfg, args.step, args.row)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found, ensure_ascii=False) if args.json else show(found))
    return 0


def run_stats(argv: Sequence[str]) -> int:
    """The verb `maxtext data stats`; 0, or 2 when the folder cannot be used."""
    parser = argparse.ArgumentParser(prog="maxtext data stats", description="What a prepared data set holds.")
    parser.add_argument("folder", help="of `maxtext data prepare`")
    parser.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help="words (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--page", metavar="FILE", help="also write an HTML page")
    args = parser.parse_args(list(argv))
    from maxtext.data.stats import measure, page, show

    try:
        found = measure(args.folder, _positive(args.ngram))
        if args.page:
            Path(args.page).write_text(page(found), encoding="utf-8")
    except (DataError, OSError) as error:
        return _mistake(error, args.page)
    print(json.dumps(found) if args.json else show(found))
    return 0


def run_overlap(argv: Sequence[str]) -> int:
    """The verb `maxtext data overlap`; 0, or 2 when something cannot be read."""
    parser = argparse.ArgumentParser(prog="maxtext data overlap", description="Which texts of evaluation tasks stand "
                                     "in the training text of a prepared data set, by n-grams of words.")
    parser.add_argument("folder", help="of `maxtext data prepare`")
    parser.add_argument("--task", action="append", required=True, metavar="NAME=PATH",
                        help="texts of a task, in any format of `data prepare`; repeatable")
    parser.add_argument("--text-key", default="text", metavar="KEY")
    parser.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help="words (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as one JSON object, with the numbers of the documents")
    args = parser.parse_args(list(argv))
    from maxtext.data.stats import overlap_with, shared_line

    try:
        found = overlap_with(args.folder, pairs(args.task, "--task"), args.text_key, _positive(args.ngram))
    except DataError as error:
        return _mistake(error, None)
    print(json.dumps(found) if args.json else
          "\n".join(shared_line(name, row, found["n"]) for name, row in found["tasks"].items()))
    return 0


def _positive(n: int) -> int:
    if n < 1:
        raise DataError(f"--ngram {n}: give 1 or more words")
    return n


def _mistake(error: Exception, path: str | None) -> int:
    text = f"{path}: cannot write ({reason(error)})" if isinstance(error, OSError) else str(error)
    print(text, file=sys.stderr)
    return 2
