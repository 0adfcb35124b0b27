"""The recipe of OLMo 3 in small, stage after stage on committed text: what each takes over, and what it begins anew.

The commands are those of docs/reproduce_olmo3.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from maxtext.cli import main
from maxtext.config.load import load
from maxtext.config.schema import Config
from maxtext.data.command import run_prepare as prepare
from maxtext.data.pipeline import Batches, fingerprint_numpy, make_batches
from maxtext.data.tokens import resolve
from maxtext.train import loop
from maxtext.train.resume import ResumeError
from maxtext.train.schedule import learning_rate
from tests.page_commands import in_small, path_of, words
from tests.page_commands import run as run_command
from tests.runs import TEXT, lines, reproducible, restore, saved_bits, saved_steps, some_devices

TAKEN_OVER, END_OF_STAGE_1 = 20, 48


class Stages(NamedTuple):
    first: Config
    second: Config
    middle: Config
    long: Config


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed prose, prepared with each paragraph as a document, so that several fit into an instance."""
    folder = tmp_path_factory.mktemp("paragraphs")
    (folder / "prose").mkdir()
    for file in sorted((TEXT / "prose").glob("*.txt"))[:24]:
        for number, paragraph in enumerate(file.read_text().split("\n\n")):
            if len(paragraph) > 60:
                (folder / "prose" / f"{file.stem}-{number:03d}.txt").write_text(paragraph)
    assert prepare(["--out", str(folder / "data"), "--vocab-size", "384", "--source", f"prose={folder / 'prose'}",
                    "--heldout-fraction", "prose=0.02"]) == 0
    return folder / "data"


def config(folder: Path, prepared: Path, stage: str, *overrides: str) -> Config:
    return load(f"tiny/olmo3_tiny_{stage}", [f"output_dir={folder}", f"data.prepared={prepared}", *overrides])


def run(cfg: Config) -> None:
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(cfg.train.steps)


def command(first_words: str) -> list[str]:
    """The words of the page's one command that begins so."""
    (line,) = [line for line in in_small() if f"{line} ".startswith(f"{first_words} ")]
    return words(line)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, paragraphs: Path) -> Stages:
    """The whole chain. Stages that start from another save their start as step 0, and stage 2 its last but one."""
    folder = tmp_path_factory.mktemp("stages")
    begun = "checkpoint.save_at_start=true"
    places = [f"output_dir={folder}", f"data.prepared={paragraphs}", "log.report=false"]
    more = {
        "stage1": [], "stage1b": [],
        "stage2": [begun, "checkpoint.every=11", f"train.init_from.path={folder}/olmo3_tiny_stage1"],
        "long": [begun, f"train.init_from.path={folder}/olmo3_tiny_stage2"]}
    found = []
    for stage, overrides in more.items():
        python, script, name, *given = command(f"python train.py configs/tiny/olmo3_tiny_{stage}.yml")
        arguments = [path_of(name), *given, *places, *overrides]
        found.append(load(arguments[0], arguments[1:]))
        if stage == "stage1":
            second = config(folder, paragraphs, "stage1b")
            with pytest.raises(ResumeError, match="holds no checkpoint, but this config takes over a run at update 20"):
                loop.train(second, devices=some_devices(2))
        assert run_command([python, script, *arguments], devices=2) == 0
    assert found[0].train.steps == TAKEN_OVER
    return Stages(*found)


def state(cfg: Config, step: int) -> Any:
    return restore(cfg, step, (1, 1, 1)).state


def batches(cfg: Config) -> Batches:
    return make_batches(cfg, resolve(cfg), None)


def losses(cfg: Config) -> list[float]:
    return [record["train/CE loss"] for record in lines(cfg)[1:]]


def check_data(cfg: Config) -> None:
    """Every update saw the batch that its own config's order gives it, counted from update 1."""
    source = batches(cfg)
    expected = [int(fingerprint_numpy(np.asarray(next(source).tokens_BT))) for _ in range(cfg.train.steps)]
    source.close()
    assert len(set(expected)) == cfg.train.steps
    assert [record["data/fingerprint"] for record in lines(cfg)[1:]] == expected


def check_rates(cfg: Config, steps: range) -> None:
    for step in steps:
        rate = lines(cfg)[step]["optim/LR (group 0)"]
        assert rate == pytest.approx(learning_rate(cfg, step), rel=1e-6, abs=1e-12), step


def test_stage_1b_goes_on_as_if_only_the_schedule_had_changed(stages: Stages):
    first, second = stages.first, stages.second
    assert second.run_dir == first.run_dir
    assert [record["step"] for record in lines(second)] == list(range(END_OF_STAGE_1 + 1))
    assert saved_steps(second) == [10, 20, 30, 40, END_OF_STAGE_1]
    check_rates(first, range(1, TAKEN_OVER + 1))
    check_rates(second, range(TAKEN_OVER + 1, END_OF_STAGE_1 + 1))
    peak = first.optim.lr
    assert learning_rate(second, 22) == pytest.approx(0.55 * peak)
    assert learning_rate(first, 22) == pytest.approx(0.55 * peak)
    # It jumps down onto the end of a ramp: 21 / 22 of the middle, where the cosine was still above it.
    assert learning_rate(second, 21) == pytest.approx(0.55 * peak * 21 / 22)
    assert learning_rate(first, 21) > 0.55 * peak
    check_data(second)
    for step in (1, TAKEN_OVER, TAKEN_OVER + 1, END_OF_STAGE_1):
        assert batches(first).instance_ids(step).tolist() == batches(second).instance_ids(step).tolist()
    end = state(second, END_OF_STAGE_1)
    assert int(end.step) == int(end.optimizer.count) == int(end.optimizer.n_recorded) == END_OF_STAGE_1
    assert np.asarray(end.optimizer.loss_window)[:END_OF_STAGE_1].tolist() == losses(second)


