"""`maxtext data inspect CONFIG --step N`: what stands in the batch of an update, and where each document comes from.

Works the batch out as a run does, in this process and without devices. Shapes: T tokens of one instance.
"""

from __future__ import annotations

import bisect
import csv
import functools
import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.data import DataError, storage
from maxtext.data.documents import companion
from maxtext.data.preflight import read_tokens
from maxtext.data.reader import Reader, RowRules, make_reader
from maxtext.data.staged_order import make_order
from maxtext.data.tokenizer import Tokenizer, load_tokenizer
from maxtext.data.tokens import ResolvedData, resolve

TEXT_SHOWN = 160


@functools.lru_cache(64)
def document_rows(path: str) -> tuple[list[int], list[tuple[int, int, str, str, int]]]:
    """Starts, and (start, end, name, file, line or row), of the documents of a token file that has a companion.

    Raises:
      DataError: the companion is damaged.
    """
    name = companion(path)
    if not storage.is_url(name) and not os.path.exists(name):
        return [], []
    try:
        text = gzip.decompress(storage.read(name, 0, storage.size(name))).decode("utf-8")
        rows = [(int(row[0]), int(row[1]), *[*row[2:4], "", ""][:2], int(row[4]) if len(row) > 4 else 0)
                for row in csv.reader(io.StringIO(text, newline=""))]
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise DataError(f"{name}: lines must be start,end,id,src,loc ({reason(error)})") from error
    return [row[0] for row in rows], rows


def inspect(cfg: Config, step: int, row: int | None = None) -> dict[str, Any]:
    """The batch of update `step`, from 1, as JSON-able values; one row of it, or all.

    Each row has `tokens`, `targets`, `weights` (the mask), `positions` and `segments` (T), and `documents`: the places
    in the row, and the token file, source and text that they come from.

    Raises:
      DataError: data that cannot be read, or no such step or row.
    """
    data = resolve(cfg)
    B = cfg.train.global_batch
    if row is not None and not 0 <= row < B:
        raise DataError(f"--row {row}: the batch has rows 0 to {B - 1} (train.global_batch)")
    order = make_order(cfg, data)
    reader, rules = make_reader(data), RowRules.of(cfg.data, data.eos_id)
    path = data.tokenizer or cfg.eval.tokenizer
    tokenizer = None if path is None else load_tokenizer(path)
    ids = order.instance_ids(step)
    rows = range(B) if row is None else [row]
    return {"step": step, "epoch": order.epoch(step), "rows": [
        {"row": i, "instance": int(ids[i]), **_row(data, reader, rules, tokenizer, int(ids[i]))} for i in rows]}


def _row(data: ResolvedData, reader: Reader, rules: RowRules, tokenizer: Tokenizer | None,
         instance: int) -> dict[str, Any]:
    from maxtext.data.batch import make_batch  # here, because it imports jax, which takes seconds

    ids = np.array([instance])
    read = rules.rows(reader.read(ids), reader.lengths(ids))
    reader.check(read["tokens"], ids)
    batch = make_batch(read["tokens"], read.get("real"), read.get("segments"), read.get("rejected"))
    segments_BT = batch.segments_BT
    T = data.sequence_length
    positions = np.arange(T)
    if segments_BT is not None:
        first = np.flatnonzero(np.diff(segments_BT[0], prepend=-1))
        positions = positions - np.repeat(first, np.diff([*first, T]))
    return {
        "documents": list(_documents(data, reader.pieces(instance), tokenizer)),
        "padding": T - (T if batch.real_B is None else int(batch.real_B[0])),
        "rejected": bool(batch.rejected_B is not None and batch.rejected_B[0]),
        "tokens": batch.tokens_BT[0].tolist(), "targets": batch.targets_BT[0].tolist(),
        "weights": batch.weights_BT[0].tolist(), "positions": positions.tolist(),
        "segments": None if segments_BT is None else segments_BT[0].tolist(),
    }


def _documents(data: ResolvedData, pieces: Sequence[tuple[str, int, int]],
               tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """The documents of one instance, in order: whole ones, and the parts that reach into it."""
    source_of = {part.path: part.source for part in data.parts}
    column, width = 0, data.dtype.itemsize
    for path, start, length in pieces:
        tokens = read_tokens(path, data.dtype, start, length)
        ends = np.flatnonzero(tokens == data.eos_id) + 1
        bounds = sorted({0, length, *ends.tolist()})
        starts, rows = document_rows(path)
        for begin, end in itertools.pairwise(bounds):
            found: dict[str, Any] = {
                "columns": [column + begin, column + end], "source": source_of[path], "file": path,
                "tokens": [start + begin, start + end], "bytes": [(start + begin) * width, (start + end) * width]}
            place = bisect.bisect_right(starts, start + begin) - 1
            if place >= 0 and start + begin < rows[place][1]:
                first, last, name, file, line = rows[place]
                found |= {"name": name, "from": f"{file}:{line}",
                          "document_tokens": [start + begin - first, start + end - first],
                          "document_length": last - first}
                if data.token_bytes is not None:
                    before = read_tokens(path, data.dtype, first, start + begin - first)
                    sizes = data.token_bytes.astype(np.int64)
                    skipped = int(sizes[before].sum())
                    found["text_bytes"] = [skipped, skipped + int(sizes[tokens[begin:end]].sum())]
            if tokenizer is not None:
                found["text"] = tokenizer.decode(tokens[begin:end].tolist())
            yield found
        column += length


def show(found: dict[str, Any]) -> str:
    """The batch for a person: a line a row and a line a document, texts shortened."""
    lines = [f"update {found['step']} (epoch {found['epoch']})"]
    for row in found["rows"]:
        T, trained = len(row["tokens"]), int(sum(row["weights"]))
        lines.append(f"row {row['row']}: instance {row['instance']}, {T} tokens, {trained} trained, {row['padding']} "
                     f"padding{', rejected by the filter' * row['rejected']}")
        for document in row["documents"]:
            name = f"{document['name']} ({document['from']})" if "name" in document else document["file"]
            text = json.dumps(document.get("text", ""), ensure_ascii=False)
            lines.append(f"  {document['columns'][0]:>6}..{document['columns'][1]:<6} {document['source']}: {name}, "
                         f"bytes {document['bytes'][0]}..{document['bytes'][1]} of {os.path.basename(document['file'])}"
                         + (f"\n{'':17}{text if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN] + '...'}"
                            if "text" in document else ""))
    return "\n".join(lines)
