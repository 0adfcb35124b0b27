"""The text that a stream reads: its files, their identity, and the libraries that read them row by row, in order."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maxtext.config.reason import reason
from maxtext.config.schema import Config, StreamConfig
from maxtext.data import DataError
from maxtext.data.manifest import Prepared
from maxtext.data.text_source import optional

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".jsonl.gz": "json"}
SAMPLE_BYTES = 1 << 16
LIBRARIES = {"hf": "Hugging Face datasets", "ray": "Ray Data"}


class Row(NamedTuple):
    """One row of the files, and where the reader stood before it: JSON, or None where only a count of rows helps."""

    values: dict[str, Any]
    position: dict[str, Any] | None


class RowReader(Protocol):
    """Reads the rows of the files in order.

    Attributes:
      resumes: how a run goes on, in words.
    """

    resumes: str

    def rows(self, position: dict[str, Any] | None, skip: int) -> Iterator[Row]:
        """The rows from a position (None: the start) on, without the first `skip` of them.

        Raises:
          DataError: a file cannot be read.
        """
        ...

    def close(self) -> None:
        """Ends what was started to read."""
        ...


def stream_files(stream: StreamConfig) -> tuple[list[str], str]:
    """The files of a stream in order, and their format: a key of the libraries' readers.

    Raises:
      DataError: no such file, or files of several or unknown formats.
    """
    files: list[str] = []
    for path in stream.paths:
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            raise DataError(f"data.stream.paths: {path}: no such file")
        files += matches
    suffixes = {next((suffix for suffix in FORMATS if file.endswith(suffix)), Path(file).suffix) for file in files}
    formats = {FORMATS.get(suffix) for suffix in suffixes}
    if len(formats) != 1 or None in formats:
        raise DataError(f"data.stream.paths: files that end in {', '.join(sorted(suffixes))}; give files of one of "
                        f"{', '.join(FORMATS)}. `maxtext data prepare` reads others")
    return files, next(iter(formats)) or ""


def identity(cfg: Config, prepared: Prepared | None, eos_id: int) -> str:
    """Hex identity of what a stream gives: names, sizes and samples of its files, how they become ids and are cut.

    Raises:
      DataError: a file, or that of the tokenizer, cannot be read; or as `stream_files`.
    """
    digest = hashlib.sha256(_tokenizer_bytes(cfg.data.stream, prepared))
    for file in stream_files(cfg.data.stream)[0]:
        try:
            size = os.path.getsize(file)
            with open(file, "rb") as opened:
                digest.update(json.dumps([os.path.basename(file), size]).encode() + opened.read(SAMPLE_BYTES))
                opened.seek(max(0, size - SAMPLE_BYTES))
                digest.update(opened.read())
        except OSError as error:
            raise DataError(f"{file}: cannot read ({reason(error)})") from error
    data = cfg.data
    ends = [eos_id, *([] if prepared is None else [prepared.bos_id, prepared.special_tokens])]
    digest.update(json.dumps([data.stream.kind, data.stream.key, data.stream.tail, data.packing,
                              data.sequence_length, ends]).encode())
    return digest.hexdigest()


def _tokenizer_bytes(stream: StreamConfig, prepared: Prepared | None) -> bytes:
    path = stream.tokenizer or (prepared and prepared.tokenizer)
    assert path, "config/data_rules.py"
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"data.stream.tokenizer: {path}: cannot read ({reason(error)})") from error


def open_reader(stream: StreamConfig) -> RowReader:
    """The library's reader.

    Raises:
      DataError: it is not installed; or as `stream_files`.
    """
    return (HuggingFaceRows if stream.kind == "hf" else RayRows)(*stream_files(stream))


class HuggingFaceRows:
    """Rows through `datasets.load_dataset(..., streaming=True)`, which can go on from its own state."""

    resumes = "resumes exactly"

    def __init__(self, files: list[str], kind: str):
        self._datasets = optional("datasets", "data.stream.kind hf", "datasets")
        self._files, self._kind = files, kind

    def rows(self, position: dict[str, Any] | None, skip: int) -> Iterator[Row]:
        try:
            dataset = self._datasets.load_dataset(self._kind, data_files=self._files, split="train", streaming=True)
            if position is not None:
                dataset.load_state_dict(position)
            before = dataset.state_dict() if position is None else position
            for number, values in enumerate(dataset):
                if number >= skip:
                    yield Row(values, before)
                before = dataset.state_dict()
        except (OSError, ValueError, EOFError, self._datasets.exceptions.DatasetsError) as error:
            raise DataError(f"data.stream: Hugging Face datasets cannot read the files ({reason(error)})") from error

    def close(self) -> None:
        """Nothing was started."""


class RayRows:
    """Rows through Ray Data, in the order of the files; on a Ray cluster of its own unless one is connected."""

    # Ray Data has no state to go on from, but with preserve_order the same files give the same rows.
    resumes = "resumes exactly, but reads its pass from the start again"

    def __init__(self, files: list[str], kind: str):
        """Raises DataError: a library is missing."""
        self._ray = optional("ray", "data.stream.kind ray", "ray")
        self._data = optional("ray.data", "data.stream.kind ray", "ray")
        # Threads of Ray Data import fsspec's HTTP files, all at once: where aiohttp is missing, the import fails in one
        # of them and others see a broken module, so that now and then local files cannot be read either.
        optional("aiohttp", "data.stream.kind ray", "ray")
        self._files, self._kind = files, kind
        self._started = not self._ray.is_initialized()
        if self._started:
            self._ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)

    def rows(self, position: dict[str, Any] | None, skip: int) -> Iterator[Row]:
        context = self._data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        read = self._data.read_parquet if self._kind == "parquet" else self._data.read_json
        try:
            dataset = read([os.path.abspath(file) for file in self._files])
            for values in itertools.islice(dataset.iter_rows(), skip, None):
                yield Row(values, None)
        except (OSError, ValueError, self._ray.exceptions.RayError) as error:
            raise DataError(f"data.stream: Ray Data cannot read the files ({reason(error)})") from error

    def close(self) -> None:
        """Ends the cluster that was started here."""
        if self._started:
            self._ray.shutdown()
            self._started = False
