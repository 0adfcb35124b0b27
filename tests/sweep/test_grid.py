"""Which members a sweep has, which of them share a program, and what is said about a grid that is none."""

from __future__ import annotations

import dataclasses

import pytest

from maxtext.config.load import ConfigError, load
from maxtext.sweep.command import alone_because
from maxtext.sweep.grid import NUMBERS, SweepError, groups_of, members_of, structural, without_numbers
from tests.runs import Runs
from tests.tiny import tiny_config


def grid(runs: Runs, *over: str, seeds: int | None = None, overrides: tuple[str, ...] = ()):
    return members_of(runs.yaml, overrides, over, seeds)


def test_every_combination_is_a_run_of_its_own_below_the_sweep(runs: Runs):
    members = grid(runs, "optim.lr=1e-3,2e-3", "optim.betas=[0.9,0.95],[0.8, 0.9]", seeds=2, overrides=("seed=5",))
    assert [member.name for member in members] == [
        f"lr={lr}_betas={betas}_seed={seed}" for lr in ("1e-3", "2e-3") for betas in ("0.9-0.95", "0.8-0.9")
        for seed in (5, 6)]
    last = members[-1]
    assert (last.cfg.optim.lr, last.cfg.optim.betas, last.cfg.seed) == (2e-3, (0.8, 0.9), 6)
    assert last.settings == {"optim.lr": "2e-3", "optim.betas": "[0.8, 0.9]", "seed": "6"}
    assert last.cfg.run_dir == f"{runs.folder}/runs/{load(runs.yaml).run_name}-sweep/{last.name}"


def test_names_are_told_apart(runs: Runs):
    assert [m.name for m in grid(runs, "eval.every=1,2", "checkpoint.every=3")] == [
        "eval.every=1_checkpoint.every=3", "eval.every=2_checkpoint.every=3"]
    assert [m.name for m in grid(runs, "optim.no_decay=[a?],[a*]")] == ["no_decay=a", "no_decay=a_2"]


def test_numbers_share_a_program_and_anything_else_does_not(runs: Runs):
    members = grid(runs, "optim.lr=1e-3,2e-3", "model.d_ff=64,32", "schedule.warmup_steps=0,5")
    assert structural(members) == ["model.d_ff"]
    assert [[m.cfg.model.d_ff for m in group] for group in groups_of(members)] == [[64] * 4, [32] * 4]
    assert len(groups_of(grid(runs, "optim.max_grad_norm=null,1.0", "train.z_loss=0,1e-4", seeds=2))) == 1


def test_the_numbers_are_those_of_the_program(runs: Runs):
    """A key that shared a program by mistake would train all members with the value of the first."""
    from maxtext.train.state import numbers_of

    cfg = tiny_config()
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, kind="skip_step_muon"))
    wsd = dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, kind="wsd", decay_steps=3))
    changed = {"seed": 1, "optim.lr": 0.5, "optim.betas": (0.5, 0.6), "optim.eps": 0.5, "optim.weight_decay": 0.5,
               "optim.max_grad_norm": 0.5, "optim.skip.sigma": 0.5, "optim.muon.matrix_lr": 0.5,
               "optim.muon.matrix_weight_decay": 0.5, "optim.muon.momentum": 0.5, "schedule.warmup_steps": 1,
               "schedule.total_steps": 9, "schedule.min_ratio": 0.5, "schedule.decay_steps": 2, "train.z_loss": 0.5}
    assert changed.keys() == set(NUMBERS)
    for key, value in changed.items():
        base = wsd if key == "schedule.decay_steps" else cfg
        path = key.split(".")
        node = value
        for depth in range(len(path) - 1, -1, -1):
            above = base
            for name in path[:depth]:
                above = getattr(above, name)
            node = dataclasses.replace(above, **{path[depth]: node})
        assert without_numbers(node) == without_numbers(base), key
        assert (numbers_of(node) != numbers_of(base)) == (key != "seed"), key


@pytest.mark.parametrize(("over", "seeds", "message"), [
    ((), None, "nothing to sweep: give --over key=value,value,... or --seeds N"),
    (("optim.lr",), None, "--over optim.lr: write key=value,value,..."),
    (("optim.lr=1,,2",), None, "write key=value,value,..."),
    (("optim.lr=1,1",), None, "a value is there twice"),
    (("optim.lr=1", "optim.lr=2"), None, "optim.lr is swept twice; give all its values in one --over"),
    (("seed=1,2",), 2, "seed is swept twice; give all its values in one --over, or leave out --seeds"),
    (("run_name=a,b",), None, "each member gets its own; sweep another key"),
    ((), 0, "--seeds 0: give 1 to 1,024"),
    ((), 10**9, "--seeds 1000000000: give 1 to 1,024"),
    ((f"optim.lr={','.join(map(str, range(1, 41)))}",), 40, "40 of optim.lr x 40 of seed = 1,600 members"),
])
def test_a_wrong_grid_is_one_message(runs: Runs, over, seeds, message):
    with pytest.raises(SweepError) as error:
        grid(runs, *over, seeds=seeds)
    assert message in str(error.value)


def test_faults_of_members_are_told_once_each(runs: Runs):
    with pytest.raises(ConfigError) as error:
        grid(runs, "optim.lr=1e-3,fast", "optim.eps=0,1e-8", seeds=3)
    assert len(error.value.problems) == 2, error.value.problems


@pytest.mark.parametrize(("override", "reason"), [
    ("train.determinism=same_mesh", "promises the bits of a run by itself"),
    ("guard.compare_devices_every=5", "guard.compare_devices_every"),
    ("optim.offload=auto", "optim.offload"),
    ("quant.kind=int8", "quant.kind int8"),
    ("train.take_over_at=3", "train.take_over_at"),
    ("mesh.context=2", "mesh.context 2"),
])
def test_what_cannot_share_a_program_is_named(runs: Runs, override: str, reason: str):
    assert alone_because(load(runs.yaml)) is None
    assert reason in (alone_because(load(runs.yaml, [override])) or "")