@pytest.mark.parametrize("name", ["middle", "long"])
def test_a_later_stage_takes_over_weights_moments_and_count_alone(stages: Stages, name: str):
    cfg, before = (stages.middle, stages.second) if name == "middle" else (stages.long, stages.middle)
    count = END_OF_STAGE_1 + (0 if name == "middle" else stages.middle.train.steps)
    last, start = saved_bits(before, before.train.steps), saved_bits(cfg, 0)
    taken = {leaf for leaf in last if leaf.startswith(("params.", "optimizer.mu.", "optimizer.nu.", "optimizer.count"))}
    assert len(taken) > 25
    assert {leaf for leaf in taken if start[leaf] != last[leaf]} == set()
    begun, ended = state(cfg, 0), state(cfg, cfg.train.steps)
    assert (int(begun.step), int(begun.optimizer.count), int(begun.optimizer.n_recorded)) == (0, count, 0)
    assert not np.asarray(begun.optimizer.loss_window).any()
    assert not np.asarray(begun.optimizer.grad_norm_window).any()
    steps = cfg.train.steps
    counts = int(ended.step), int(ended.optimizer.count), int(ended.optimizer.n_recorded)
    assert counts == (steps, count + steps, steps)
    assert np.asarray(ended.optimizer.loss_window)[:steps].tolist() == losses(cfg)
    assert lines(cfg)[steps]["throughput/total tokens"] == steps * cfg.batch_tokens
    check_rates(cfg, range(1, steps + 1))
    check_data(cfg)


def test_stage_2_starts_at_nearly_its_peak_and_its_last_update_changes_no_weight(stages: Stages):
    cfg = stages.middle
    rates = [record["optim/LR (group 0)"] for record in lines(cfg)[1:]]
    assert rates[0] == pytest.approx(cfg.optim.lr * 11 / 12)
    assert rates[0] > 2 * lines(stages.second)[END_OF_STAGE_1]["optim/LR (group 0)"]
    assert rates[-1] == 0
    before, after = saved_bits(cfg, 11), saved_bits(cfg, 12)
    assert all(before[leaf] == after[leaf] for leaf in after if leaf.startswith("params."))
    assert any(before[leaf] != after[leaf] for leaf in after if leaf.startswith("optimizer.mu."))


def test_the_long_stage_packs_documents_keeps_them_apart_and_stretches(stages: Stages, paragraphs: Path,
                                                                       tmp_path: Path):
    cfg = stages.long
    source = batches(cfg)
    batch, description = next(source), source.describe()
    source.close()
    assert description != batches(stages.middle).describe()
    documents = np.asarray(batch.segments_BT)
    assert documents.shape == (2, 512)
    assert documents.max() >= 2
    masked = [record["train/masked labels (%)"] for record in lines(cfg)[1:]]
    assert max(masked) > 1 / 512  # padding; without it 1 / T
    assert all(record["train/masked labels (%)"] == pytest.approx(1 / 64) for record in lines(stages.middle)[1:])
    # Another run's first update is the same bit for bit, but not without YaRN, and not without the masking.
    for change in ("description=control", "model.rope_scaling=null", "data.document_masking=false"):
        other = config(tmp_path, paragraphs, "long", change, f"run_name={change.partition('=')[0]}",
                       "train.steps=1", f"train.init_from.path={stages.middle.run_dir}")
        run(other)
        first, expected = reproducible(lines(other))[1], reproducible(lines(cfg))[1]
        assert first["data/fingerprint"] == expected["data/fingerprint"]
        for name in ("train/CE loss", "optim/total grad norm"):
            assert (first[name] == expected[name]) == (change == "description=control"), (change, name)


def test_checkpoints_of_the_last_stage_are_averaged_and_evaluated(stages: Stages, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch):
    """As OLMo 3 32B ends: the mean of the last checkpoints, which the offline evaluation opens."""
    (tmp_path / "runs").symlink_to(stages.long.output_dir)
    monkeypatch.chdir(tmp_path)
    assert run_command(command("maxtext checkpoint merge")) == 0
    out = Path("runs", "olmo3_tiny_mean")
    assert main(["eval", str(out), "mesh.fsdp=8", "eval.batch=8", "--output", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert (scores["step"], scores["run_name"]) == (0, "olmo3_tiny_mean")
    assert 3 < scores["metrics"]["eval/lm/prose/CE loss"] < 5
    assert run_command(command("maxtext report")) == 0
    assert Path(stages.first.run_dir, "report.html").is_file()


def test_every_command_of_the_page_s_small_chain_is_run_here():
    programs = [" ".join(line.split()[:3]) for line in in_small()]
    assert programs == [*(f"python train.py configs/tiny/olmo3_tiny_{stage}.yml" for stage in
                          ("stage1", "stage1b", "stage2", "long")), "maxtext checkpoint merge",
                        "maxtext report runs/olmo3_tiny_stage1"]
