"""The first reading of a corpus: which documents are kept, on which side of the split each falls, and what is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxtext.data import DataError
from maxtext.data.cache import write_whole
from maxtext.data.piecework import Piece, each
from maxtext.data.text_source import Bad, Document, Source, name_hash
from maxtext.data.tokenizer import cpu_count

# Documents fall by hash(SPLIT_SALT + domain + name). This salt gives the built-in corpus, whose documents are few and
# of very unequal length, held-out sets of those sizes in which no single document is half of the text.
SPLIT_SALT = "split 152"
PARTS = ("train", "heldout")
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("name", "<u8"), ("bytes", "<u8"), ("part", "<u8")])
BAD_SHOWN = 20


def split_of(document: Document, fraction: float) -> str:
    """`heldout` or `train`, from the hash of the document's domain and name alone."""
    return "heldout" if name_hash(f"{SPLIT_SALT}/{document.domain}/{document.name}") < fraction * 2**64 else "train"


def digest_of(data: bytes) -> tuple[str, int, int]:
    """The sha256 of a document's data as hex, and its first 128 bits as two numbers."""
    digest = hashlib.sha256(data)
    raw = digest.digest()
    return digest.hexdigest(), int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:16], "big")


@dataclasses.dataclass(frozen=True)
class Found:
    """What is in one piece: a ROW for each document, in order; how many records are none, and the first of those; how
    many documents were left out for the special tokens in them."""

    rows: np.ndarray
    bad: int
    shown: tuple[str, ...]
    special: int = 0


@dataclasses.dataclass
class Scan:
    """What is kept of a corpus: per piece its rows, and a bool for each of them."""

    pieces: Sequence[Piece]
    found: Sequence[Found]
    kept: list[np.ndarray]
    empty: int = 0
    duplicates: int = 0
    repeated_names: int = 0
    bad: int = 0

    @property
    def text_bytes(self) -> int:
        """Bytes of the documents that are kept."""
        return sum(int(found.rows["bytes"][kept].sum()) for found, kept in zip(self.found, self.kept, strict=True))

    @property
    def shown(self) -> list[str]:
        """The first bad records."""
        return [text for found in self.found for text in found.shown][:BAD_SHOWN]

    def dropped(self) -> dict[str, int]:
        """Documents and records that are left out, by reason."""
        special = sum(found.special for found in self.found)
        return {"empty": self.empty, "duplicate": self.duplicates, "repeated id": self.repeated_names, "bad": self.bad,
                "special token": special}

    def sha256(self) -> str:
        """Identity of the documents that are kept: source, name, side and content, in order."""
        digest = hashlib.sha256()
        for piece, found, kept in zip(self.pieces, self.found, self.kept, strict=True):
            digest.update(piece.source.encode())
            digest.update(found.rows[kept].tobytes())
        return digest.hexdigest()


def scan_piece(piece: Piece, folder: Path, fraction: float, max_bad: int) -> Found:
    """Reads a piece, or what an earlier run found in it.

    Raises:
      DataError: more than max_bad records that are not documents.
    """
    path = folder / f"scan-{piece.number:05d}-{piece.identity()[:16]}-{fraction}.npz"
    if path.exists():
        with np.load(path) as arrays:
            return Found(arrays["rows"], int(arrays["bad"]), tuple(json.loads(str(arrays["shown"]))),
                         int(arrays["special"]))
    rows, bad, shown, special = [], 0, [], 0
    for document in piece.read():
        if isinstance(document, Bad) and document.dropped:
            special += 1
        elif isinstance(document, Bad):
            bad += 1
            if len(shown) < BAD_SHOWN:
                shown.append(f"{document.where}: {document.why}")
            if bad > max_bad:
                raise _too_many(shown[0], bad, max_bad)
        else:
            data = document.data
            rows.append((*digest_of(data)[1:], name_hash(document.name), len(data),
                         PARTS.index(split_of(document, fraction))))
    found = Found(np.array(rows, ROW), bad, tuple(shown), special)
    write_whole(path, lambda file: np.savez(file, rows=found.rows, bad=bad, shown=json.dumps(shown), special=special))
    return found


