#!/usr/bin/env python3
"""Held-out sets and downstream tasks on a checkpoint or a transformers folder: the same as `maxtext eval`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs in a checkout that is not installed

from maxtext.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
