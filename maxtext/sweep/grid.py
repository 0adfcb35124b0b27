"""The members of a sweep: every combination of the values given, each a run of its own with a config of its own.

Members whose configs differ in numbers alone (`NUMBERS`) can share one program; those that differ in anything else, as
in the width of the model, are of another group.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext.config.load import ConfigError, load_with_origins
from maxtext.config.schema import Config

# What enters an update as a number, or only its first state; see train.state.Numbers.
NUMBERS = ("seed", "optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.max_grad_norm",
           "optim.skip.sigma", "optim.muon.matrix_lr", "optim.muon.matrix_weight_decay", "optim.muon.momentum",
           "schedule.warmup_steps", "schedule.total_steps", "schedule.min_ratio", "schedule.decay_steps",
           "train.z_loss")
NAMES = ("run_name", "output_dir")  # a member has its own
SUFFIX = "-sweep"  # of the folder of all members: a run of the same config may lie beside it
LARGEST = 1024  # members: more is a mistake in the grid


class SweepError(ValueError):
    """What is wrong with the grid that was asked for; the message says what to write."""


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of the sweep.

    Attributes:
      settings: the swept keys and their values as they were written, in the order of the grid.
      origins: of its config's values.
    """

    name: str
    settings: dict[str, str]
    cfg: Config
    origins: dict[str, str]


def members_of(config: Path, overrides: Sequence[str], over: Sequence[str], seeds: int | None) -> list[Member]:
    """All members, the seeds varying first.

    Args:
      over: texts `key=value,value,...`.
      seeds: how many seeds each combination is run with, from that of the config on; None: with that one.

    Raises:
      SweepError: for the grid. ConfigError: for a config, with the faults of all members.
    """
    base = load_with_origins(config, overrides)[0]
    axes = [_axis(text) for text in over]
    if seeds is not None:
        if not 1 <= seeds <= LARGEST:
            raise SweepError(f"--seeds {seeds}: give 1 to {LARGEST:,}")
        axes.append(("seed", [str(base.seed + i) for i in range(seeds)]))
    keys = [key for key, _ in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise SweepError(f"{', '.join(twice)} is swept twice; give all its values in one --over"
                         + (", or leave out --seeds" if "seed" in twice else ""))
    if not axes:
        raise SweepError("nothing to sweep: give --over key=value,value,... or --seeds N; one run is `maxtext train`")
    if (count := math.prod(len(values) for _, values in axes)) > LARGEST:
        sizes = " x ".join(f"{len(values)} of {key}" for key, values in axes)
        raise SweepError(f"{sizes} = {count:,} members, but a sweep has at most {LARGEST:,}; give fewer values")
    short = _short_names(keys)
    members: list[Member] = []
    faults: list[str] = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = dict(zip(keys, values, strict=True))
        name = _unique("_".join(f"{short[key]}={_plain(value)}" for key, value in settings.items()),
                       [member.name for member in members])
        changes = [*overrides, *(f"{key}={value}" for key, value in settings.items()),
                   f"output_dir={os.path.join(base.output_dir, base.run_name)}{SUFFIX}", f"run_name={name}"]
        try:
            members.append(Member(name, settings, *load_with_origins(config, changes)))
        except ConfigError as error:
            faults += [fault for fault in error.problems if fault not in faults]
    if faults:
        raise ConfigError(faults)
    return members


def groups_of(members: Sequence[Member]) -> list[list[Member]]:
    """The members by what can share a program, in the order of the first of each group."""
    groups: list[tuple[Config, list[Member]]] = []
    for member in members:
        structure = without_numbers(member.cfg)
        for known, group in groups:
            if known == structure:
                group.append(member)
                break
        else:
            groups.append((structure, [member]))
    return [group for _, group in groups]


def without_numbers(cfg: Config) -> Config:
    """The config with the same values in place of all that may differ within a program."""
    constants = {"optim.betas": (0.0, 0.0), **dict.fromkeys(NAMES, "")}
    for key in (*NUMBERS, *NAMES):
        cfg = _replaced(cfg, key.split("."), constants.get(key, 0))
    return cfg


def structural(members: Sequence[Member]) -> list[str]:
    """The swept keys that make programs of their own."""
    return [key for key in members[0].settings if key not in NUMBERS]


def _replaced(node: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return dataclasses.replace(node, **{name: _replaced(getattr(node, name), rest, value) if rest else value})


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, listed = text.partition("=")
    key, values = key.strip(), [value.strip() for value in _split(listed)]
    if not equals or not key or not all(values):
        raise SweepError(f"--over {text}: write key=value,value,..., such as optim.lr=1e-3,2e-3")
    if key in NAMES:
        raise SweepError(f"--over {key}: each member gets its own; sweep another key")
    if len(set(values)) < len(values):
        raise SweepError(f"--over {text}: a value is there twice; give each once, and several seeds with --seeds")
    return key, values


def _split(text: str) -> list[str]:
    """The values between commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where that is not enough to tell them apart."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def _plain(value: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", value).strip("-") or "empty"


def _unique(name: str, known: Sequence[str]) -> str:
    if name not in known:
        return name
    return next(other for i in itertools.count(2) if (other := f"{name}_{i}") not in known)
