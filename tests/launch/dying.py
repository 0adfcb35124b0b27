"""What a worker of Ray does in a test: as `maxtext launch ray`, but process 1 is killed once, after update 5."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from maxtext.cli import train_text
from maxtext.config.load import load


def train_and_die_once(text: str, listener: Callable[[int, Mapping[str, float]], None]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yml").write_text(text)
        marker = Path(load(Path(folder, "job.yml")).run_dir, "died")

    def then_die(step: int, metrics: Mapping[str, float]) -> None:
        import jax

        listener(step, metrics)
        if step == 5 and jax.process_index() == 1 and not marker.exists():
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    return train_text(text, then_die)
