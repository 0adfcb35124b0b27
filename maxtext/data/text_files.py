"""Readers of text files and of JSON lines, plain or compressed (gzip, Zstandard)."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxtext.config.reason import reason
from maxtext.data import DataError
from maxtext.data.text_source import UNIT_BYTES, Bad, Document, Unit, optional, record_document

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
BOM = b"\xef\xbb\xbf"
# A text file is cut at blank lines into documents of at least this many characters, so that it can be split by name.
BLOCK_CHARACTERS = 2_000
COUNT_BLOCK = 8 << 20


def read_utf8(path: Path) -> str:
    """The text of a file exactly as it is: no newline is translated.

    Raises:
      DataError: file, line and byte that is not UTF-8.
    """
    text = _decoded(path)
    if isinstance(text, Bad):
        raise DataError(f"{text.where}: {text.why}")
    return text


def _decoded(path: Path) -> str | Bad:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read ({reason(error)})") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Bad(f"{path}:{line}", f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8")


def read_text(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """A text file as one document."""
    text = _decoded(Path(unit.path))
    yield text if isinstance(text, Bad) else Document(unit.name, text, domain, unit.name)


def read_blocks(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """A text file cut at blank lines; a block with a byte that is not UTF-8 is bad as a whole."""
    block: list[str] = []
    start, size, bad = 1, 0, None
    with open(unit.path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = bad or Bad(f"{unit.path}:{number}",
                                 f"byte 0x{raw[error.start]:02x} in column {error.start + 1} is not UTF-8")
                line = raw.decode("utf-8", errors="replace")
            if not block:
                start = number
            block.append(line)
            size += len(line)
            if size >= BLOCK_CHARACTERS and not line.strip():
                yield bad or Document(f"{unit.name}:{start}", "".join(block), domain, unit.name, start)
                block, size, bad = [], 0, None
    if block:
        yield bad or Document(f"{unit.name}:{start}", "".join(block), domain, unit.name, start)


def jsonl_units(path: Path, name: str, key: str) -> Iterator[Unit]:
    """A plain file in ranges of whole lines; a compressed one as a whole, as it can only be read from its start."""
    size = path.stat().st_size
    if path.suffix != ".jsonl" or size <= UNIT_BYTES:
        yield Unit("jsonl", str(path), name, size, stop=size, key=key)
        return
    start = position = 0
    number = first = 1
    with open(path, "rb") as file:
        while block := file.read(COUNT_BLOCK):
            begin = 0
            while (at := block.find(b"\n", max(begin, start + UNIT_BYTES - 1 - position))) >= 0:
                number += block.count(b"\n", begin, at + 1)
                begin = at + 1
                yield Unit("jsonl", str(path), name, position + begin - start, start, position + begin, first, key)
                start, first = position + begin, number
            number += block.count(b"\n", begin)
            position += len(block)
    if start < position:
        yield Unit("jsonl", str(path), name, position - start, start, position, first, key)


def read_jsonl(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document a line; blank lines, a byte-order mark and the kind of line end are no part of any."""
    path = Path(unit.path)
    try:
        with contextlib.closing(_opened(path)) as file:
            position = unit.start
            if path.suffix == ".jsonl":
                file.seek(position)
            for number, line in enumerate(file, unit.line):
                if path.suffix == ".jsonl" and position >= unit.stop:
                    break
                position += len(line)
                if number == 1:
                    line = line.removeprefix(BOM)
                if line.strip():
                    yield _line_document(line, unit, number, domain)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read ({reason(error)})") from error


def _opened(path: Path) -> Any:
    """The bytes of a file, decompressed as its name says."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        # And not a reader that takes a stream which was cut for a shorter one.
        stream = optional("pyarrow", f"{path}").input_stream(str(path), compression="zstd")
        return io.BufferedReader(stream, 1 << 20)
    return open(path, "rb")


def _line_document(line: bytes, unit: Unit, number: int, domain: str) -> Document | Bad:
    where = f"{unit.path}:{number}"
    try:
        entry = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return Bad(where, f"byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return Bad(where, f"not JSON: {error.msg} in column {error.colno}")
    except ValueError as error:
        return Bad(where, f"not JSON that can be read: {error}")  # a number of thousands of digits
    except RecursionError:
        return Bad(where, "JSON that is nested too deeply")
    return record_document(entry, unit, number, domain)
