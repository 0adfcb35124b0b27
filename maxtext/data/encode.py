"""The second reading of a corpus: the kept documents of a piece to token files with their companions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxtext.data import DataError
from maxtext.data.cache import write_whole
from maxtext.data.piecework import Piece, each
from maxtext.data.scan import PARTS, Scan, digest_of
from maxtext.data.text_source import Bad, Document
from maxtext.data.tokenizer import Tokenizer, load_tokenizer
from maxtext.data.writer import TokenWriter

BATCH_CHARACTERS = 4 << 20


class Kept(NamedTuple):
    """A document that is written, its side of the split, and the sha256 of its data."""

    document: Document
    part: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What decides the tokens of a document: the tokenizer's file, ids at its ends, and the type of the files."""

    tokenizer: str
    eos: str | None
    pad: str | None
    bos_id: int | None
    dtype: str
    threads: int = 0  # of the tokenizer; 0: as many as there are CPUs

    def identity(self) -> str:
        """Hex identity, by the content of the tokenizer's file."""
        content = hashlib.sha256(Path(self.tokenizer).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps([content, *dataclasses.astuple(self)[1:-1]]).encode()).hexdigest()

    def load(self) -> Tokenizer:
        """The tokenizer, read once in a process."""
        return _load(self.identity(), self)


@functools.lru_cache(2)
def _load(identity: str, encoding: Encoding) -> Tokenizer:
    return load_tokenizer(encoding.tokenizer, encoding.eos, encoding.pad, encoding.threads)


def kept_documents(piece: Piece, rows: np.ndarray, kept: np.ndarray) -> Iterator[Kept]:
    """The kept documents of a piece again; texts that changed since the scan are refused."""
    number = 0
    for document in piece.read():
        if isinstance(document, Bad):
            continue
        if number >= len(rows):
            raise DataError(f"document {document.name} of {piece.source} appeared while the text was being read")
        if kept[number]:
            digest, high, low = digest_of(document.data)
            if (high, low) != (int(rows["high"][number]), int(rows["low"][number])):
                raise DataError(f"document {document.name} of {piece.source} changed while it was being read")
            yield Kept(document, PARTS[int(rows["part"][number])], digest)
        number += 1
    if number < len(rows):
        raise DataError(f"{len(rows) - number} documents of {piece.source} vanished while the text was being read")


def encode_piece(piece: Piece, rows: np.ndarray, kept: np.ndarray, encoding: Encoding, folder: Path) -> dict[str, Any]:
    """Writes a piece below `folder`, or returns what an earlier run wrote.

    Returns:
      `folder`, `documents` (number), and for each side what its TokenWriter says.

    Raises:
      DataError: a document that the tokenizer changes, or ids that the vocabulary does not have.
    """
    identity = hashlib.sha256(b"".join([piece.identity().encode(), rows.tobytes(), kept.tobytes(),
                                        encoding.identity().encode()])).hexdigest()
    place = folder / f"tokens-{piece.number:05d}-{identity[:16]}"
    if (place / "result.json").exists():
        return json.loads((place / "result.json").read_text())
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    tokenizer = encoding.load()
    lengths = tokenizer.token_bytes().astype(np.int64)
    writers = {part: TokenWriter(place, part, np.dtype(encoding.dtype)) for part in PARTS}
    with open(place / "index.jsonl", "w", encoding="utf-8") as index:
        for batch in _batches(kept_documents(piece, rows, kept)):
            for (document, part, digest), ids in zip(batch, encode_documents(tokenizer, batch), strict=True):
                start = () if encoding.bos_id is None else (encoding.bos_id,)
                tokens = np.concatenate([np.array(start, np.uint32), ids, np.array([tokenizer.eos_id], np.uint32)])
                size = len(document.data) if document.tokens is None else int(lengths[ids].sum())
                writers[part].write(tokens, size, document)
                index.write(json.dumps({"name": document.name, "domain": document.domain, "split": part,
                                        "sha256": digest, "tokens": len(tokens)}) + "\n")
    for writer in writers.values():
        writer.finish()
    result = {"folder": place.name, **{part: writer.entry() for part, writer in writers.items()}}
    write_whole(place / "result.json", lambda file: file.write(json.dumps(result).encode()))
    return result


