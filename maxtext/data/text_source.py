"""What a source of text is: an ordered list of units that can each be read alone, and the documents in them.

A unit is a file, or a range of its bytes, rows or records. Reading is by generators, so that a corpus larger than
memory is read twice rather than held, and a unit can be read by any process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import numbers
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from maxtext.data import DataError

if TYPE_CHECKING:
    import numpy as np

# Large files are cut into units of about this many bytes, and small ones gathered: the grain of parallel reading, of
# token files, and of what a killed preparation has to do again.
UNIT_BYTES = 64 << 20
EXTRA = "data"  # the optional dependencies of pyproject.toml that readers and tokenizers ask for


@dataclasses.dataclass(frozen=True)
class Document:
    """One document; `name` is unique in its domain and decides on which side of the split it falls.

    Attributes:
      file, place: where it stands: file of the source, as named from the source on, and line, row or record, from 1.
      tokens: ids, for a source that holds no text (`text` is then empty), without an end of document.
    """

    name: str
    text: str
    domain: str
    file: str = ""
    place: int = 1
    tokens: np.ndarray | None = None

    @property
    def data(self) -> bytes:
        """What makes two documents the same: the UTF-8 text, or the little-endian ids."""
        return self.text.encode() if self.tokens is None else self.tokens.astype("<u4").tobytes()


@dataclasses.dataclass(frozen=True)
class Bad:
    """A record that is not a document: its place and the reason; `dropped`: one that it was asked to leave out."""

    where: str
    why: str
    dropped: bool = False


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of a source that is read by itself.

    Attributes:
      kind: of reader. path: what it opens. name: how documents without an id of their own are called by.
      size: bytes, about; for progress and for even pieces.
      start, stop: of the range, in what the reader counts. line: number of the first line or row.
      key: of the text in a record. split: of a data set that has several.
    """

    kind: str
    path: str
    name: str
    size: int
    start: int = 0
    stop: int = 0
    line: int = 1
    key: str = "text"
    split: str = ""


Reader = Callable[[Unit, str], Iterator[Document | Bad]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A named domain, and its units in order."""

    name: str
    units: tuple[Unit, ...]


def name_hash(name: str) -> int:
    """The first 64 bits of the sha256 of a name: orders and splits that do not depend on the machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()[:8], "big")


def record_document(entry: Any, unit: Unit, number: int, domain: str) -> Document | Bad:
    """The document of one record: its text under `unit.key`, and its id (`id`, else file and number) as name."""
    where = f"{unit.path}:{number}"
    text = entry.get(unit.key) if isinstance(entry, dict) else None
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return Bad(where, f"byte 0x{text[error.start]:02x} at offset {error.start} of the text is not UTF-8")
    if not isinstance(text, str):
        return Bad(where, f'expected an object with a string under "{unit.key}"')
    name = entry.get("id")
    if isinstance(name, bytes):
        name = name.decode("utf-8", errors="replace")
    for what, value in (("text", text), ("id", name if isinstance(name, str) else "")):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Bad(where, f"character {error.start} of the {what} is a lone surrogate, which is not Unicode text")
    if isinstance(name, numbers.Integral) and not isinstance(name, int):  # numpy's
        name = int(name)
    if name is not None and not isinstance(name, str | int):
        return Bad(where, f'"id" must be a string or a number, not {json.dumps(name, default=str)}')
    return Document(f"{unit.name}:{number}" if name is None else str(name), text, domain, unit.name, number)


def optional(module: str, what: str, extra: str = EXTRA) -> Any:
    """A module of the optional dependencies.

    Raises:
      DataError: it is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{what}: needs {module.split('.')[0]}, which is not installed; pip install "
                        f"'maxtext[{extra}]'") from error


def ranges(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` rows of `size` bytes together into even ranges of about UNIT_BYTES."""
    pieces = max(1, min(count, round(size / UNIT_BYTES)))
    for i in range(pieces):
        yield count * i // pieces, count * (i + 1) // pieces
