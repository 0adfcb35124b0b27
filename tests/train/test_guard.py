"""Skipped updates: borne, then the run goes back and past them, the same way in every continuation, or stops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.config.guards import GuardConfig
from maxtext.config.schema import Config
from maxtext.data.journal import Journal, Jump, data_step
from maxtext.train import loop
from maxtext.train.guard import Skips, way_back
from maxtext.train.loop import Outcome, TrainingError, train
from tests.runs import Runs, lines, reproducible, saved_bits, saved_steps, some_devices

ONE = some_devices(1)
OPTIONS = ("train.steps=12", "checkpoint.every=4", "eval.every=null", "guard.skips_in_a_row=1")


def skips(*updates: int) -> Skips:
    found = Skips()
    for update in range(1, max(updates) + 1):
        found = found.after(update, update in updates)
    return found


@pytest.mark.parametrize(("updates", "complaint"), [
    ((5,), None), ((5, 6, 7), None), ((5, 6, 7, 8), "4 updates in a row were skipped"), ((5, 7, 8, 9, 11), None),
    (tuple(range(2, 22, 2)), None), (tuple(range(2, 24, 2)), "11 of the last 1,000 updates were skipped"),
    ((*range(2, 22, 2), 1002), None),  # the first has left the window
    ((*range(2, 22, 2), 1001), "11 of the last 1,000"),
])
def test_the_budget(updates: tuple[int, ...], complaint: str | None):
    budget = GuardConfig(skips_in_a_row=3, skips_per_1000=10)
    found = skips(*updates).complaint(updates[-1], budget)
    assert (found is None) is (complaint is None)
    assert (found or "").startswith(complaint or "")
    assert skips(*updates).after(updates[-1] + 1, False).complaint(updates[-1] + 1, budget) is None


def test_the_way_back():
    assert way_back(skips(13, 14), 14, [4, 8, 12], []) == 12
    assert way_back(skips(10, 13, 14), 14, [4, 8, 12], []) == 12
    assert way_back(skips(12, 13), 13, [4, 8, 12], []) == 8, "one saved amid the streak is no way out"
    assert way_back(skips(9, 11), 11, [4, 8], []) == 8
    assert "no checkpoint before" in str(way_back(skips(3, 4), 4, [4], []))
    assert "needs a person" in str(way_back(skips(13, 14), 14, [12], [Jump(13, 12, 13, 13)]))
    assert way_back(skips(13, 14), 14, [12], [Jump(9, 8, 9, 9)]) == 12


def test_batches_that_are_passed_over():
    jumps = [Jump(6, 4, 5, 6), Jump(9, 8, 12, 14)]
    assert [data_step(update, jumps) for update in range(3, 12)] == [3, 4, 7, 8, 9, 10, 11, 15, 16]


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Gradients of NaN for the batches of the data's order with these numbers, whichever update takes them."""
    compile_train_step, make_batches = loop.compile_train_step, loop.make_batches
    numbers: list[int] = []

    def watched(*arguments: Any) -> Any:
        batches = make_batches(*arguments)
        take = type(batches).__next__

        class Watched(type(batches)):
            def __next__(self) -> Any:
                numbers.append(self.data_step(self._step + 1))
                return take(self)

        batches.__class__ = Watched
        return batches

    def step_of(cfg: Config) -> Any:
        step = compile_train_step(cfg)

        def lower(*arguments: Any) -> Any:
            compiled = step.lower(*arguments).compile()

            def run(state: Any, batch: Any) -> Any:
                if numbers[-1] in bad:
                    batch = batch.replace(weights_BT=batch.weights_BT * jnp.float32(jnp.nan))
                return compiled(state, batch)

            return SimpleNamespace(compile=lambda: run)

        return SimpleNamespace(lower=lower)

    monkeypatch.setattr(loop, "make_batches", watched)
    monkeypatch.setattr(loop, "compile_train_step", step_of)


@pytest.mark.parametrize("kind", ["adamw", "skip_step_adamw", "muon"])
def test_an_update_that_is_not_finite_changes_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: str):
    """With every optimizer: weights and moments of after are those of before, to the bit; and the run goes on."""
    cfg = runs.config("run", *OPTIONS[2:], "train.steps=4", "checkpoint.every=1", "checkpoint.asynchronous=false",
                      f"optim.kind={kind}")
    poison(monkeypatch, {3})
    assert train(cfg, devices=ONE) == Outcome(4)
    before, after, later = (saved_bits(cfg, step) for step in (2, 3, 4))
    held = [name for name in before if name.startswith(("params.", "optimizer.mu", "optimizer.nu", "optimizer.count"))]
    assert len(held) > 10
    assert {name for name in held if before[name] != after[name]} == set()
    assert {name for name in held if name.startswith("params.") and after[name] == later[name]} == set()
    assert [line.get("optim/step skipped") for line in lines(cfg)] == [None, 0, 0, 1, 0]


