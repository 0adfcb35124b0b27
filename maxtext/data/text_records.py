"""Readers of record files: Parquet, ArrayRecord, TFRecord, and Megatron's token files.

A record of ArrayRecord or TFRecord is a `tf.train.Example`, or a JSON object, with the text under the key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.config.reason import placed, reason
from maxtext.data import DataError
from maxtext.data.text_source import Bad, Document, Unit, optional, ranges, record_document

BATCH_RECORDS = 1024
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# Source: Megatron-LM `megatron/core/datasets/indexed_dataset.py`, class DType; floats hold no ids.
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def parquet_units(path: Path, name: str, key: str) -> Iterator[Unit]:
    """One unit a row group."""
    parquet = optional("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            columns, groups = file.schema_arrow.names, file.metadata
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a Parquet file ({reason(error)})") from error
    if key not in columns:
        raise DataError(f"{path}: has no column {key!r} but {', '.join(columns)}; name the text with --text-key")
    first = 1
    for group in range(groups.num_row_groups):
        rows = groups.row_group(group)
        yield Unit("parquet", str(path), name, rows.total_byte_size, group, group + 1, first, key)
        first += rows.num_rows


def read_parquet(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document a row; rows are counted from 1."""
    parquet = optional("pyarrow.parquet", unit.path)
    number = unit.line
    try:
        with parquet.ParquetFile(unit.path) as file:
            columns = [name for name in (unit.key, "id") if name in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_RECORDS, [unit.start], columns):
                for row in batch.to_pylist():
                    yield record_document(row, unit, number, domain)
                    number += 1
    except (OSError, ValueError) as error:
        raise DataError(f"{unit.path}: cannot read after row {number - 1} ({reason(error)})") from error