def encode_documents(tokenizer: Tokenizer, batch: Sequence[Kept]) -> list[np.ndarray]:
    """The ids of documents, without end of document, each uint32.

    Raises:
      DataError: the tokenizer changes a text, makes an end of document inside of it, or does not have its ids.
    """
    texts = [kept.document for kept in batch if kept.document.tokens is None]
    encoded = iter(tokenizer.encode_exactly([document.text for document in texts],
                                            [f"{document.domain}/{document.name}" for document in texts]))
    result = []
    for document, _, _ in batch:
        ids = document.tokens
        if ids is None:
            ids = next(encoded)
        else:
            ids = ids[:-1] if ids.size and int(ids[-1]) == tokenizer.eos_id else ids
            if ids.size and int(ids.max()) >= tokenizer.vocab_size:
                raise DataError(f"document {document.domain}/{document.name}: id {int(ids.max())} is not below the "
                                f"{tokenizer.vocab_size} ids of --tokenizer; it was made with another one")
        if ids.size and (ids == tokenizer.eos_id).any():
            # A boundary that nobody put there; also when the file calls its end of document an ordinary token.
            raise DataError(f"document {document.domain}/{document.name}: holds the end-of-document id "
                            f"{tokenizer.eos_id} at token {int(np.argmax(ids == tokenizer.eos_id))}; name another "
                            "token with --eos")
        result.append(ids)
    return result


def _batches(documents: Iterator[Kept]) -> Iterator[list[Kept]]:
    batch, size = [], 0
    for row in documents:
        batch.append(row)
        size += len(row.document.text) if row.document.tokens is None else 4 * len(row.document.tokens)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(scan: Scan, encoding: Encoding, workers: int, folder: Path) -> list[dict[str, Any]]:
    """Writes all pieces; a result for each, in order."""
    encoding = dataclasses.replace(encoding, threads=1 if workers > 1 else 0)
    return each(encode_piece, [(piece, part.rows, kept, encoding, folder)
                               for piece, part, kept in zip(scan.pieces, scan.found, scan.kept, strict=True)],
                workers, "tokenizing")


def drop_moved(folder: Path, building: Path) -> None:
    """Drops the other results that were killed while they were gathered, and the pieces whose files they have taken."""
    others = [other for other in folder.glob("whole-*") if other != building]
    for path in folder.glob("tokens-*/result.json") if others else ():
        result = json.loads(path.read_text())
        if not all((path.parent / f"{file['path']}.npy").exists() for part in PARTS for file in result[part]["files"]):
            shutil.rmtree(path.parent)
    for other in others:
        shutil.rmtree(other)


def gather(pieces: Sequence[Piece], results: Sequence[dict[str, Any]], folder: Path,
           out: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Moves the token files of all pieces into `out`, numbered on by source and side; joins their lists of documents.

    Can be done again after it was killed.

    Returns:
      For each source and side: `documents`, `tokens`, `bytes` and `files`.
    """
    entries = {piece.source: {part: {"documents": 0, "tokens": 0, "bytes": 0, "files": []} for part in PARTS}
               for piece in pieces}
    with open(out / "files.jsonl", "wb") as index:
        for piece, result in zip(pieces, results, strict=True):
            with open(folder / result["folder"] / "index.jsonl", "rb") as rows:
                shutil.copyfileobj(rows, index)
            for part in PARTS:
                entry: dict[str, Any] = entries[piece.source][part]
                for key in ("documents", "tokens", "bytes"):
                    entry[key] += result[part][key]
                for file in result[part]["files"]:
                    stem = f"{part}/{piece.source}-{len(entry['files']):05d}"
                    (out / part).mkdir(exist_ok=True)
                    for suffix in (".npy", ".csv.gz"):
                        _move(folder / result["folder"] / f"{file['path']}{suffix}", out / f"{stem}{suffix}")
                    entry["files"].append({**file, "path": f"{stem}.npy"})
    return entries


def _move(source: Path, target: Path) -> None:
    if source.exists() or not target.exists():
        os.replace(source, target)
