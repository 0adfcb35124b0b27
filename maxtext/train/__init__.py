"""Training runs. Called, `maxtext.train(cfg)` is the function of maxtext/api.py."""

import sys

from maxtext import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
