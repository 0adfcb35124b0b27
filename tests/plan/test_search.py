"""The search: what is tried, what is compiled, and in which order it stands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from maxtext.config.load import load, to_yaml
from maxtext.config.schema import Config, MeshConfig, RematConfig
from maxtext.plan.command import run
from maxtext.plan.program import Memory, Program, Refusal
from maxtext.plan.search import Trial, best_of, candidates, reason, search, to_table
from maxtext.plan.topology import GIB, PlanError, read_target
from tests.plan.test_plan import made_program
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.one_pass  # nothing is compiled
TARGET = read_target("v5p:2x2x2")


def config(**model: Any) -> Config:
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("window", "full"), **model), global_batch=16,
                      remat=RematConfig(mode="full"))
    data = dataclasses.replace(cfg.data, prepared="never-read")
    return dataclasses.replace(cfg, data=data, mesh=MeshConfig(data=1, fsdp=8, tensor=1))


def program(cycles: int, gib: float) -> Program:
    memory = Memory(int(gib * GIB), 0, 0, 0, 0)
    return dataclasses.replace(made_program(memory=memory), cycles=cycles, matmul_flops=1)


def found(cfg: Config, heads: bool = False) -> dict[tuple[str, ...], Trial]:
    return {one.overrides: one for one in candidates(cfg, TARGET, heads)}


def test_each_combination_is_valid_once_and_says_how_to_write_it(tmp_path: Path):
    """The overrides lead from the given file to the very config that was tried."""
    cfg = config()
    trials = found(cfg)
    assert () in trials
    assert ("train.remat.mode=none",) in trials
    assert ("mesh.data=2", "mesh.fsdp=4") in trials
    assert any("train.gradient_accumulation_steps=2" in one for one in trials)
    file = tmp_path / "tiny.yml"
    file.write_text(to_yaml(cfg))
    for overrides, one in list(trials.items())[::7]:
        assert load(file, overrides) == one.cfg


def test_other_head_shapes_are_tried_when_asked():
    wide = config(n_heads=4, n_kv_heads=2, head_dim=128)
    assert {one.cfg.model.head_width for one in found(wide).values()} == {128}
    tried = [one.cfg.model for one in found(wide, heads=True).values()]
    shapes = {(4, 2, 128), (2, 1, 256), (8, 4, 64)}
    assert {(model.n_heads, model.kv_heads, model.head_width) for model in tried} == shapes


def test_the_fastest_by_shapes_are_compiled_up_to_the_limit_and_the_given_config_first():
    asked: list[Config] = []
    trials = search(config(), TARGET, 3, lambda cfg: asked.append(cfg) or program(100, 1))
    assert len(asked) == 3
    assert asked[0] == next(one.cfg for one in trials if not one.overrides)
    rest = [one for one in trials if one.verdict is None]
    assert max(one.predicted.step for one in trials if one.verdict and one.overrides) <= min(
        one.predicted.step for one in rest)
    assert {reason(one, None, TARGET) for one in rest} == {"not compiled: --limit"}


def test_what_fits_stands_before_what_does_not_and_the_fastest_first():
    answers = iter([program(3 * 10**9, 50), program(10**9, 200), program(2 * 10**9, 50), Refusal(99 * GIB, 95 * GIB)])
    trials = search(config(), TARGET, 4, lambda cfg: next(answers))
    cycles = [one.program.cycles if isinstance(one.program, Program) else None for one in trials[:4]]
    assert cycles == [2 * 10**9, 3 * 10**9, None, 10**9]
    best = best_of(trials)
    assert best is trials[0]
    assert [reason(one, best, TARGET) for one in trials[:4]] == [
        "fastest that fits", "fits, 50.0% slower", "does not fit: 4.00 GiB too much",
        "does not fit: 105.00 GiB too much"]
    table = to_table(trials, TARGET)
    assert table[1][0] == "1"
    assert table[1][4:6] == ("50.00 GiB", "1.14 s")


def test_hopeless_candidates_are_not_compiled():
    """A batch of which only the given, recomputing, config comes near the memory."""
    cfg = config()
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=40_000_000))
    asked: list[Config] = []
    trials = search(cfg, TARGET, 1000, lambda cfg: asked.append(cfg) or program(100, 1))
    hopeless = [one for one in trials if one.verdict is None]
    assert hopeless
    assert not {id(one.cfg) for one in hopeless} & {id(one) for one in asked}
    assert {reason(one, None, TARGET) for one in hopeless} == {"not compiled: too large by shapes"}


def test_a_compile_that_fails_is_a_row_and_not_the_end():
    def fail(cfg: Config) -> Program:
        raise PlanError("mesh: cannot be laid out\nmore")

    trials = search(config(), TARGET, 2, fail)
    assert reason(trials[0], None, TARGET) == "the compiler failed: mesh: cannot be laid out"
    assert best_of(trials) is None


def test_the_command_ranks_and_writes_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "tiny.yml", tmp_path / "search.json"
    file.write_text(to_yaml(config()))
    monkeypatch.setattr("maxtext.plan.program.compile_program", lambda cfg, devices: program(10**9, 50))
    monkeypatch.setattr("maxtext.plan.command.make_devices", lambda target: ())
    monkeypatch.setattr("maxtext.plan.command.prepare_process", lambda target: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    arguments = [str(file), "--topology", "v5p:2x2x2", "--search", "--limit", "2", "--cache", str(tmp_path / "cache")]
    assert run([*arguments, "--json", str(out)]) == 0
    shown, tree = capsys.readouterr().out, json.loads(out.read_text())
    assert "fastest that fits" in shown
    assert "2 of them compiled" in shown
    assert len(list((tmp_path / "cache").iterdir())) == 2  # each under its own key
    compiled = [one for one in tree["trials"] if one["fits"]]
    assert len(compiled) == 2
    assert compiled[0]["why"] == "fastest that fits"
    assert all(" ".join(one["overrides"]) in shown for one in compiled)


@pytest.mark.parametrize(("options", "message"), [
    (["--heads"], "--heads only goes with --search"), (["--search", "--estimate"], "leave out --estimate"),
    (["--search", "--limit", "0"], "take 1 or more"), (["--plot", "a.svg"], "--plot only goes with --scale"),
    (["--scale", "2", "--topology", "cpu:8"], "nothing is published of cpu:8"),
])
def test_options_that_do_not_go_together(options: list[str], message: str, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "tiny.yml").write_text(to_yaml(config()))
    assert run([str(tmp_path / "tiny.yml"), "--topology", "v5p:2x2x2", *options]) == 2
    assert message in capsys.readouterr().err
