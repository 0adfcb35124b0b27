"""Folders of transformers for the tests: the committed ones, and copies in which one thing is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.convert import safetensors

ORACLES = Path(__file__).resolve().parents[1] / "oracles"
HF = ORACLES / "hf"
FAMILIES = ("olmo2", "olmo3", "olmo3_yarn", "olmo3_gqa", "llama_tied")
Tensors = dict[str, np.ndarray]


def raw_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> (dtype, shape, bytes) by a reader of its own, independent of the one under test."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end]
    return found


def float32_tensors(folder: Path) -> Tensors:
    return {name: np.frombuffer(data, np.float32).reshape(shape) for name, (dtype, shape, data)
            in raw_tensors(folder).items() if dtype == "F32"}


def write_weights(folder: Path, tensors: Tensors) -> None:
    """One model.safetensors in the place of all weight files."""
    for file in [*folder.glob("*.safetensors*"), *folder.glob("*.bin")]:
        file.unlink()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    with safetensors.Writer(str(folder / "model.safetensors"), shapes, dtypes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def edited(name: str, target: Path, change: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A copy of a committed folder with changed tensors (in place, or new ones) and changed keys of config.json."""
    shutil.copytree(HF / name, target)
    if change is not None:
        tensors = float32_tensors(target)
        change(tensors)
        write_weights(target, tensors)
    if config:
        values = json.loads((target / "config.json").read_text()) | config
        (target / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return target


def golden(name: str) -> Path:
    return HF / name / "expected.npz"
