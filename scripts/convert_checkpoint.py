#!/usr/bin/env python3
"""Weights of transformers and OLMo-core in and out: the same as `maxtext convert import | export | verify`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs in a checkout that is not installed

from maxtext.convert.commands import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
