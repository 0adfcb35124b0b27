"""Where text comes from: the corpus that every Python installation carries, and the sources that a person names."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from maxtext.config.reason import reason
from maxtext.data import DataError
from maxtext.data.text_datasets import dataset_units, is_hf, is_tfds, read_hf, read_tfds
from maxtext.data.text_files import (
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    jsonl_units,
    read_blocks,
    read_jsonl,
    read_text,
    read_utf8,
)
from maxtext.data.text_records import (
    array_record_units,
    megatron_units,
    parquet_units,
    read_array_record,
    read_megatron,
    read_parquet,
    read_tfrecord,
)
from maxtext.data.text_source import Bad, Document, Reader, Source, Unit, name_hash

# Tests and fixtures are not typical code. `encodings` is near-identical tables: on both sides of a split they would
# make held-out loss look better than it is. `pydoc_data` holds the topics, which are the other domain.
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings",
                             "pydoc_data", "__pycache__", "__phello__"})
STDLIB_FILE_BYTES = 200_000
STDLIB_TOTAL_BYTES = 10_000_000


def python_corpus() -> list[Source]:
    """The built-in corpus `python`: `code` (standard-library sources) and `prose` (the topics of `help()`)."""
    return [Source(name, (Unit(kind, kind, name, STDLIB_TOTAL_BYTES),))
            for name, kind in (("code", "stdlib"), ("prose", "topics"))]


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


def open_source(name: str, path: str | Path, key: str = "text") -> Source:
    """A domain from a file, a glob or a folder, by the names of the files (`FORMATS`); PATH#SPLIT names a split.

    Args:
      key: of the text in JSON, Parquet and other records.

    Raises:
      DataError: nothing is there, or it is of another kind.
    """
    text, split = str(path), ""
    if "#" in text and not os.path.exists(text):  # a name may have a # of its own
        text, _, split = text.rpartition("#")
    path = Path(text)
    where = f"--source {name}={path}"
    if path.is_dir():
        if is_tfds(path) or is_hf(path):
            return Source(name, tuple(dataset_units(path, path.name, key, split)))
        files = list(_walk(path))
        if not files:
            raise DataError(f"{where}: no {', '.join(KNOWN)} file in this folder")
        return Source(name, tuple(unit for file in files
                                  for unit in _units(file, file.relative_to(path).as_posix(), key, "text")))
    if split:
        raise DataError(f"{where}#{split}: only a data set in a folder has splits")
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(text, recursive=True)))
    if not matches and path.with_suffix(".idx").is_file():
        matches = [path.with_suffix(".bin")]  # Megatron's own way to name the pair
    if not matches:
        raise DataError(f"{where}: no such file or folder")
    units = []
    for file in matches:
        if format_of(file) is None:
            raise DataError(f"--source {name}={file}: expected a folder, {', '.join(KNOWN)}")
        shared = os.path.commonpath([match.parent for match in matches])
        units += _units(file, file.relative_to(shared).as_posix(), key, "blocks")
    return Source(name, tuple(units))


def read_units(units: Iterable[Unit], domain: str) -> Iterator[Document | Bad]:
    """The documents of units, in the same order every time, and the records that are none.

    Raises:
      DataError: a unit cannot be read.
    """
    for unit in units:
        try:
            yield from READERS[unit.kind](unit, domain)
        except OSError as error:
            raise DataError(f"{unit.path}: cannot read ({reason(error)})") from error


def read_source(source: Source) -> Iterator[Document]:
    """The documents of a source.

    Raises:
      DataError: the first record that is not a document.
    """
    for document in read_units(source.units, source.name):
        if isinstance(document, Bad):
            raise DataError(f"{document.where}: {document.why}")
        yield document


def format_of(path: Path) -> str | None:
    """The format that the name of a file says: a key of FORMATS, or None."""
    return next((kind for kind, (pattern, _) in FORMATS.items() if re.search(pattern, path.name)), None)


def _walk(root: Path) -> Iterator[Path]:
    """The files of a known format below a folder, sorted by name; without those that begin with a dot, and a .bin that
    has no .idx."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path, kind = Path(folder, file), format_of(Path(file))
            if kind and not file.startswith(".") and (kind != "megatron" or path.with_suffix(".idx").is_file()):
                yield path


def _units(path: Path, name: str, key: str, text_kind: str) -> Iterator[Unit]:
    kind = format_of(path)
    assert kind is not None
    make = FORMATS[kind][1]
    if make is not None:
        yield from make(path, name, key)
    else:
        yield Unit(text_kind if kind == "text" else kind, str(path), name, path.stat().st_size, key=key)


def _ending(*suffixes: str) -> str:
    return f"({'|'.join(map(re.escape, suffixes))})$"


_SHARD = r"(-\d+-of-\d+)?$"
# Format -> how the names of its files end, and what cuts a file into units (None: it is one).
FORMATS: dict[str, tuple[str, Callable[[Path, str, str], Iterator[Unit]] | None]] = {
    "text": (_ending(*TEXT_SUFFIXES), None),
    "jsonl": (_ending(*JSON_SUFFIXES), jsonl_units),
    "parquet": (_ending(".parquet"), parquet_units),
    "array_record": (r"\.(array_record|arrayrecord)" + _SHARD, array_record_units),
    "tfrecord": (r"\.tfrecords?" + _SHARD, None),
    "megatron": (_ending(".bin"), megatron_units),
}
KNOWN = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".parquet", ".array_record", ".tfrecord", ".bin")
READERS: dict[str, Reader] = {
    "text": read_text, "blocks": read_blocks, "jsonl": read_jsonl, "parquet": read_parquet,
    "array_record": read_array_record, "tfrecord": read_tfrecord, "megatron": read_megatron, "tfds": read_tfds,
    "hf": read_hf, "stdlib": lambda unit, domain: read_stdlib(), "topics": lambda unit, domain: read_topics(),
}
