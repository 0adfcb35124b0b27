"""Speed of the data path, in tokens per second of one core, as one JSON line:

    python benchmarks/data.py [--tokens 33554432] [--sequence-length 8192]

Random uint32 tokens with documents of some 800 tokens, in files that the page cache holds; so this is the cost of the
code, to hold against the speed of the disk and of the device. `core` counts CPU time of all threads, `wall` the clock.

`prepare` is the standard library's text as JSON lines: the library's own batch encoder, both readings of `maxtext data
prepare` (reading, tokenizing), and tokens of JSON lines to token files in all, on one thread. The library and ours are
measured by turns, and `of the library` is the median of the trials' ratios. `stream` is the same text read, tokenized
and cut into batches as `data.stream` does it.

`needs` is what a host of 8 H100s takes of configs/olmo3_7b.yml at 50% of their peak: 8 x 989.5e12 x 0.5 / FLOPs of a
token, in tokens per second; `of 2 cores` is how many times that two cores read from token files, as rows and batches.
`memory` is the growth of the process over 2,000 batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizer library: both sides on one thread
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from maxtext.config import schema
from maxtext.config.load import find_config, load
from maxtext.data.corpus import open_source, read_stdlib
from maxtext.data.encode import Encoding, encode_piece
from maxtext.data.order import instance_order
from maxtext.data.packing import pack_group
from maxtext.data.piecework import cut
from maxtext.data.pipeline import make_batches
from maxtext.data.reader import RowRules, StepSource, make_reader
from maxtext.data.scan import scan_piece
from maxtext.data.tokenizer import load_tokenizer, train_sentencepiece
from maxtext.data.tokens import resolve
from maxtext.model.cost import PEAK_FLOPS, flops_per_token
from maxtext.train.console import host_memory_gib

BATCH, VOCABULARY, EOS, FILES, TRIALS = 16, 100278, 100257, 4, 9


def write_files(folder: Path, tokens: int) -> tuple[str, ...]:
    rng = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        ids = rng.integers(0, EOS, tokens // FILES, dtype=np.uint32)
        ids[rng.integers(0, len(ids), len(ids) // 800)] = EOS
        ids[-1] = EOS
        paths.append(str(folder / f"{number}.npy"))
        ids.tofile(paths[-1])
    return tuple(paths)


def measure(work: Callable[[], int], seconds: float = 2.0) -> dict[str, float]:
    """Tokens per second of `work`, which returns how many it did; called until `seconds` have passed."""
    work()
    wall, core, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        done += work()
    return {"core": round(done / (time.process_time() - core)), "wall": round(done / (time.perf_counter() - wall))}


def preparation(folder: Path) -> dict[str, dict[str, float]]:
    """For each kind of tokenizer: tokens per second of a core, of the library alone and of the two readings."""
    import tokenizers

    texts = [document.text for document in read_stdlib()][::3]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(iter(texts), 8000))
    [piece] = cut([open_source("x", path)])
    found: dict[str, dict[str, float]] = {}
    for name in ("tokenizer.json", "tokenizer.model"):
        encoding = Encoding(str(folder / name), None, None, None, "uint16", threads=1)
        tokenizer = encoding.load()

        def library(tokenizer: Any = tokenizer) -> list[list[int]]:
            if tokenizer.kind == "sentencepiece":
                return tokenizer._model.encode(texts, num_threads=1)
            return [found.ids for found in tokenizer._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

        own: dict[str, list[float]] = {"library": [], "reading": [], "tokenizing": []}
        library()  # fills its cache of words
        for _trial in range(TRIALS):
            shutil.rmtree(folder / "work", ignore_errors=True)
            (folder / "work").mkdir()
            clock = time.process_time()
            n_tokens = sum(map(len, library()))
            own["library"].append(time.process_time() - clock)
            clock = time.process_time()
            rows = scan_piece(piece, folder / "work", 0.0, 0).rows
            own["reading"].append(time.process_time() - clock)
            clock = time.process_time()
            encode_piece(piece, rows, np.ones(len(rows), bool), encoding, folder / "work")
            own["tokenizing"].append(time.process_time() - clock)
        both = [a + b for a, b in zip(own["reading"], own["tokenizing"], strict=True)]
        found[name] = {stage: round(n_tokens / statistics.median(seconds)) for stage, seconds in own.items()}
        found[name]["all"] = round(n_tokens / statistics.median(both))
        ratios = [library / ours for library, ours in zip(own["library"], both, strict=True)]
        found[name]["of the library"] = round(statistics.median(ratios), 3)
        found[name] |= {f"of the library, {which.__name__}": round(which(ratios), 3) for which in (min, max)}
    return found


def streamed(folder: Path, base: schema.Config) -> dict[str, float] | None:
    """Tokens per second of a stream of the text that `preparation` wrote; None without Hugging Face datasets."""
    if importlib.util.find_spec("datasets") is None:
        return None
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    stream = schema.StreamConfig("hf", (str(folder / "text.jsonl"),), tokenizer=str(folder / "tokenizer.json"))
    data = schema.DataConfig(sequence_length=1024, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id,
                             pad_id=tokenizer.pad_id, stream=stream)
    return measure(updates(dataclasses.replace(base, data=data)), 5.0)


def growth(cfg: schema.Config, updates: int = 2000) -> float:
    """Share by which the memory of this process grows from update 200 to the last."""
    batches, before = make_batches(cfg, resolve(cfg)), 1.0
    for update in range(1, updates + 1):
        next(batches)
        if update == 200:
            before = host_memory_gib()
    batches.close()
    return round(host_memory_gib() / before - 1, 4)


def steps(cfg: schema.Config) -> Callable[[], int]:
    """Reads the rows of one more update, as a worker does it."""
    data = resolve(cfg)
    batches = make_batches(cfg, data)
    source = StepSource(batches._order, make_reader(data), batches._rows, RowRules.of(cfg.data, data.eos_id))
    position = iter(range(1 << 40))
    return lambda: source[next(position)]["tokens"].size


def updates(cfg: schema.Config) -> Callable[[], int]:
    """The next batch of the whole iterator."""
    batches = make_batches(cfg, resolve(cfg))
    return lambda: next(batches).tokens_BT.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 25)
    parser.add_argument("--sequence-length", type=int, default=8192)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), arguments.tokens)
        data = schema.DataConfig(sequence_length=arguments.sequence_length, vocab_size=VOCABULARY, eos_id=EOS,
                                 pad_id=VOCABULARY - 1, sources={"x": schema.SourceConfig(paths=files)})
        base = schema.Config(
            model=schema.ModelConfig(vocab_size=VOCABULARY, d_model=8, n_layers=1, n_heads=1, d_ff=8), data=data,
            optim=schema.OptimConfig(lr=1e-3), train=schema.TrainConfig(steps=1, global_batch=BATCH),
            output_dir=folder)

        def with_data(**changes: object) -> schema.Config:
            return dataclasses.replace(base, data=dataclasses.replace(data, **changes))

        filtered = schema.InstanceFilterConfig(enabled=True)
        lengths = np.random.default_rng(1).integers(1, arguments.sequence_length, 1 << 18)
        result: dict[str, Any] = {
            "machine": platform.processor() or platform.machine(), "numpy": np.__version__,
            "read": measure(steps(base)),
            "read + filter": measure(steps(with_data(instance_filter=filtered))),
            "read + filter + documents": measure(steps(with_data(instance_filter=filtered, document_masking=True))),
            "read packed": measure(steps(with_data(packing="best_fit"))),
            "batches": measure(updates(with_data(instance_filter=filtered, document_masking=True))),
        }
        needs = 8 * PEAK_FLOPS["H100"] * 0.5 / flops_per_token(load(find_config("olmo3_7b")).model, 8192)
        result["needs"] = round(needs)
        result["of 2 cores"] = {name: round(2 * result[name]["core"] / needs, 1) for name in ("read", "batches")}
        result["memory"] = growth(with_data(sequence_length=1024))
        result["prepare"] = preparation(Path(folder))
        result["stream"] = streamed(Path(folder), base)
        began = time.perf_counter()
        pack_group(np.zeros_like(lengths), lengths, np.zeros_like(lengths), arguments.sequence_length, False)
        result["packed documents/s"] = round(len(lengths) / (time.perf_counter() - began))
        began = time.perf_counter()
        instance_order(1 << 23, 0, 1)
        result["shuffled instances/s"] = round((1 << 23) / (time.perf_counter() - began))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