def array_record_units(path: Path, name: str, key: str) -> Iterator[Unit]:
    """Ranges of records."""
    reader = _array_record(str(path))
    count, size = reader.num_records(), path.stat().st_size
    reader.close()
    for start, stop in ranges(count, size):
        yield Unit("array_record", str(path), name, size * (stop - start) // max(1, count), start, stop, start + 1, key)


def read_array_record(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document a record; records are counted from 1."""
    reader = _array_record(unit.path)
    try:
        for start in range(unit.start, unit.stop, BATCH_RECORDS):
            places = range(start, min(start + BATCH_RECORDS, unit.stop))
            for place, record in zip(places, reader.read(list(places)), strict=True):
                yield _parsed(record, unit, place + 1, domain)
    except (RuntimeError, IndexError) as error:
        raise DataError(f"{unit.path}: cannot read ({reason(error)})") from error
    finally:
        reader.close()


def _array_record(path: str) -> Any:
    module = optional("array_record.python.array_record_module", path)
    try:
        return module.ArrayRecordReader(path)
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path}: not an ArrayRecord file ({reason(error)})") from error


def read_tfrecord(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """One document a record, its checksums verified; records are counted from 1.

    A record: length (uint64), its masked CRC-32C, the data, theirs. Source: TensorFlow `core/lib/io/record_writer.h`.

    Raises:
      DataError: a length that its checksum contradicts, or a file that ends inside a record.
    """
    crc = optional("google_crc32c", unit.path)

    def masked(data: bytes) -> int:
        value = crc.value(data)
        return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF

    try:
        with open(unit.path, "rb") as file:
            number = 1
            while head := file.read(12):
                where = f"{unit.path}:{number}"
                if len(head) < 12 or masked(head[:8]) != struct.unpack("<I", head[8:])[0]:
                    raise DataError(f"{where}: the length of the record is damaged, or this is no TFRecord file")
                length = struct.unpack("<Q", head[:8])[0]
                data, tail = file.read(length), file.read(4)
                if len(tail) < 4:
                    raise DataError(f"{where}: the file ends inside this record of {length} bytes: cut short")
                yield (_parsed(data, unit, number, domain) if masked(data) == struct.unpack("<I", tail)[0]
                       else Bad(where, "the checksum of the record does not fit its data"))
                number += 1
    except OSError as error:
        raise DataError(f"{unit.path}: cannot read ({error.strerror})") from error


def _parsed(record: bytes, unit: Unit, number: int, domain: str) -> Document | Bad:
    """The document of a record that is an Example or a JSON object; their first bytes tell which."""
    try:
        entry = json.loads(record) if record[:1] == b"{" else parse_example(record)
    except (ValueError, RecursionError) as error:
        return Bad(f"{unit.path}:{number}", f"the record is neither a tf.train.Example nor JSON: {error}")
    return record_document(entry, unit, number, domain)


def parse_example(data: bytes) -> dict[str, Any]:
    """The features of a serialised `tf.train.Example` that hold one bytes or integer value, by name.

    Source: TensorFlow `core/example/example.proto`, `feature.proto` and the wire format of protocol buffers.

    Raises:
      ValueError: it is none.
    """
    found: dict[str, Any] = {}
    for _, features in _fields(data, 1):
        for _, entry in _fields(features, 1):
            pair = dict(_fields(entry, 1, 2))
            for kind, values in _fields(pair.get(2, b""), 1, 2, 3):
                inside = [value for _, value in _fields(values, 1)]
                if kind == 3 and inside and isinstance(inside[0], bytes):
                    inside = list(_varints(inside[0]))
                if kind != 2 and len(inside) == 1:
                    found[pair.get(1, b"").decode("utf-8")] = inside[0]
    return found


def _varints(data: bytes) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("a number has no end")
        value |= (data[place] & 127) << shift
        shift += 7
        place += 1
        if not data[place - 1] & 128:
            return value, place


def _fields(data: Any, *known: int) -> Iterator[tuple[int, Any]]:
    """Number and content of the fields of a message; numbers as int, all else as bytes."""
    if not isinstance(data, bytes):
        raise ValueError("a number stands where a message is expected")
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        wire, number = tag & 7, tag >> 3
        value: Any
        if wire == 0:
            value, place = _varint(data, place)
        elif wire in (1, 2, 5):
            length, place = _varint(data, place) if wire == 2 else ((8, place) if wire == 1 else (4, place))
            value, place = data[place:place + length], place + length
        else:
            raise ValueError(f"wire type {wire}")
        if place > len(data) or number not in known:
            raise ValueError(f"field {number} does not belong here")
        yield number, value


@dataclasses.dataclass(frozen=True)
class MegatronIndex:
    """Where the documents of a Megatron `.bin` file are: bytes of each sequence, and sequences of each document."""

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray


def megatron_index(path: Path) -> MegatronIndex:
    """Reads the `.idx` beside a `.bin`.

    Raises:
      DataError: one of the two is missing, or the index is of another format, or disagrees with the size of the `.bin`.
    """
    name = path.with_suffix(".idx")
    try:
        data, size = name.read_bytes(), os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{name}: cannot read the index of {path} ({placed(error)})") from error
    if data[:9] != MEGATRON_MAGIC or len(data) < 34 or struct.unpack_from("<Q", data, 9)[0] != 1:
        raise DataError(f"{name}: not a Megatron index of version 1 (MMIDIDX)")
    code, n_sequences, n_documents = struct.unpack_from("<BQQ", data, 17)
    if code not in MEGATRON_TYPES:
        raise DataError(f"{name}: type code {code} holds no token ids; known are {', '.join(map(str, MEGATRON_TYPES))}")
    if len(data) < 34 + 12 * n_sequences + 8 * n_documents or n_documents < 1:
        raise DataError(f"{name}: {len(data)} bytes are too few for {n_sequences} sequences: cut short")
    dtype = np.dtype(MEGATRON_TYPES[code])
    lengths = np.frombuffer(data, "<i4", n_sequences, 34).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", n_sequences, 34 + 4 * n_sequences)
    documents = np.frombuffer(data, "<i8", n_documents, 34 + 12 * n_sequences)
    ends = offsets + lengths * dtype.itemsize
    if (n_sequences and (int(ends.max()) > size or int(offsets.min()) < 0)) or int(documents[-1]) != n_sequences:
        raise DataError(f"{name}: does not fit {path} of {size} bytes: the pair does not belong together, or was cut")
    return MegatronIndex(dtype, lengths, offsets, documents)


def megatron_units(path: Path, name: str, key: str) -> Iterator[Unit]:
    """Ranges of documents."""
    count, size = len(megatron_index(path).documents) - 1, path.stat().st_size
    for start, stop in ranges(count, size):
        yield Unit("megatron", str(path), name, size * (stop - start) // max(1, count), start, stop, start + 1, key)


def read_megatron(unit: Unit, domain: str) -> Iterator[Document | Bad]:
    """The documents, as ids; counted from 1."""
    index = megatron_index(Path(unit.path))
    with open(unit.path, "rb") as file:
        for number in range(unit.start, unit.stop):
            sequences = range(int(index.documents[number]), int(index.documents[number + 1]))
            parts = [np.zeros(0, index.dtype)]
            for i in sequences:
                file.seek(int(index.offsets[i]))
                parts.append(np.frombuffer(file.read(int(index.lengths[i]) * index.dtype.itemsize), index.dtype))
            tokens, where = np.concatenate(parts), f"{unit.path}:{number + 1}"
            yield (Bad(where, f"id {int(tokens.min())} is negative") if tokens.size and int(tokens.min()) < 0 else
                   Document(f"{unit.name}:{number + 1}", "", domain, unit.name, number + 1, tokens.astype(np.uint32)))
