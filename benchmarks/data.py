"""Speed of the data path, in tokens per second of one core, as one JSON line:

    python benchmarks/data.py [--tokens 33554432] [--sequence-length 8192]

Random uint32 tokens with documents of some 800 tokens, in files that the page cache holds; so this is the cost of the
code, to hold against the speed of the disk and of the device. `core` counts CPU time of all threads, `wall` the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from maxtext.config import schema
from maxtext.data.order import instance_order
from maxtext.data.packing import pack_group
from maxtext.data.pipeline import make_batches
from maxtext.data.reader import RowRules, StepSource, make_reader
from maxtext.data.tokens import resolve

BATCH, VOCABULARY, EOS, FILES = 16, 100278, 100257, 4


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
        result: dict[str, object] = {
            "machine": platform.processor() or platform.machine(), "numpy": np.__version__,
            "read": measure(steps(base)),
            "read + filter": measure(steps(with_data(instance_filter=filtered))),
            "read + filter + documents": measure(steps(with_data(instance_filter=filtered, document_masking=True))),
            "read packed": measure(steps(with_data(packing="best_fit"))),
            "batches": measure(updates(with_data(instance_filter=filtered, document_masking=True))),
        }
        began = time.perf_counter()
        pack_group(np.zeros_like(lengths), lengths, np.zeros_like(lengths), arguments.sequence_length, False)
        result["packed documents/s"] = round(len(lengths) / (time.perf_counter() - began))
        began = time.perf_counter()
        instance_order(1 << 23, 0, 1)
        result["shuffled instances/s"] = round((1 << 23) / (time.perf_counter() - began))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
