"""What the launchers share: options and the config of a job with their faults told, the way to an engine, names."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from maxtext.config.load import ConfigError, find_config, load_with_origins, to_yaml
from maxtext.config.reason import placed
from maxtext.config.schema import Config
from maxtext.config.show import print_problems
from maxtext.config.validate import mesh_problems
from maxtext.config.wording import with_key

DEVICE_COUNT = "xla_force_host_platform_device_count"
# Exit statuses of `maxtext train` that another attempt meets again: a mistake in what was asked for, failed training.
HOPELESS = (2, 3)
TRY_AGAIN = 75  # and the one that asks for another attempt: a run that hung ended itself


def add_config(parser: argparse.ArgumentParser, example: str) -> None:
    """The words that name the run; `example` is an override that this engine's users need."""
    parser.add_argument("config", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"such as {example}")


def check_lowest(parser: argparse.ArgumentParser, options: argparse.Namespace, **lowest: int) -> None:
    """Ends the process with what is wrong when an option that was given is below its lowest number."""
    for name, number in lowest.items():
        value = getattr(options, name)
        if value is not None and value < number:
            parser.error(f"--{name.replace('_', '-')} {value}: give {number} or more")


def loaded(config: str, overrides: Sequence[str], devices: int | None) -> tuple[Config, str] | int:
    """The config of a run on so many devices, and its text with origins; an exit status where it has faults.

    Args:
      devices: of the job; None: not known before it runs.
    """
    try:
        cfg, origins = load_with_origins(find_config(config), overrides)
    except ConfigError as error:
        return print_problems(error)
    if devices is not None and not cfg.mesh.auto and (problems := mesh_problems(cfg, devices)):
        return mistake("\n".join(with_key(*problem) for problem in problems))
    return cfg, to_yaml(cfg, origins)


def mistake(message: object) -> int:
    """Tells a mistake in what was asked for; the exit status of one."""
    print(message, file=sys.stderr)
    return 2


def hand_over(text: str, command: Sequence[str], absent: str, *, dry_run: bool, folder: str | None = None) -> int:
    """Gives a job to an engine's program on its standard input, or prints it. The exit status: 0, or 2 for a mistake.

    Args:
      absent: what to do where there is no such program.
      folder: made before, for the engine's own files.
    """
    if dry_run:
        print(text, end="")
        return 0
    if shutil.which(command[0]) is None:
        return mistake(f"{command[0]} is not on this machine's PATH: {absent}")
    try:
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return mistake(placed(error))
    return 2 if subprocess.run(command, input=text, text=True, check=False).returncode else 0


def dns_label(name: str, longest: int = 40) -> str:
    """A name as Kubernetes takes it: lower-case letters, digits and dashes, from a letter to a letter or digit."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"
    return text[:longest].rstrip("-")


def virtual_devices(environment: Mapping[str, str], count: int) -> str:
    """XLA_FLAGS for a process of so many virtual CPU devices, with the other flags of an environment."""
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if DEVICE_COUNT not in flag]
    return " ".join([*flags, f"--{DEVICE_COUNT}={count}"])
