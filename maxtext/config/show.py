"""The `config` verb: shows what a configuration resolves to, and which configurations there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from maxtext.config.load import CONFIGS, ConfigError, list_configs, load_with_origins, to_yaml

USAGE = """usage: maxtext config show CONFIG [key=value ...]   the resolved tree and where each value came from
       maxtext config list                          the configs, with one line each"""


def run(argv: Sequence[str]) -> int:
    """Runs `config show` or `config list`; returns the exit code (2 for a faulty command or configuration)."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(USAGE)
        return 0
    verb, *rest = argv or ("",)
    if verb == "list" and not rest:
        print(listing())
        return 0
    if verb == "show" and rest:
        try:
            cfg, origins = load_with_origins(rest[0], rest[1:])
        except ConfigError as error:
            return print_problems(error)
        print(to_yaml(cfg, origins), end="")
        return 0
    print(USAGE, file=sys.stderr)
    return 2


def listing() -> str:
    """All runs and parts of the configs folder, one line each."""
    groups = [("", CONFIGS), *((f"{folder.name}/", folder) for folder in sorted(CONFIGS.glob("*/")))]
    rows = [(prefix + name, text) for prefix, folder in groups for name, text in list_configs(folder)]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def print_problems(error: ConfigError) -> int:
    """Prints every fault on its own line to stderr and returns the exit code 2."""
    for problem in error.problems:
        print(problem, file=sys.stderr)
    return 2
