"""What may change between a run and its continuation: every leaf of the schema is fixed, noted or free."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from maxtext.cli import train
from maxtext.config.load import load, to_yaml
from maxtext.config.schema import Config
from maxtext.train.resume import ResumeError, check_new_run, check_same_run, flatten
from tests.runs import Runs

SOURCE = "data.sources.code.paths=[a]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), prepared_text)


def check(saved: Config, now: Config) -> list[str]:
    notes: list[str] = []
    check_same_run(now, to_yaml(saved), 20, notes.append)
    return notes


def test_the_same_config_says_nothing(runs: Runs):
    assert check(runs.config(), runs.config()) == []


@pytest.mark.parametrize(("override", "key", "before", "after"), [
    ("model.d_model=64", "model.d_model", 32, 64),
    ("model.init_std=0.01", "model.init_std", 0.02, 0.01),
    ("model.window=4", "model.window", 8, 4),
    ("data.sequence_length=64", "data.sequence_length", 32, 64),
    ("data.seed=1", "data.seed", 0, 1),
    ("data.sources.code.repeat=2", "data.sources.code.repeat", None, 2.0),
    ("seed=1", "seed", 0, 1),
    ("train.global_batch=16", "train.global_batch", 8, 16),
    ("optim.kind=adamw", "optim.kind", "skip_step_adamw", "adamw"),
    ("optim.moments_dtype=bfloat16", "optim.moments_dtype", "float32", "bfloat16"),
    ("optim.skip.window=64", "optim.skip.window", 128, 64),
])
def test_another_model_data_order_or_optimizer_is_refused_by_name(runs: Runs, override: str, key: str, before: Any,
                                                                  after: Any):
    cfg = runs.config("run", override)
    with pytest.raises(ResumeError) as error:
        check(runs.config(), cfg)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{cfg.run_dir} was made with another config, so it cannot be continued with this one:"
    assert f"  {key}: {before!r} when update 20 was saved, {after!r} now" in lines
    assert lines[-1] == "give back the old values, or start a new run with another run_name"


def test_all_refused_changes_are_listed_at_once(runs: Runs):
    with pytest.raises(ResumeError) as error:
        check(runs.config(), runs.config("run", "seed=3", "model.d_ff=96", "optim.lr=1e-3"))
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]] == ["model.d_ff", "seed"]


@pytest.mark.parametrize("override", [
    "mesh.tensor=2", "log.every=7", "log.tensorboard=false", "eval.every=3", "eval.batch=5", "eval.sets.a.paths=[x]",
    "checkpoint.every=5", "checkpoint.keep_last=1", "train.gradient_accumulation_steps=2", "train.max_seconds=5",
    "train.remat.mode=full", "optim.offload=host", "optim.offload_weights=host",
    "train.loss_chunk_tokens=64", "data.prefetch=1", "data.workers=2", "description=other",
    "train.steps=60", "generate.prompts=[a]"])
def test_what_changes_no_number_is_free(runs: Runs, override: str):
    assert check(runs.config(), runs.config("run", override)) == []


@pytest.mark.parametrize(("override", "note"), [
    ("optim.lr=1e-3", "optim.lr changes from 0.01 to 0.001 after update 20"),
    ("data.sources.code.root=/mnt", "data.sources.code.root changes from '' to '/mnt' after update 20"),
    ("data.sources.code.paths=[b]", "data.sources.code.paths changes from ('a',) to ('b',) after update 20"),
    ("data.sources.code.weights=[1.0]", "data.sources.code.weights changes from () to (1.0,) after update 20"),
    ("train.compute_dtype=bfloat16", "train.compute_dtype changes from 'float32' to 'bfloat16' after update 20"),
    ("schedule.warmup_steps=5", "schedule.warmup_steps changes from 10 to 5 after update 20"),
    ("schedule.kind=half_cosine", "schedule.kind changes from 'cosine' to 'half_cosine' after update 20"),
    ("train.take_over_at=20", "train.take_over_at changes from None to 20 after update 20")])
def test_what_changes_numbers_or_the_place_of_the_data_is_noted(runs: Runs, override: str, note: str):
    assert check(runs.config("run", SOURCE), runs.config("run", SOURCE, override)) == [note]


def test_a_schedule_that_ends_elsewhere_is_noted(runs: Runs):
    saved = runs.config("run", "schedule.total_steps=null")
    assert check(saved, runs.config("run", "schedule.total_steps=null", "train.steps=60")) == [
        "the learning-rate schedule now ends at update 60 instead of 40 (set schedule.total_steps to keep it while "
        "train.steps changes)"]
    assert check(saved, runs.config("run", "train.steps=60")) == [
        "schedule.total_steps changes from None to 40 after update 20"]


@pytest.mark.parametrize("at", [19, 21])
def test_a_config_takes_over_at_its_update_alone(runs: Runs, at: int):
    cfg = runs.config("run", f"train.take_over_at={at}", "schedule.kind=half_cosine")
    with pytest.raises(ResumeError, match=rf"stands at update 20, but this config takes it over at update {at} .* with "
                       rf"train\.steps={at}, or"):
        check(runs.config(), cfg)
    assert check(cfg, cfg) == []  # taken over long ago


def test_a_config_that_takes_over_never_begins(runs: Runs):
    check_new_run(runs.config())
    with pytest.raises(ResumeError, match=r"holds no checkpoint, but this config takes over a run at update 20"):
        check_new_run(runs.config("run", "train.take_over_at=20"))


def test_a_config_of_another_version_is_refused(runs: Runs):
    saved = to_yaml(runs.config()).replace("  n_heads: 4", "  n_heads: 4\n  n_wheels: 4")
    with pytest.raises(ResumeError, match=r"(?s)update 20 of .* cannot be read by this version:.*model\.n_wheels: "
                       r"unknown key"):
        check_same_run(runs.config(), saved, 20, print)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yml", "samples.jsonl", "experts.jsonl"])
def test_a_folder_where_a_run_writes_a_file_is_refused_before_anything_is_made(runs: Runs, name: str, capsys):
    called = f"with-{name}"
    folder = runs.directory(called)
    (folder / name).mkdir(parents=True)
    assert train(runs.arguments(called)) == 2
    assert capsys.readouterr().err == (f"{folder / name} is a folder, but the run writes a file there; move it away, "
                                       f"or choose another run_name\n")
    assert not (folder / "checkpoints").exists()


def test_flatten_reaches_every_field():
    cfg = load("quickstart")
    flat = flatten(cfg)
    assert flat["data.sources.prose.repeat"] == 6
    assert flat["optim.betas"] == (0.9, 0.95)
    assert flat["mesh.fsdp"] == -1
    assert not any(dataclasses.is_dataclass(value) or (isinstance(value, dict) and value) for value in flat.values())
