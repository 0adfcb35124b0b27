"""`train.py` in which some batches of the data's order give a loss of NaN: spoilt.py 6,7 CONFIG [key=value ...]."""

import sys
from types import SimpleNamespace

import jax.numpy as jnp

from maxtext.cli import train
from maxtext.data.pipeline import Batches
from maxtext.train import loop

bad, *arguments = sys.argv[1:]
numbers, taken = {int(number) for number in bad.split(",")}, []
take, compile_train_step = Batches.__next__, loop.compile_train_step


def noted(self):
    taken.append(self.data_step(self._step + 1))
    return take(self)


def spoilt(cfg):
    step = compile_train_step(cfg)

    def compiled(lowered):
        run = lowered.compile()

        def update(state, batch, *votes):
            if taken[-1] in numbers:
                batch = batch.replace(weights_BT=batch.weights_BT * jnp.float32(jnp.nan))
            return run(state, batch, *votes)

        return update

    return SimpleNamespace(lower=lambda *given: SimpleNamespace(compile=lambda: compiled(step.lower(*given))))


Batches.__next__, loop.compile_train_step = noted, spoilt
sys.exit(train(arguments))
