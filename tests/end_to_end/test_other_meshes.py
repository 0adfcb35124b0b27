"""A run that goes on on another mesh, from disk, with `train.determinism: any_mesh`: no bit changes."""

from __future__ import annotations

import jax

from maxtext.train.loop import train
from tests.runs import Runs, lines, saved_bits

COMMON = ("train.determinism=any_mesh", "checkpoint.every=2", "eval.every=3", "eval.at_start=false",
          "eval.at_end=false", "log.tensorboard=false", "log.report=false")


def test_what_was_saved_on_one_mesh_goes_on_on_another(runs: Runs):
    """Two devices that share the weights, then one; losses and what is evaluated are compared too."""
    for steps, devices, mesh in ((2, 2, "mesh.fsdp=2"), (4, 1, "mesh.data=1")):
        moved = runs.config("moved", *COMMON, mesh, f"train.steps={steps}")
        train(moved, devices=jax.devices()[:devices])
    straight = runs.config("straight", *COMMON, "mesh.data=2", "mesh.fsdp=2", "train.steps=4")
    train(straight, devices=jax.devices()[:4])
    assert saved_bits(moved, 4) == saved_bits(straight, 4)
    wanted = ("train/CE loss", "optim/total grad norm", "data/fingerprint")
    of = [[{name: value for name, value in line.items() if name in wanted or name.startswith("eval/")}
           for line in lines(cfg)] for cfg in (moved, straight)]
    assert of[0] == of[1]
    assert ["eval/lm/code/CE loss" in line for line in of[0]] == [False, False, False, True, False]
