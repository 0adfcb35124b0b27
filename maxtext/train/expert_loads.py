"""experts.jsonl: which experts the routers chose, at about two hundred updates over the run.

A line is {"step": n, "block 00": [share of each expert, ...], ...}; shares of a block add up to 1, and an even load is
one over the number of experts. `maxtext report` draws them.

Dims: L routed layers, E experts.
"""

from __future__ import annotations

import os

import numpy as np

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.train.console import warn_once
from maxtext.train.metrics import JsonLines

LINES = 200


class ExpertLoads:
    """Writes the loads of a run's experts; without experts, and on other processes than the primary, nothing."""

    def __init__(self, run_dir: str, cfg: Config, *, resume_step: int, primary: bool = True) -> None:
        """Opens the file, dropping the lines of steps after `resume_step`."""
        self._layers = [i for i, routed in enumerate(cfg.model.routed_layers) if routed]
        self._every, self._last = max(1, cfg.train.steps // LINES), cfg.train.steps
        self._file = None
        if not self._layers or not primary:
            return
        try:
            self._file = JsonLines(os.path.join(run_dir, "experts.jsonl"), resume_step)
        except OSError as error:
            warn_once(f"experts.jsonl cannot be opened and is not written: {reason(error)}")

    def write(self, step: int, load_LE: np.ndarray) -> None:
        if self._file is None or not (step % self._every == 0 or step in (1, self._last)):
            return
        try:
            self._file.write(step, {f"block {layer:02d}": [float(f"{share:.4g}") for share in load_LE[i]]
                                    for i, layer in enumerate(self._layers)})
        except OSError as error:
            warn_once(f"experts.jsonl cannot be written, steps will be missing in it: {reason(error)}",
                      key="experts.jsonl")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
