"""What may change between a run and its continuation."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

from maxtext.config.load import ConfigError, load
from maxtext.config.schema import Config

# A change of one of these would make the continuation another model or another data order.
FIXED = ("model.", "data.", "seed", "train.global_batch", "optim.kind", "optim.moments_dtype", "optim.skip.window")
# Where the data lies may change; the data position in the checkpoint knows the data itself by its fingerprint. And so
# may the weights of sources in stages to come: the position knows those up to it.
MOVABLE = re.compile(r"data\.(prepared|mixture_steps|sources\.[^.]+\.(paths|root|mix|weights|max_repetition))")
QUIET = ("data.prefetch", "data.workers", "data.bad_instances", "description", "output_dir", "run_name", "mesh.",
         "checkpoint.", "elastic.", "guard.", "watchdog.", "eval.", "generate.", "log.", "train.steps",
         "train.max_seconds", "train.remat.", "optim.offload", "train.loss_chunk_tokens",
         "train.gradient_accumulation_steps")
NOTED = ("checkpoint.gradient_log",)  # although its neighbours are quiet: it changes numbers


class ResumeError(ValueError):
    """The config at hand is not the one that the saved run was made with."""


def check_same_run(cfg: Config, saved_text: str, step: int, note: Callable[[str], None]) -> None:
    """Compares a config with that of the checkpoint it is about to continue.

    Changes of the mesh, of logging, evaluation, saving and of how long to train are free. Other changes that a
    continuation can honour, such as the learning rate, its schedule or where the data lies, are noted.

    Args:
      saved_text: the resolved config in the checkpoint.
      step: of the checkpoint.
      note: called with one line for each noted change.

    Raises:
      ResumeError: when the model, the data or the batch differ, when `cfg` takes over the run at another update than
        `step`, or when `saved_text` is of another version.
    """
    try:
        saved = _load_text(saved_text)
    except ConfigError as error:
        raise ResumeError(f"the config that update {step} of {cfg.run_dir} was saved with cannot be read by this "
                          f"version:\n{error}\ncontinue it with the version that made it, or start a new run with "
                          f"another run_name") from error
    before, now = flatten(saved), flatten(cfg)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [key for key in changed if key.startswith(FIXED) and not key.startswith(QUIET)
               and not MOVABLE.fullmatch(key)]
    if refused:
        lines = [f"  {key}: {before.get(key)!r} when update {step} was saved, {now.get(key)!r} now" for key in refused]
        raise ResumeError("\n".join([
            f"{cfg.run_dir} was made with another config, so it cannot be continued with this one:", *lines,
            "give back the old values, or start a new run with another run_name",
        ]))
    first_time = cfg.train.take_over_at is not None and saved.train.take_over_at != cfg.train.take_over_at
    if first_time and step != cfg.train.take_over_at:
        raise ResumeError(f"{cfg.run_dir} stands at update {step}, but this config takes it over at update "
                          f"{cfg.train.take_over_at} (train.take_over_at): train the first part to there alone, with "
                          f"train.steps={cfg.train.take_over_at}, or move later checkpoints away")
    for key in changed:
        if not key.startswith(QUIET) or key in NOTED:
            note(f"{key} changes from {before.get(key)!r} to {now.get(key)!r} after update {step}")
    if saved.schedule_steps != cfg.schedule_steps:
        note(f"the learning-rate schedule now ends at update {cfg.schedule_steps} instead of {saved.schedule_steps} "
             f"(set schedule.total_steps to keep it while train.steps changes)")


def check_files(cfg: Config) -> None:
    """Raises ResumeError when a folder stands where the run writes a file: it would train without a record."""
    for name in ("metrics.jsonl", "config.yml", "samples.jsonl", "experts.jsonl"):
        path = os.path.join(cfg.run_dir, name)
        if os.path.isdir(path):
            raise ResumeError(f"{path} is a folder, but the run writes a file there; move it away, or choose another "
                              f"run_name")


def check_new_run(cfg: Config) -> None:
    """Raises ResumeError when a config that takes over another's run finds none."""
    if cfg.train.take_over_at is not None:
        raise ResumeError(f"{cfg.run_dir} holds no checkpoint, but this config takes over a run at update "
                          f"{cfg.train.take_over_at} (train.take_over_at); train its first part there, or set "
                          f"output_dir and run_name to where it is")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """A config as {dotted key: value}."""
    if dataclasses.is_dataclass(node):
        items = [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    elif isinstance(node, dict):
        items = list(node.items())
    else:
        return {prefix[:-1]: node}
    return {key: value for name, item in items for key, value in flatten(item, f"{prefix}{name}.").items()}


def _load_text(text: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yml")
        with open(path, "w") as file:
            file.write(text)
        return load(path)
