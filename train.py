"""`python train.py configs/olmo3_7b.yml optim.lr=3e-4`: train, or continue, the run that a YAML describes."""

import sys

from maxtext.cli import train

if __name__ == "__main__":
    sys.exit(train())
