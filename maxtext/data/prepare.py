"""`maxtext data prepare`: text to a tokenizer and token files, split into train and held-out.

The texts are read twice (`scan.py`: to hash and split; `encode.py`: to write), in pieces, by several processes, and
once in between when a tokenizer is trained; a killed run goes on where it was. The result has no clock, path or host
in it: the same texts and options give the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.config.reason import placed
from maxtext.data import DataError
from maxtext.data.cache import write_whole
from maxtext.data.corpus import open_source, python_corpus
from maxtext.data.encode import Encoding, drop_moved, encode_all, gather, kept_documents
from maxtext.data.manifest import DTYPES, FORMAT, NAME, VERSION, read_manifest, smallest_dtype
from maxtext.data.piecework import cut, workshop
from maxtext.data.scan import Scan, scan_all, workers_for
from maxtext.data.special_tokens import LITERAL, POLICIES, SpecialTokens
from maxtext.data.text_source import Source, name_hash
from maxtext.data.tokenizer import TRAINED_NAMES, load_tokenizer, train_sentencepiece
from maxtext.data.tokenizer_files import tiktoken_file

DEFAULT_OUT = "data/quickstart"
DEFAULT_HELDOUT = 0.02
# Small enough that an evaluation of the quickstart takes seconds: about 40,000 tokens of code and 16,000 of prose.
CORPUS_HELDOUT = {"code": 0.015, "prose": 0.12}
TOKENIZER_SAMPLE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """What to prepare. `heldout` gives a fraction for each source.

    Attributes:
      tokenizer: a file, `bytes` or `tiktoken:NAME`; None trains one of vocab_size ids.
      eos, pad, bos: names of its tokens.
      max_bad: records that are not documents and may be left out.
      special_tokens: what becomes of the names of special tokens inside a text (special_tokens.POLICIES).
      workers: processes; None: one a CPU.
    """

    out: Path
    sources: tuple[Source, ...]
    heldout: dict[str, float]
    vocab_size: int = 2048
    tokenizer: str | Path | None = None
    eos: str | None = None
    pad: str | None = None
    bos: str | None = None
    max_bad: int = 0
    special_tokens: str = "literal"
    workers: int | None = None
    force: bool = False

    def tokenizer_bytes(self) -> tuple[str, bytes] | None:
        """Name and content of the tokenizer's file in the prepared folder; None when one is to be trained."""
        if self.tokenizer is None:
            return None
        if self.tokenizer == "bytes":
            return "tokenizer.bytes", b""
        if str(self.tokenizer).startswith("tiktoken:"):
            return "tokenizer.tiktoken.json", tiktoken_file(str(self.tokenizer).removeprefix("tiktoken:"))
        path = Path(self.tokenizer)
        suffix = ".tiktoken.json" if path.name.endswith(".tiktoken.json") else path.suffix
        return f"tokenizer{suffix}", path.read_bytes()

    def inputs_sha256(self, scan: Scan) -> str:
        """Identity of everything that decides the result; the fractions act through the split of each document."""
        file = self.tokenizer_bytes()
        tokenizer = None if file is None else hashlib.sha256(file[1]).hexdigest()
        identity = {"version": VERSION, "tokenizer": tokenizer, "eos": self.eos, "pad": self.pad, "bos": self.bos,
                    "vocab_size": self.vocab_size if tokenizer is None else None,
                    "sources": [source.name for source in self.sources], "documents": scan.sha256()}
        if self.special_tokens != "literal":
            identity["special_tokens"] = self.special_tokens
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def prepare(options: Options) -> tuple[dict[str, Any], bool]:
    """Writes the data set of `options`.

    Returns:
      The manifest, and whether it was written now (False: the folder already held exactly this data set).

    Raises:
      DataError: text that cannot be read or split, a tokenizer that loses bytes, or a folder that holds other things.
    """
    out = options.out
    present = _present(out)
    _check_replaceable(out, present, options.force)
    with workshop(out) as folder:
        pieces = cut(options.sources, _special_tokens(options, folder))
        workers = workers_for(pieces, options.workers)
        scan = scan_all(options.sources, pieces, options.heldout, options.max_bad, workers, folder)
        inputs = options.inputs_sha256(scan)
        if present is not None and not options.force:
            if present.get("inputs_sha256") != inputs:
                raise DataError(f"{out}: holds a data set made from other texts or options; give another --out, or "
                                "--force to replace it")
            missing = _incomplete(out, present)
            if missing is None:
                return present, False
            raise DataError(f"{out / missing}: missing or of the wrong size; --force prepares the data set again")
        building = folder / f"whole-{inputs[:16]}"
        drop_moved(folder, building)
        building.mkdir(exist_ok=True)
        manifest = _write(options, scan, workers, folder, building)
        manifest["inputs_sha256"] = inputs
        write_whole(building / NAME, lambda file: file.write((json.dumps(manifest, indent=1) + "\n").encode()))
        _move_into_place(building, out)
    return manifest, True


def _special_tokens(options: Options, folder: Path) -> SpecialTokens:
    """The policy, with the names that the tokenizer has."""
    if options.special_tokens == "literal":
        return LITERAL
    given = options.tokenizer_bytes()
    if given is None:
        return SpecialTokens(options.special_tokens, TRAINED_NAMES)
    write_whole(folder / given[0], lambda file: file.write(given[1]))
    return SpecialTokens(options.special_tokens,
                         load_tokenizer(folder / given[0], options.eos, options.pad).special_names)


