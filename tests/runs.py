"""Whole runs in small: committed text, prepared once; a config that trains on it; and what a run leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.checkpoint import integrity
from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.load import load
from maxtext.config.schema import Config
from maxtext.data.command import run_prepare as prepare
from maxtext.train.metrics import MetricsWriter
from maxtext.train.state import abstract_state
from tests.tiny import mesh_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests" / "fixtures" / "text"
# Few and short, so that an evaluation takes a moment; fnmatch is held out, and so are dict, lists and assert.
CODE = ("bisect", "colorsys", "copy", "fnmatch", "glob", "linecache", "reprlib", "sched")
HELD_OUT = {"code": ("fnmatch.py.txt",), "prose": ("assert.txt", "dict.txt", "lists.txt")}

CONFIG = """\
description: A tiny decoder on committed text
model: {{vocab_size: 384, d_model: 32, n_layers: 2, n_heads: 4, d_ff: 64, layer_pattern: [window, full], window: 8}}
data: {{prepared: {prepared}, sequence_length: 32}}
optim: {{lr: 1e-2}}
schedule: {{kind: cosine, warmup_steps: 10, total_steps: 40}}
train: {{steps: 40, global_batch: 8, compute_dtype: float32, remat: {{mode: none}}}}
checkpoint: {{every: 10, keep_last: null}}
eval: {{every: 10, batch: 32}}
output_dir: {output_dir}
"""
# What a rerun cannot repeat: measured times and what is computed from them, and memory.
MEASURED = ("time/", "throughput/device/", "throughput/in-loop eval", "memory/")


def prepare_text(folder: Path) -> Path:
    """A folder as `maxtext data prepare` writes it, with a vocabulary of 384 and two sources."""
    (folder / "code").mkdir(parents=True)
    for name in CODE:
        shutil.copy(TEXT / "code" / f"{name}.py.txt", folder / "code")
    fractions = ["--heldout-fraction", "code=0.1", "--heldout-fraction", "prose=0.06"]
    sources = ["--source", f"code={folder / 'code'}", "--source", f"prose={TEXT / 'prose'}"]
    assert prepare(["--out", str(folder / "data"), "--vocab-size", "384", *sources, *fractions]) == 0
    return folder / "data"


class Runs:
    """Configs of runs below one folder, all on the same prepared data."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.folder, self.prepared = folder, prepared
        self.yaml = folder / "tiny.yml"
        self.yaml.write_text(CONFIG.format(prepared=prepared, output_dir=folder / "runs"))

    def config(self, name: str = "run", *overrides: str) -> Config:
        return load(self.yaml, [f"run_name={name}", *overrides])

    def arguments(self, name: str = "run", *overrides: str) -> list[str]:
        """Of the command line, for the same run."""
        return [str(self.yaml), f"run_name={name}", *overrides]

    def directory(self, name: str = "run") -> Path:
        return self.folder / "runs" / name


def lines(cfg: Config) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; every line must be whole."""
    text = Path(cfg.run_dir, "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def reproducible(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics lines without what a clock or the machine's memory measured."""
    return [{name: value for name, value in record.items() if not name.startswith(MEASURED)} for record in records]


def saved_bits(cfg: Config, step: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every array of a checkpoint, as dtype, shape and bytes by name."""
    state = restore(cfg, step, (1, 1, 1)).state
    arrays = {name: np.asarray(leaf) for name, leaf in integrity.named_leaves(state).items()}
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def restore(cfg: Config, step: int, mesh: tuple[int, int, int]) -> Any:
    """A checkpoint on the first devices, laid out as mesh (data, fsdp, tensor)."""
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, writer=False)
    restored = checkpoints.restore(abstract_state(cfg, mesh_of(mesh)), step)
    checkpoints.close()
    return restored


def saved_steps(cfg: Config) -> list[int]:
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, writer=False)
    return checkpoints.steps()


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 and time of change of every file below a folder, and the time of every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = (digest, path.stat().st_mtime_ns)
    return found


def when_written(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]) -> None:
    """Does something once the loop comes to write the metrics of `step`; that of `step` + 1 is dispatched by then."""
    write = MetricsWriter.write

    def hooked(self: MetricsWriter, at: int, scalars: Any) -> None:
        write(self, at, scalars)
        if at == step:
            action()

    monkeypatch.setattr(MetricsWriter, "write", hooked)


def command(*arguments: str, script: str = "train.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def environment(devices: int = 8, **variables: str) -> dict[str, str]:
    """For a child process that sees some virtual devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)} | variables


def run_child(*arguments: str, script: str = "train.py", devices: int = 2,
              **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python train.py ARGUMENTS` (or another script) to its end."""
    return subprocess.run(command(*arguments, script=script), env=environment(devices, **variables), text=True,
                          capture_output=True, timeout=240)


def some_devices(count: int) -> list[jax.Device]:
    return jax.devices()[:count]
