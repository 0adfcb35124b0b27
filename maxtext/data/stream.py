"""Batches of text that is streamed and tokenized while training, for text that cannot be prepared first.

Documents come in the order of the files, pass after pass; nothing is shuffled. The position is that of the next token:
the row it is of, how many tokens of it are used, and where the library's reader stood at a row before it. So a run goes
on exactly, on any number of hosts: each reads the whole stream and keeps the rows of its devices.

Shapes: B rows (instances) of the global batch, T tokens of one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.batch import Batch
from maxtext.data.encode import Kept, encode_documents
from maxtext.data.global_batches import GlobalBatches
from maxtext.data.journal import Journal
from maxtext.data.manifest import load_prepared
from maxtext.data.reader import RowRules, Rows
from maxtext.data.repetition import repetitive
from maxtext.data.special_tokens import LITERAL, SpecialTokens
from maxtext.data.stream_files import LIBRARIES, Row, RowReader, open_reader, stream_files
from maxtext.data.text_source import Bad, Document, Unit, record_document
from maxtext.data.tokenizer import Tokenizer, load_tokenizer
from maxtext.data.tokens import ResolvedData

ENCODE_ROWS = 64  # tokenized together
ANCHOR_ROWS = 256  # between positions of the reader that are kept: its own state costs more than a row


@dataclasses.dataclass(frozen=True)
class StreamEncoding:
    """Rows to ids: the tokenizer, the ids at the ends of a document, and the policy for special tokens in a text."""

    tokenizer: Tokenizer
    key: str
    eos_id: int
    bos_id: int | None = None
    special: SpecialTokens = LITERAL

    @classmethod
    def of(cls, cfg: Config, data: ResolvedData) -> StreamEncoding:
        """That of a config, as its prepared folder has it if there is one.

        Raises:
          DataError: the tokenizer has other ids than the data section says.
        """
        path = cfg.data.stream.tokenizer or data.tokenizer
        assert path is not None, "config/data_rules.py"
        tokenizer = load_tokenizer(path)
        if tokenizer.vocab_size != data.vocab_size:
            raise DataError(f"data.vocab_size: is {data.vocab_size}, but {path} has {tokenizer.vocab_size} ids")
        tokenizer.eos_id = data.eos_id
        prepared = None if cfg.data.prepared is None else load_prepared(cfg.data.prepared)
        special = SpecialTokens("literal" if prepared is None else prepared.special_tokens, tokenizer.special_names)
        return cls(tokenizer, cfg.data.stream.key, data.eos_id, None if prepared is None else prepared.bos_id, special)

    def documents(self, rows: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, np.ndarray]]:
        """Number, from 0, and ids of each row that is a document, ends included; empty ones are left out.

        Raises:
          DataError: a row that is no document, or one that the tokenizer changes.
        """
        found: list[tuple[int, Document]] = []
        documents = self.special.applied(self._document(number, values) for number, values in rows)
        for (number, _), document in zip(rows, documents, strict=True):
            if isinstance(document, Bad):
                if not document.dropped:
                    raise DataError(f"{document.where}: {document.why}")
            elif document.data:
                found.append((number, document))
        ends = np.array([self.eos_id], np.uint32)
        start = ends[:0] if self.bos_id is None else np.array([self.bos_id], np.uint32)
        ids = encode_documents(self.tokenizer, [Kept(document, "train", "") for _, document in found])
        return [(number, np.concatenate([start, one, ends])) for (number, _), one in zip(found, ids, strict=True)]

    def _document(self, number: int, values: dict[str, Any]) -> Document | Bad:
        value = values.get(self.key)
        if isinstance(value, list | np.ndarray):
            ids = np.asarray(value)
            if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or (ids.size and int(ids.min()) < 0):
                return Bad(f"data.stream:{number + 1}", f'"{self.key}" is neither a text nor a list of ids')
            return Document(f"row {number + 1}", "", "stream", "data.stream", number + 1, ids.astype(np.uint32))
        return record_document(values, Unit("", "data.stream", "data.stream", 0, key=self.key), number + 1, "stream")


class StreamedRows(grain.IterDataset):
    """The global batches of a stream without end, as `Rows` of B rows."""

    def __init__(self, cfg: Config, encoding: StreamEncoding, reader: RowReader, rules: RowRules, pad_id: int):
        super().__init__()
        self._made_of = cfg, encoding, reader, rules, pad_id

    def __iter__(self) -> grain.DatasetIterator:
        return _StreamIterator(*self._made_of)


class _StreamIterator(grain.DatasetIterator):
    """Puts documents side by side (chunk) or each in a row of its own (padded)."""

    def __init__(self, cfg: Config, encoding: StreamEncoding, reader: RowReader, rules: RowRules, pad_id: int):
        super().__init__()
        self._B, self._T = cfg.train.global_batch, cfg.data.sequence_length
        self._chunk, self._pads, self._tail = not cfg.data.packs_documents, cfg.data.pads, cfg.data.stream.tail
        self._encoding, self._reader, self._rules, self._pad_id = encoding, reader, rules, pad_id
        self._begin(1, None, 0, 0, 0)

    def _begin(self, epoch: int, position: dict[str, Any] | None, anchor: int, row: int, offset: int) -> None:
        """Opens the files at token `offset` of a row; `position` is that of the reader before row `anchor`."""
        self._epoch, self._row, self._offset = epoch, row, offset
        self._anchors = collections.deque([(anchor, position)])
        self._source: Iterator[Row] = self._reader.rows(position, row - anchor)
        self._waiting: collections.deque[tuple[int, np.ndarray]] = collections.deque()

    def __next__(self) -> Rows:
        for _ in range(2):  # what is left of one pass over the files, and the next one
            tokens, lengths = self._fill()
            if len(lengths) == self._B and not (self._chunk and lengths[-1] < self._T):
                return self._made(tokens, lengths)
            left = int(lengths.sum())
            if left and self._tail == "raise":
                raise DataError(f"data.stream: pass {self._epoch} ends with {left:,} tokens in {len(lengths)} of the "
                                f"{self._B} rows of a batch, and data.stream.tail is raise; write drop or pad")
            self._begin(self._epoch + 1, None, 0, 0, 0)
            if left and self._tail == "pad":
                short = self._B - len(lengths)
                return self._made(np.concatenate([tokens, np.full((short, self._T), self._pad_id, np.uint32)]),
                                  np.concatenate([lengths, np.zeros(short, np.int64)]))
        raise DataError(f"data.stream: a pass over the files is less than a batch of {self._B} x {self._T} tokens; "
                        "lower train.global_batch, or write data.stream.tail: pad")

    def _fill(self) -> tuple[np.ndarray, np.ndarray]:
        """Up to B rows, (R, T), and how much of each is not padding, (R,); fewer at the end of the files."""
        tokens, lengths = np.full((self._B, self._T), self._pad_id, np.uint32), []
        for row in tokens:
            used = 0
            while used < self._T and (self._waiting or self._more()):
                ids = self._waiting[0][1]
                part = ids[self._offset:self._offset + self._T - used]
                row[used:used + len(part)] = part
                used += len(part)
                self._offset += len(part)
                if not self._chunk or self._offset == len(ids):  # of a document that is padded, the rest is cut off
                    self._waiting.popleft()
                    self._offset = 0
                if not self._chunk:
                    break
            if not used:
                break
            lengths.append(used)
        return tokens[:len(lengths)], np.array(lengths, np.int64)

    def _more(self) -> bool:
        """Reads and tokenizes more documents; False at the end of the files."""
        while not self._waiting:
            rows = []
            for number, row in enumerate(itertools.islice(self._source, ENCODE_ROWS), self._row):
                if row.position is not None and number % ANCHOR_ROWS == 0:
                    self._anchors.append((number, row.position))
                rows.append((number, row.values))
            if not rows:
                return False
            self._row += len(rows)
            self._waiting.extend(self._encoding.documents(rows))
            # A position inside a document is in the first row that is read, and not behind its end.
            if self._offset and self._waiting and (
                    self._waiting[0][0] != rows[0][0] or self._offset >= len(self._waiting[0][1])):
                raise DataError("data.stream: the files have changed since the run was saved")
        return True

    def _made(self, tokens: np.ndarray, lengths: np.ndarray) -> Rows:
        rows = self._rules.rows(tokens, None) | {"lengths": lengths}
        if self._pads:
            rows["real"] = lengths
        if self._rules.repetition is not None and lengths.min() < self._T:
            columns = np.arange(self._T, dtype=np.uint32)
            # Padding repeats itself, which is no reason to reject a text: ids that no text has, each once.
            unlike = np.where(columns < lengths[:, None], tokens, np.uint32(2**31) + columns)
            rows["rejected"] = repetitive(unlike, self._rules.repetition)
        return rows

    def get_state(self) -> dict[str, Any]:
        """Where the next token stands; for JSON."""
        row = self._waiting[0][0] if self._waiting else self._row
        while len(self._anchors) > 1 and self._anchors[1][0] <= row:
            self._anchors.popleft()
        anchor, position = self._anchors[0]
        return {"epoch": self._epoch, "row": row, "offset": self._offset, "anchor": anchor, "position": position}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"], state["position"], state["anchor"], state["row"], state["offset"])

    def close(self) -> None:
        super().close()
        self._reader.close()


class StreamBatches(GlobalBatches):
    """Global batches of a stream; as `pipeline.Batches` does of token files.

    Raises:
      DataError: the library is not installed, or the tokenizer does not fit the data section.
    """

    def __init__(self, cfg: Config, resolved: ResolvedData, sharding: jax.sharding.NamedSharding | None,
                 journal: Journal | None = None):
        super().__init__(cfg, resolved, sharding, journal)
        self._reader = open_reader(cfg.data.stream)
        encoding, rules = StreamEncoding.of(cfg, resolved), RowRules.of(cfg.data, resolved.eos_id)
        streamed = StreamedRows(cfg, encoding, self._reader, rules, resolved.pad_id)
        self._iterator = iter(grain.experimental.ThreadPrefetchIterDataset(
            streamed, prefetch_buffer_size=cfg.data.prefetch))
        self._read = self._tokens = 0  # batches of the stream, and tokens of those that were trained on

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        while True:
            rows: Rows = next(self._iterator)
            self._read += 1
            if self._read == self.data_step(self._step + 1):
                break  # the ones before are passed over
        self.last_wait_seconds = time.perf_counter() - begin
        self._step += 1
        self._tokens += int(rows.pop("lengths").sum())
        return self._placed({name: array[self._rows] for name, array in rows.items()}, None)

    @property
    def source_tokens(self) -> dict[str, int]:
        """As `GlobalBatches.source_tokens`."""
        return {"stream": self._tokens}

    def get_state(self) -> dict[str, Any]:
        """As `GlobalBatches.get_state`; `stream` is the position."""
        return {**self._header(), "read": self._read, "stream": self._iterator.get_state(),
                "source_tokens": self.source_tokens}

    def set_state(self, state: dict[str, Any]) -> None:
        """As `GlobalBatches.set_state`."""
        self._take(state, self._check(state))
        self._iterator.set_state(state["stream"])
        self._read, self._tokens = int(state["read"]), int(state["source_tokens"]["stream"])

    def describe(self) -> dict[str, Any]:
        """As `GlobalBatches.describe`, of what is known before the files are read."""
        stream = self._cfg.data.stream
        return {"stream": f"{LIBRARIES[stream.kind]}, {len(stream_files(stream)[0])} files in order, not shuffled; "
                          f"{self._reader.resumes}; tail {stream.tail}", "fingerprint": self._resolved.fingerprint}

    def close(self) -> None:
        """Ends the reader."""
        self._iterator.close()
