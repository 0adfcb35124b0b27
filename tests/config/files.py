"""Small files for the tests of loading, and the faults that loading them finds."""

from pathlib import Path

import pytest

from maxtext.config.load import ConfigError, load

GOOD = """\
model:
  vocab_size: 64
  d_model: 16
  n_layers: 2
  n_heads: 2
  d_ff: 32
data:
  sequence_length: 8
  prepared: somewhere
optim:
  lr: 0.1
train:
  steps: 10
  global_batch: 4
"""


def faults(path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name
