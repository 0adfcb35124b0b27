"""The parser of verbs that take `key=value`: an unknown option is answered with how a setting is written."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that knows what `--lr 1e-3` was meant to be."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, with the setting that an unknown option may stand for; exits with 2."""
        unknown = re.match(r"unrecognized arguments: --?([A-Za-z][\w.-]*)(?:[= ](\S+))?", message)
        if unknown:
            from maxtext.config.nearest import nearest

            found = nearest(tuple(unknown[1].split(".")))
            key = ".".join(found[0][0]) if found else "KEY"
            value = unknown[2] if unknown[2] and not unknown[2].startswith("-") else "VALUE"
            message += f"; a setting is written without dashes: {key}={value}"
        super().error(message)
