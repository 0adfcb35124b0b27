"""`maxtext data prepare`: text to a tokenizer and token files, split into train and held-out.

The texts are read twice (`scan.py`: to hash and split; `encode.py`: to write), in pieces, by several processes, and
once in between when a tokenizer is trained; a killed run goes on where it was. The result has no clock, path or host
in it: the same texts and options give the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.data import DataError
from maxtext.data.cache import write_whole
from maxtext.data.encode import Encoding, drop_moved, encode_all, gather, kept_documents
from maxtext.data.manifest import DTYPES, FORMAT, NAME, VERSION, read_manifest, smallest_dtype
from maxtext.data.piecework import cut, workshop
from maxtext.data.scan import Scan, scan_all, workers_for
from maxtext.data.special_tokens import LITERAL, SpecialTokens
from maxtext.data.text_source import Source, name_hash
from maxtext.data.tokenizer import TRAINED_NAMES, load_tokenizer, train_sentencepiece
from maxtext.data.tokenizer_files import tiktoken_file

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
