"""Readers of text: a folder, a text file, JSON lines, and the corpus that every Python installation carries.

Each reader is a generator, so that a corpus larger than memory is read twice rather than held.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maxtext.config.reason import reason
from maxtext.data import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py")
# Tests and fixtures are not typical code. `encodings` is near-identical tables: on both sides of a split they would
# make held-out loss look better than it is. `pydoc_data` holds the topics, which are the other domain.
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings",
                             "pydoc_data", "__pycache__", "__phello__"})
STDLIB_FILE_BYTES = 200_000
STDLIB_TOTAL_BYTES = 10_000_000
# A text file is cut at blank lines into documents of at least this many characters, so that it can be split by name.
BLOCK_CHARACTERS = 2_000


@dataclasses.dataclass(frozen=True)
class Document:
    """One document; `name` is unique in its domain and decides on which side of the split it falls."""

    name: str
    text: str
    domain: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A named domain and a function that reads its documents from the start, in the same order every time."""

    name: str
    read: Callable[[], Iterator[Document]]


def python_corpus() -> list[Source]:
    """The built-in corpus `python`: `code` (standard-library sources) and `prose` (the topics of `help()`)."""
    return [Source("code", read_stdlib), Source("prose", read_topics)]


def read_stdlib() -> Iterator[Document]:
    """The running interpreter's standard-library modules, at most STDLIB_TOTAL_BYTES of them, chosen by hash of name.

    Raises:
      DataError: this Python has no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
    files = [(name, path) for name, path in files
             if not STDLIB_LEFT_OUT & set(name.split("/")) and path.stat().st_size <= STDLIB_FILE_BYTES]
    if not files:
        raise DataError(f"{root}: no standard-library sources here; use --source NAME=PATH with text of your own")
    chosen, total = [], 0
    for name, path in sorted(files, key=lambda file: name_hash(file[0])):
        total += path.stat().st_size
        if total > STDLIB_TOTAL_BYTES:
            break
        chosen.append((name, path))
    for name, path in sorted(chosen):
        yield Document(name, read_utf8(path), "code")


def read_topics() -> Iterator[Document]:
    """The texts of `help("TOPIC")`, one document a topic, without topics that mostly repeat a longer one.

    Raises:
      DataError: this Python has no pydoc_data.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("this Python has no pydoc_data.topics; use --source NAME=PATH with text of your own") from error
    # Topics are cut from one manual and overlap: "numeric-types" stands word for word in "specialnames", under another
    # heading. On both sides of the split it would be learned by heart, and no comparison of whole texts sees it.
    seen: set[str] = set()
    chosen = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {" ".join(part.split()) for part in topics[name].split("\n\n") if len(part) > 60}
        if len(paragraphs & seen) <= len(paragraphs) / 2:
            chosen.append(name)
            seen |= paragraphs
    for name in sorted(chosen):
        yield Document(name, topics[name], "prose")


def open_source(name: str, path: str | Path) -> Source:
    """A domain from a folder of .txt, .md and .py files, a single one of them, or .jsonl (.gz) with a `text` key.

    Raises:
      DataError: the path is missing or of another kind.
    """
    path = Path(path)
    if path.is_dir():
        return Source(name, lambda: _read_folder(name, path))
    if not path.is_file():
        raise DataError(f"--source {name}={path}: no such file or folder")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return Source(name, lambda: _read_jsonl(name, path))
    if path.suffix in TEXT_SUFFIXES:
        return Source(name, lambda: _read_blocks(name, path))
    raise DataError(f"--source {name}={path}: expected a folder, {', '.join(TEXT_SUFFIXES)}, .jsonl or .jsonl.gz")


def name_hash(name: str) -> int:
    """The first 64 bits of the sha256 of a name: orders and splits that do not depend on the machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()[:8], "big")


def read_utf8(path: Path) -> str:
    """The text of a file exactly as it is: no newline is translated.

    Raises:
      DataError: file, line and byte that is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror})") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        raise DataError(message) from error


def _read_folder(domain: str, root: Path) -> Iterator[Document]:
    found = False
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix in TEXT_SUFFIXES and not file.startswith("."):
                found = True
                yield Document(path.relative_to(root).as_posix(), read_utf8(path), domain)
    if not found:
        raise DataError(f"--source {domain}={root}: no {', '.join(TEXT_SUFFIXES)} file in this folder")


def _read_blocks(domain: str, path: Path) -> Iterator[Document]:
    block: list[str] = []
    start, size = 1, 0
    for number, line in enumerate(io.StringIO(read_utf8(path), newline="\n"), 1):
        if not block:
            start = number
        block.append(line)
        size += len(line)
        if size >= BLOCK_CHARACTERS and not line.strip():
            yield Document(f"{path.name}:{start}", "".join(block), domain)
            block, size = [], 0
    if block:
        yield Document(f"{path.name}:{start}", "".join(block), domain)


def _read_jsonl(domain: str, path: Path) -> Iterator[Document]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    seen: set[int] = set()
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    name, text = _parse_json_line(line, f"{path}:{number}")
                    name = f"{path.name}:{number}" if name is None else name
                    if name_hash(name) in seen:
                        raise DataError(f"{path}:{number}: id {name!r} was used before; ids decide the split")
                    seen.add(name_hash(name))
                    yield Document(name, text, domain)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot read ({reason(error)})") from error


def _parse_json_line(line: bytes, where: str) -> tuple[str | None, str]:
    """The id (None without one) and the text of one line of JSON."""
    try:
        entry = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} in column {error.colno}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise DataError(f'{where}: expected an object with a string under "text"')
    try:
        entry["text"].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} of the text is a lone surrogate, which is not Unicode "
                        "text") from error
    name = entry.get("id")
    if name is not None and not isinstance(name, str | int):
        raise DataError(f'{where}: "id" must be a string or a number, not {json.dumps(name)}')
    return None if name is None else str(name), entry["text"]
