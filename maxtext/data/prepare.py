"""`maxtext data prepare`: text to a tokenizer and token files, split into train and held-out.

The texts are read twice (once to hash, split and train the tokenizer, once to write), so they may exceed memory.
The result has no clock, path or host in it: the same texts and options give the same bytes.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.data import DataError
from maxtext.data.corpus import Document, Source, name_hash, open_source, python_corpus
from maxtext.data.manifest import DTYPES, FORMAT, NAME, VERSION, read_manifest, smallest_dtype
from maxtext.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece
from maxtext.data.writer import TokenWriter

DEFAULT_OUT = "data/quickstart"
DEFAULT_HELDOUT = 0.02
# Small enough that an evaluation of the quickstart takes seconds: about 40,000 tokens of code and 16,000 of prose.
CORPUS_HELDOUT = {"code": 0.015, "prose": 0.12}
# Documents fall by hash(SPLIT_SALT + domain + name). This salt gives the built-in corpus, whose documents are few and
# of very unequal length, held-out sets of those sizes in which no single document is half of the text.
SPLIT_SALT = "split 152"
TOKENIZER_SAMPLE_BYTES = 64 << 20
BATCH_CHARACTERS = 4 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """What to prepare. `heldout` gives a fraction for each source."""

    out: Path
    sources: tuple[Source, ...]
    heldout: dict[str, float]
    vocab_size: int = 2048
    tokenizer: Path | None = None
    eos: str | None = None
    pad: str | None = None
    force: bool = False


@dataclasses.dataclass
class Scan:
    """What the first reading found; `kept` has one row a document that is written, in reading order."""

    kept: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)  # domain, name, split, sha256
    text_bytes: int = 0
    duplicates: int = 0
    empty: int = 0

    def inputs_sha256(self, options: Options) -> str:
        """Identity of everything that decides the result; the fractions act through the split of each document."""
        tokenizer = None if options.tokenizer is None else hashlib.sha256(options.tokenizer.read_bytes()).hexdigest()
        identity = {"version": VERSION, "tokenizer": tokenizer, "eos": options.eos, "pad": options.pad,
                    "vocab_size": options.vocab_size if tokenizer is None else None,
                    "sources": [source.name for source in options.sources], "documents": self.kept}
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
    scan = scan_sources(options)
    inputs = scan.inputs_sha256(options)
    if present is not None and not options.force:
        if present.get("inputs_sha256") != inputs:
            raise DataError(f"{out}: holds a data set made from other texts or options; give another --out, or --force "
                            "to replace it")
        missing = _incomplete(out, present)
        if missing is None:
            return present, False
        raise DataError(f"{out / missing}: missing or of the wrong size; --force prepares the data set again")

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise DataError(f"{out}: cannot be made ({error.strerror}); give --out a place that you may write") from error
    try:
        building.chmod(0o755)
        tokenizer = _make_tokenizer(options, scan, building)
        manifest = _write(options, scan, tokenizer, building)
        manifest["inputs_sha256"] = inputs
        _write_json(building / NAME, manifest)
        _move_into_place(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest, True


def scan_sources(options: Options) -> Scan:
    """Reads all texts once: drops empty ones and exact duplicates, and decides the split of each document.

    Raises:
      DataError: a source without training documents, or without held-out ones although its fraction is above 0.
    """
    scan = Scan()
    seen: set[str] = set()
    for source in options.sources:
        counts = {"train": 0, "heldout": 0}
        for document in source.read():
            data = document.text.encode()
            digest = hashlib.sha256(data).hexdigest()
            if not data:
                scan.empty += 1
            elif digest in seen:
                # Also across sources: the same text on both sides of the split would be learned by heart.
                scan.duplicates += 1
            else:
                seen.add(digest)
                part = split_of(document, options.heldout[source.name])
                counts[part] += 1
                scan.kept.append((source.name, document.name, part, digest))
                scan.text_bytes += len(data)
        fraction = options.heldout[source.name]
        if counts["train"] == 0 or (counts["heldout"] == 0 and fraction > 0):
            raise DataError(
                f"source {source.name}: {counts['train']} training and {counts['heldout']} held-out documents with "
                f"--heldout-fraction {source.name}={fraction:g}; give more documents, another fraction, or 0 for none")
    return scan


def split_of(document: Document, fraction: float) -> str:
    """`heldout` or `train`, from the hash of the document's domain and name alone."""
    return "heldout" if name_hash(f"{SPLIT_SALT}/{document.domain}/{document.name}") < fraction * 2**64 else "train"


def _documents(options: Options, scan: Scan) -> Iterator[tuple[Document, str, str]]:
    """The kept documents again, with split and sha256; texts that changed since the scan are refused."""
    kept = iter(scan.kept)
    row = next(kept, None)
    for source in options.sources:
        for document in source.read():
            if row is None or (source.name, document.name) != row[:2]:
                continue
            digest = hashlib.sha256(document.text.encode()).hexdigest()
            if digest != row[3]:
                raise DataError(f"document {document.name} of {source.name} changed while it was being read")
            yield document, row[2], digest
            row = next(kept, None)
    if row is not None:
        raise DataError(f"document {row[1]} of {row[0]} vanished while it was being read")


def _make_tokenizer(options: Options, scan: Scan, building: Path) -> Tokenizer:
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer, options.eos, options.pad)
        shutil.copyfile(options.tokenizer, building / _tokenizer_file(tokenizer))
        return tokenizer
    limit = 2**64 * min(1.0, TOKENIZER_SAMPLE_BYTES / max(1, scan.text_bytes))
    proto = train_sentencepiece(
        (document.text for document, part, _ in _documents(options, scan)
         if part == "train" and name_hash(f"sample/{document.domain}/{document.name}") < limit), options.vocab_size)
    (building / "tokenizer.model").write_bytes(proto)
    return SentencePieceTokenizer(proto)