def _tokenizer_file(options: Options, scan: Scan, building: Path) -> str:
    """Puts the tokenizer into the folder, trained when none is given; returns its name."""
    given = options.tokenizer_bytes()
    if given is None and (building / "tokenizer.model").exists():
        return "tokenizer.model"
    if given is None:
        limit = 2**64 * min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, scan.text_bytes))
        documents = (kept for piece, found, mask in zip(scan.pieces, scan.found, scan.kept, strict=True)
                     for kept in kept_documents(piece, found.rows, mask))
        texts = []
        for document, part, _ in documents:
            if document.tokens is not None:
                raise DataError(f"source {document.domain}: holds ids and no text; give the --tokenizer that made them")
            if part == "train" and name_hash(f"sample/{document.domain}/{document.name}") < limit:
                texts.append(document.text)
        given = "tokenizer.model", train_sentencepiece(texts, options.vocab_size)
    name, data = given
    write_whole(building / name, lambda file: file.write(data))
    return name


def _write(options: Options, scan: Scan, workers: int, folder: Path, building: Path) -> dict[str, Any]:
    """Writes all but the manifest into `building`, and returns the manifest."""
    file = _tokenizer_file(options, scan, building)
    tokenizer = load_tokenizer(building / file, options.eos, options.pad)
    bos_id = None if options.bos is None else tokenizer.named_id(options.bos)
    if options.bos is not None and (bos_id is None or bos_id == tokenizer.eos_id or tokenizer.pieces[bos_id]):
        raise DataError(f"--bos {options.bos}: is no special token of the tokenizer beside its end of document")
    dtype = smallest_dtype(tokenizer.vocab_size)
    encoding = Encoding(str(building / file), options.eos, options.pad, bos_id, dtype.name)
    results = encode_all(scan, encoding, workers, folder)
    entries = gather(scan.pieces, results, folder, building)
    with open(building / "token_bytes.npy", "wb") as lengths:
        np.save(lengths, tokenizer.token_bytes())
    return {
        "format": FORMAT, "version": VERSION,
        "tokenizer": {"kind": tokenizer.kind, "file": file,
                      "sha256": hashlib.sha256((building / file).read_bytes()).hexdigest()},
        "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id, "bos_id": bos_id,
        "dtype": next(name for name, value in DTYPES.items() if value == dtype),
        "sources": {source.name: {"heldout_fraction": options.heldout[source.name], **entries[source.name]}
                    for source in options.sources},
        "duplicates_dropped": scan.duplicates, "empty_dropped": scan.empty, "dropped": scan.dropped(),
        "special_tokens": options.special_tokens, "bad_shown": scan.shown,
    }


def _present(out: Path) -> dict[str, Any] | None:
    """The manifest that already stands in `out`; None when it is absent, empty or holds something else."""
    try:
        return read_manifest(out)
    except DataError:
        # An unreadable or foreign manifest counts as something else, which is never replaced.
        return None


def _check_replaceable(out: Path, present: dict[str, Any] | None, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give a folder to --out")
    if present is None and out.is_dir() and any(out.iterdir()):
        older = (out / NAME).exists()
        if not (older and force):
            raise DataError(f"{out}: is not empty and holds no data set of this version; " + (
                "--force replaces it" if older else "give another --out (it is not replaced even with --force)"))


def _incomplete(out: Path, manifest: dict[str, Any]) -> str | None:
    """The first file of a prepared folder that is missing or has another size."""
    width = DTYPES[manifest["dtype"]].itemsize
    for name in (manifest["tokenizer"]["file"], "token_bytes.npy", "files.jsonl"):
        if not (out / name).is_file():
            return name
    for source in manifest["sources"].values():
        for file in source["train"]["files"] + source["heldout"]["files"]:
            path = out / file["path"]
            if not path.with_suffix(".csv.gz").is_file():
                return str(path.with_suffix(".csv.gz").relative_to(out))
            if not path.is_file() or path.stat().st_size != file["tokens"] * width:
                return file["path"]
    return None


def _move_into_place(building: Path, out: Path) -> None:
    """Renames; a data set that is replaced stays whole until the new one is complete."""
    if out.is_dir() and any(out.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        os.rename(out, old)
        os.rename(building, out)
        shutil.rmtree(old)
    else:
        os.rename(building, out)


def run(argv: Sequence[str]) -> int:
    """The verb `maxtext data prepare`.

    Returns:
      Exit code: 0 prepared (or already there), 2 when the arguments or texts cannot be used.
    """
    begin = time.monotonic()
    try:
        options = parse(argv)
        manifest, written = prepare(options)
    except (DataError, OSError) as error:
        print(f"error: {placed(error)}", file=sys.stderr)
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


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line.

    Raises:
      DataError: options that contradict each other or name no source.
    """
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
    args = parser.parse_args(list(argv))

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
    named = args.tokenizer is None or args.tokenizer == "bytes" or args.tokenizer.startswith("tiktoken:")
    if not named and not Path(args.tokenizer).is_file():
        raise DataError(f"--tokenizer {args.tokenizer}: no such file")
    out = Path(os.path.abspath(args.out)) if args.out in ("", ".", "..") else Path(args.out)
    return Options(out, sources, heldout, args.vocab_size, args.tokenizer, args.eos, args.pad, args.bos, args.max_bad,
                   args.special_tokens, args.workers, args.force)


def pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """The values of a repeatable option NAME=VALUE, by name.

    Raises:
      DataError: one is of another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise DataError(f"{option} {item}: expected NAME=VALUE with a NAME of letters, digits, _ . and -")
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