def test_a_run_goes_back_and_past_the_bad_batches(runs: Runs, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]):
    """As a run would that had never met them; and killed at any later time, its continuation does the same."""
    cfg = runs.config("run", *OPTIONS)
    with monkeypatch.context() as patch:
        poison(patch, {6, 7})
        assert train(cfg, devices=ONE) == Outcome(12)
    assert ("2 updates in a row were skipped (guard.skips_in_a_row 1) at update 7: going back to update 4 and past "
            "batches 6 to 7 of the data") in capsys.readouterr().out
    entries = [json.loads(line) for line in Path(cfg.run_dir, "journal.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["update"], one["back_to"], one["first"], one["last"]) for one in entries] == [
        ("jump", 7, 4, 6, 7)]
    assert [line["step"] for line in lines(cfg)] == list(range(13))
    assert saved_steps(cfg) == [4, 8, 12]

    other = runs.config("other", *OPTIONS)  # the same decision, known from the start
    Path(other.run_dir).mkdir(parents=True)
    journal = Journal(other.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget", lambda self: None)
        journal.jump(Jump(7, 4, 6, 7))
        assert train(other, devices=ONE) == Outcome(12)
    assert reproducible(lines(other))[5:] == reproducible(lines(cfg))[5:]
    assert saved_bits(other, 12) == saved_bits(cfg, 12)

    Path(cfg.run_dir, "journal.jsonl").unlink()  # the checkpoint knows it too
    again = runs.config("run", *OPTIONS, "train.steps=16", "schedule.total_steps=40")
    assert train(again, devices=ONE) == Outcome(16)
    longer = runs.config("other", *OPTIONS, "train.steps=16", "schedule.total_steps=40")
    assert train(longer, devices=ONE) == Outcome(16)
    assert saved_bits(longer, 16) == saved_bits(again, 16)


def test_a_decision_outlives_a_kill(runs: Runs):
    """Between the journal's line and what follows from it: checkpoints of the branch that was left are not used."""
    cfg = runs.config("run", *OPTIONS)
    assert train(cfg, devices=ONE) == Outcome(12)
    straight = saved_bits(cfg, 12)
    Journal(cfg.run_dir).jump(Jump(7, 4, 6, 7))
    with Path(cfg.run_dir, "journal.jsonl").open("a") as file:
        file.write('{"kind": "jump", "upd')  # and killed in the next line
    assert train(cfg, devices=ONE) == Outcome(12)
    assert saved_bits(cfg, 12) != straight
    aside = {path.name for path in Path(cfg.run_dir, "checkpoints").iterdir() if "superseded" in path.name}
    assert aside == {"step_00000008.superseded-1", "step_00000012.superseded-1"}


def test_the_same_place_again_stops_for_a_person(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    cfg = runs.config("run", *OPTIONS)
    poison(monkeypatch, {6, 7, 8, 9})
    with pytest.raises(TrainingError, match=r"update 7 is not finite: loss nan, .*It was not saved and the "
                       r"newest checkpoint is of update 4\. 2 updates in a row .*, and the run has gone back to update "
                       r"4 before for the same reason and come no further"):
        train(cfg, devices=ONE)
    assert saved_steps(cfg) == [4]


def test_without_a_checkpoint_there_is_no_way_back(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch, {2, 3})
    with pytest.raises(TrainingError, match=r"no checkpoint before them to go back to\. Lower optim\.lr"):
        train(runs.config("run", *OPTIONS), devices=ONE)


def test_skips_are_counted_across_a_resume(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    cfg = runs.config("run", "train.steps=4", *OPTIONS[1:])
    poison(monkeypatch, {4, 5})
    assert train(cfg, devices=ONE) == Outcome(4)
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, writer=False)
    assert checkpoints.read_extra(4)["skips"] == [4]
    with pytest.raises(TrainingError, match=r"update 5 .* 2 updates in a row"):
        train(runs.config("run", *OPTIONS), devices=ONE)