def _tokenizer_file(tokenizer: Tokenizer) -> str:
    return "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"


def _write(options: Options, scan: Scan, tokenizer: Tokenizer, building: Path) -> dict[str, Any]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    writers = {(source.name, part): TokenWriter(building, part, source.name, dtype)
               for source in options.sources for part in ("train", "heldout")}
    with open(building / "files.jsonl", "w", encoding="utf-8") as index:
        for batch in _batches(_documents(options, scan)):
            encoded = tokenizer.encode_exactly([document.text for document, _, _ in batch],
                                               [f"{document.domain}/{document.name}" for document, _, _ in batch])
            for (document, part, digest), ids in zip(batch, encoded, strict=True):
                tokens = np.array([*ids, tokenizer.eos_id], np.uint32)
                writers[document.domain, part].write(tokens, len(document.text.encode()))
                index.write(json.dumps({"name": document.name, "domain": document.domain, "split": part,
                                        "sha256": digest, "tokens": len(tokens)}) + "\n")
    for writer in writers.values():
        writer.finish()
    np.save(building / "token_bytes.npy", tokenizer.token_bytes())
    file = _tokenizer_file(tokenizer)
    return {
        "format": FORMAT, "version": VERSION,
        "tokenizer": {"kind": tokenizer.kind, "file": file,
                      "sha256": hashlib.sha256((building / file).read_bytes()).hexdigest()},
        "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id,
        "dtype": next(name for name, value in DTYPES.items() if value == dtype),
        "sources": {source.name: {"heldout_fraction": options.heldout[source.name],
                                  "train": writers[source.name, "train"].entry(),
                                  "heldout": writers[source.name, "heldout"].entry()} for source in options.sources},
        "duplicates_dropped": scan.duplicates, "empty_dropped": scan.empty,
    }


def _batches(documents: Iterator[tuple[Document, str, str]]) -> Iterator[list[tuple[Document, str, str]]]:
    batch, size = [], 0
    for row in documents:
        batch.append(row)
        size += len(row[0].text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
            if not path.is_file() or path.stat().st_size != file["tokens"] * width:
                return file["path"]
    return None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


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
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
    add("--source", action="append", default=[], metavar="NAME=PATH", help="a domain: a folder of .txt, .md and .py; "
        "one such file, cut at blank lines into documents; or .jsonl (.gz) with a \"text\" key; repeatable")
    add("--vocab-size", type=int, default=2048, metavar="N", help="of the trained tokenizer (default: %(default)s)")
    add("--tokenizer", metavar="FILE", help="use this SentencePiece .model or tokenizer.json instead of training one")
    add("--eos", metavar="TOKEN", help="end-of-document token of --tokenizer, where it cannot be guessed")
    add("--pad", metavar="TOKEN", help="padding token of --tokenizer")
    add("--heldout-fraction", action="append", default=[], metavar="NAME=F",
        help=f"share of a domain's documents to hold out (default: {DEFAULT_HELDOUT}); repeatable")
    add("--force", action="store_true", help="replace a data set that stands in DIR")
    args = parser.parse_args(list(argv))

    if args.corpus and args.source:
        raise DataError("give --corpus or --source, not both")
    paths = _pairs(args.source, "--source")
    sources = tuple(open_source(name, path) for name, path in paths.items()) or tuple(python_corpus())
    names = [source.name for source in sources]
    heldout = {name: DEFAULT_HELDOUT if paths else CORPUS_HELDOUT[name] for name in names}
    for name, text in _pairs(args.heldout_fraction, "--heldout-fraction").items():
        if name not in heldout:
            raise DataError(f"--heldout-fraction {name}={text}: there is no source {name}, only {', '.join(names)}")
        heldout[name] = _fraction(name, text)
    if args.tokenizer is None and (args.eos or args.pad):
        raise DataError("--eos and --pad name tokens of a --tokenizer; a trained one has its own")
    if args.tokenizer is not None and not Path(args.tokenizer).is_file():
        raise DataError(f"--tokenizer {args.tokenizer}: no such file")
    return Options(Path(os.path.abspath(args.out)) if args.out in ("", ".", "..") else Path(args.out), sources, heldout,
                   args.vocab_size, Path(args.tokenizer) if args.tokenizer else None, args.eos, args.pad, args.force)


def _pairs(items: Sequence[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise DataError(f"{option} {item}: expected NAME=VALUE with a NAME of letters, digits, _ . and -")
        if name in pairs:
            raise DataError(f"{option} {item}: {name} is given twice")
        pairs[name] = value
    return pairs


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
    rows = [("source", "split", "documents", "tokens", "bytes/token")]
    for name, source in manifest["sources"].items():
        for part in ("train", "heldout"):
            entry = source[part]
            ratio = f"{entry['bytes'] / entry['tokens']:.2f}" if entry["tokens"] else "-"
            rows.append((name, part, f"{entry['documents']:,}", f"{entry['tokens']:,}", ratio))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    lines.append(f"{out}: {manifest['tokenizer']['kind']} vocabulary {manifest['vocab_size']:,}, eos "
                 f"{manifest['eos_id']}, {manifest['dtype']} tokens; {manifest['duplicates_dropped']} duplicate and "
                 f"{manifest['empty_dropped']} empty documents left out")
    return "\n".join(lines)