def scan(sources: Sequence[Source], pieces: Sequence[Piece], found: Sequence[Found], heldout: dict[str, float],
         max_bad: int) -> Scan:
    """Decides which documents are kept: the first of equal ones, also across sources, and the first of each name.

    Raises:
      DataError: more than max_bad bad records in all; a source without training documents, or without held-out ones
        although its fraction is above 0.
    """
    result = Scan(pieces, found, [])
    rows = np.concatenate([np.zeros(0, ROW), *(part.rows for part in found)])
    source_of = np.repeat([[source.name for source in sources].index(piece.source) for piece in pieces],
                          [len(part.rows) for part in found]).astype(np.int64)
    full = rows["bytes"] > 0
    result.empty = int((~full).sum())
    # Also across sources: the same text on both sides of the split would be learned by heart.
    first = _first(np.flatnonzero(full), rows["low"], rows["high"])
    result.duplicates = int(full.sum()) - len(first)
    kept = _first(first, rows["name"], source_of)
    result.repeated_names = len(first) - len(kept)
    mask = np.zeros(len(rows), bool)
    mask[kept] = True
    ends = np.cumsum([len(part.rows) for part in found])
    result.kept = np.split(mask, ends[:-1]) if len(ends) else []
    result.bad = sum(part.bad for part in found)
    if result.bad + result.repeated_names > max_bad:
        text = result.shown[0] if result.bad else _repeated(result, np.setdiff1d(first, kept)[0])
        raise _too_many(text, result.bad + result.repeated_names, max_bad)
    for number, source in enumerate(sources):
        parts = rows["part"][kept[source_of[kept] == number]]
        counts = [int((parts == part).sum()) for part in range(2)]
        if counts[0] == 0 or (counts[1] == 0 and heldout[source.name] > 0):
            raise DataError(
                f"source {source.name}: {counts[0]} training and {counts[1]} held-out documents with "
                f"--heldout-fraction {source.name}={heldout[source.name]:g}; give more documents, another fraction, or "
                "0 for none")
    return result


def _first(places: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Of the places whose keys are equal, the first; ascending."""
    if not len(places):
        return places
    columns = [key[places] for key in keys]
    order = np.lexsort(columns)  # stable: equal ones keep their order
    new = np.ones(len(order), bool)
    new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    return np.sort(places[order[new]])


def _repeated(result: Scan, place: int) -> str:
    """The place and name of the document at a place of the whole corpus, whose name is not new."""
    for piece, found in zip(result.pieces, result.found, strict=True):
        if place < len(found.rows):
            documents = (document for document in piece.read() if isinstance(document, Document))
            document = next(document for number, document in enumerate(documents) if number == place)
            return f"{document.file}:{document.place}: id {document.name!r} was used before; ids decide the split"
        place -= len(found.rows)
    raise AssertionError("the place is behind the corpus")


def _too_many(text: str, bad: int, max_bad: int) -> DataError:
    advice = (f" ({bad} bad records, but --max-bad is {max_bad})" if max_bad else
              ". Mend it, or let --max-bad N leave up to N such records out")
    return DataError(text + advice)


def scan_all(sources: Sequence[Source], pieces: Sequence[Piece], heldout: dict[str, float], max_bad: int,
             workers: int, folder: Path) -> Scan:
    """Reads all pieces, and decides."""
    found = each(scan_piece, [(piece, folder, heldout[piece.source], max_bad) for piece in pieces], workers, "reading")
    return scan(sources, pieces, found, heldout, max_bad)


def workers_for(pieces: Sequence[Piece], wanted: int | None) -> int:
    """Processes to work with: as asked for, else one a CPU, and never more than pieces."""
    return max(1, min(wanted or cpu_count(), len(pieces)))
