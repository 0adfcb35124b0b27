"""maxtext: pre-train decoder-only language models in JAX from one short YAML.

The package is layered; imports point downwards only (see docs/path_of_a_batch.md and tests/test_layers.py).
"""

__version__ = "0.1.0"
