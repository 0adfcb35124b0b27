"""What the model goes on with while it trains: `generate.prompts`, on the console and in samples.jsonl.

The format of samples.jsonl is described in report/run_files.py.
"""

from __future__ import annotations

import json
import os

from maxtext.config.reason import reason
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval.completion import Completion, Prompts, Stops
from maxtext.generate.sampler import Sampling
from maxtext.model.decoder import Decoder
from maxtext.report.run_files import SAMPLES, step_of
from maxtext.train.console import warn_once


class Samples:
    """Completes the prompts of a run with its current weights. All processes call it alike; the primary one writes."""

    def __init__(self, cfg: Config, prepared_tokenizer: str | None, *, resume_step: int, primary: bool = True) -> None:
        """Encodes the prompts, and drops from samples.jsonl what an interrupted run wrote after `resume_step`.

        A run that starts anew gives -1. Raises DataError for the tokenizer and for prompts, before anything is changed.
        """
        path = cfg.eval.tokenizer or prepared_tokenizer
        if path is None:
            raise DataError("generate.prompts are text and need a tokenizer; set eval.tokenizer to the file that the "
                            "token files were made with")
        tokenizer, choice = load_tokenizer(path), cfg.generate
        self._prompts = Prompts(choice.prompts, tokenizer, cfg, choice.tokens, cfg.data.sequence_length)
        self._stops, self._seed = Stops(tokenizer, []), choice.seed
        self._sampling = Sampling(choice.temperature, choice.top_k, choice.top_p)
        self._file = SampleFile(os.path.join(cfg.run_dir, SAMPLES), resume_step) if primary else None

    def __call__(self, step: int, params: Decoder) -> list[Completion]:
        """Completes and writes; `step` is the newest or a later one."""
        found = self._prompts.complete(params, self._sampling, self._seed, self._stops)
        if self._file is not None:
            try:
                self._file.write(step, found)
            except OSError as error:
                warn_once(f"{SAMPLES} cannot be written, samples will be missing in it: {reason(error)}", key=SAMPLES)
        return found


class SampleFile:
    """An append-only samples.jsonl. The samples of one step are one write, so a kill tears at most the last line."""

    def __init__(self, path: str, resume_step: int) -> None:
        self._path, self._last = path, -1
        self._keep_until(resume_step)

    def write(self, step: int, samples: list[Completion]) -> None:
        if step <= self._last:  # a continuation does the update again whose metrics were cut off
            self._keep_until(step - 1)
        # In ASCII: U+2028 and the like, which some readers take for the end of a line, never stand in it.
        text = "".join(json.dumps({"step": step, "prompt": one.prompt, "text": one.text}) + "\n" for one in samples)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            file.write(text.encode())
        self._last = step

    def _keep_until(self, step: int) -> None:
        """Keeps whole lines up to a step; the file is rewritten, all or nothing, when it holds anything else."""
        try:
            with open(self._path, "rb") as file:
                lines = file.readlines()
        except FileNotFoundError:
            return
        found = [(at, line) for line in lines if line.endswith(b"\n") and (at := step_of(line)) is not None]
        kept = [(at, line) for at, line in found if at <= step]
        if len(kept) < len(lines):
            with open(self._path + ".tmp", "wb") as file:
                file.writelines(line for _, line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._path + ".tmp", self._path)
        self._last = max((at for at, _ in kept), default=-1)
