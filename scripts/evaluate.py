#!/usr/bin/env python3
"""Held-out sets and downstream tasks on a checkpoint: the same as `maxtext eval`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs in a checkout that is not installed

from maxtext.eval.offline import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
