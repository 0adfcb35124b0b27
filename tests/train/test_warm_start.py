"""Starting a run from another's weights: what is taken over, what starts anew, and what is refused."""

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import CheckpointError
from maxtext.config.schema import InitFromConfig
from maxtext.train.loop import train
from maxtext.train.state import init_state
from maxtext.train.warm_start import warm_start
from tests.runs import Runs, lines, restore
from tests.tiny import mesh_of

SHORT = ("train.steps=6", "checkpoint.every=3", "eval.every=null", "schedule.warmup_steps=2", "log.report=false")


@pytest.fixture
def first(runs: Runs):
    """A finished run of 6 updates, on one device."""
    cfg = runs.config("first", *SHORT)
    train(cfg, devices=jax.devices()[:1])
    return cfg


def end_of(cfg):
    return jax.tree.map(np.asarray, restore(cfg, 6, (1, 1, 1)).state)


def started(cfg, source: InitFromConfig, shape=(1, 1, 1)):
    with jax.set_mesh(mesh_of(shape)):
        return jax.tree.map(np.asarray, warm_start(init_state(cfg), source, lambda text: None))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2)])
def test_weights_and_moments_are_taken_over_and_the_rest_starts_anew(runs, first, shape):
    end = end_of(first)
    got = started(first, InitFromConfig(path=first.run_dir, optimizer=True), shape)
    for name in ("mu", "nu", "count"):
        jax.tree.map(np.testing.assert_array_equal, getattr(got.optimizer, name), getattr(end.optimizer, name))
    jax.tree.map(np.testing.assert_array_equal, got.params, end.params)
    assert (int(got.step), int(got.optimizer.n_recorded), int(got.optimizer.count)) == (0, 0, 6)
    assert not got.optimizer.loss_window.any()


def test_without_the_optimizer_only_weights_are_taken(runs, first):
    got = started(first, InitFromConfig(path=first.run_dir))
    jax.tree.map(np.testing.assert_array_equal, got.params, end_of(first).params)
    assert int(got.optimizer.count) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(got.optimizer.mu))


def test_a_step_can_be_chosen(runs, first):
    early, late = (started(first, InitFromConfig(path=first.run_dir, step=step)) for step in (3, 6))
    assert not np.array_equal(early.params.embed, late.params.embed)
    with pytest.raises(CheckpointError, match="step 4"):
        started(first, InitFromConfig(path=first.run_dir, step=4))


def test_a_run_goes_on_from_the_other_with_its_own_schedule(runs, first):
    cfg = runs.config("second", *SHORT, f"train.init_from.path={first.run_dir}", "train.init_from.optimizer=true")
    train(cfg, devices=jax.devices()[:1])
    before, after = lines(first), lines(cfg)
    assert [line["step"] for line in after] == list(range(7))
    assert after[1]["optim/LR (group 0)"] == before[1]["optim/LR (group 0)"]
    assert after[1]["train/CE loss"] < before[1]["train/CE loss"] - 0.1
    assert int(end_of(cfg).optimizer.count) == 12


def test_what_cannot_be_taken_is_refused_by_name(runs, first):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; give the folder"):
        started(first, InitFromConfig(path=str(runs.folder / "nothing")))
    (runs.folder / "hf").mkdir()
    (runs.folder / "hf" / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"is a transformers folder; convert it first: maxtext convert import"):
        started(first, InitFromConfig(path=str(runs.folder / "hf")))
    wider = runs.config("wider", "model.d_ff=96")
    with pytest.raises(CheckpointError, match=r"params\.segments\.0\.0\.mlp\.down: the state wants shape"):
        started(wider, InitFromConfig(path=first.run_dir))
    assert not (runs.folder / "nothing").exists()
