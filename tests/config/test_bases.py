"""Bases and how they merge; finding, naming and listing configs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maxtext.config.architecture import RopeScalingConfig
from maxtext.config.load import CONFIGS, find_config, list_configs, load, load_with_origins
from maxtext.config.schema import SourceConfig
from tests.config.files import GOOD, faults, write

# Bases


def test_bases_merge_left_to_right_then_the_file_then_the_command_line(folder):
    write("parts/a.yml", "optim: {lr: 1, eps: 1e-6, weight_decay: 0}\n"
                         "data: {sources: {x: {repeat: 1}, y: {repeat: 1}}}\n")
    write("parts/b.yml", "base: deeper/c\noptim: {eps: 1e-7}\ndata: {sources: {y: {root: r, paths: [p]}}}\n")
    write("parts/deeper/c.yml", "optim: {eps: 5, betas: [0.1, 0.2]}\n")
    write("run.yml", "base: [good, parts/a.yml, parts/b]\noptim: {lr: 3}\n")
    cfg, origins = load_with_origins("run.yml", ["optim.weight_decay=0.5"])
    assert (cfg.optim.lr, cfg.optim.eps, cfg.optim.betas, cfg.optim.weight_decay) == (3, 1e-7, (0.1, 0.2), 0.5)
    assert cfg.data.sources == {"x": SourceConfig(), "y": SourceConfig(paths=("p",), root="r")}
    assert {key: origins[f"optim.{key}"] for key in ("lr", "eps", "betas", "weight_decay", "kind")} == {
        "lr": "run.yml:2", "eps": "parts/b.yml:2", "betas": "parts/deeper/c.yml:1", "weight_decay": "command line",
        "kind": "default"}
    assert origins["data.sources.y.repeat"] == "parts/a.yml:2"
    assert origins["data.sources.y.root"] == "parts/b.yml:3"
    assert origins["model.d_model"] == "good.yml:3"


def test_a_base_is_sought_beside_its_file_first_then_in_the_configs_folder(folder):
    write("run.yml", "base: [good, models/olmo3_190m]\n")
    assert load("run.yml").model.d_model == 768
    write("models/olmo3_190m.yml", "model: {d_model: 32}\n")
    assert load("run.yml").model.d_model == 32


def test_a_base_that_two_others_share_is_merged_once_at_its_first_place(folder):
    write("a.yml", "base: good\noptim: {lr: 7}\n")
    write("b.yml", "base: good\nlog: {report: maybe}\n")
    write("run.yml", "base: [a, b]\n")
    [problem] = faults("run.yml", )
    assert problem.startswith("b.yml:2: log.report")
    write("b.yml", "base: good\n")
    assert load("run.yml").optim.lr == 7


def test_null_takes_a_section_back_to_its_defaults(folder):
    write("long.yml", "base: good\nschedule: {kind: linear}\n"
          "model: {rope_scaling: {kind: yarn, original_length: 32}}\n")
    assert load("long.yml").model.rope_scaling.original_length == 32
    plain = load("long.yml", ["model.rope_scaling=null"])
    assert plain.model.rope_scaling == RopeScalingConfig()
    assert plain.schedule.kind == "linear"
    write("plain.yml", "base: long\nmodel: {rope_scaling: null}\n")
    assert load("plain.yml").model.rope_scaling == RopeScalingConfig()
    assert load("long.yml", ["model.rope_scaling=null", "model.rope_scaling.kind=linear"]).model.rope_scaling == (
        RopeScalingConfig(kind="linear"))


def test_a_named_item_is_removed_by_null(folder):
    write("run.yml", "base: good\ndata: {sources: {x: {repeat: 2}, xy: {}, y: {}}}\n")
    write("less.yml", "base: run\ndata: {sources: {x: null}}\n")
    assert list(load("less.yml").data.sources) == ["xy", "y"]
    assert list(load("run.yml", ["data.sources.xy=null"]).data.sources) == ["x", "y"]
    assert load("run.yml", ["data.sources.x=null", "data.sources.x={}"]).data.sources["x"].repeat == 1
    assert faults("run.yml", "data.sources.z=null") == (
        "command line: data.sources.z: null removes a named item, but no earlier file has one of this name",)


@pytest.mark.parametrize(("files", "expected"), [
    ({"run.yml": "\nbase: run\n"}, "run.yml:2: base: run: a cycle of bases: run.yml -> run.yml"),
    ({"run.yml": "base: a\n", "a.yml": "base: [b]\n", "b.yml": "base: a.yml\n"},
     "b.yml:1: base: a.yml: a cycle of bases: run.yml -> a.yml -> b.yml -> a.yml"),
    ({"run.yml": "base: [good, nowhere]\n"},
     "run.yml:1: base: nowhere: no such config (looked for nowhere, nowhere.yml, "),
    ({"run.yml": "base: models/olmo3_7bb\n"}, "run.yml:1: base: models/olmo3_7bb: no such config"),
    ({"run.yml": "base: parts\n", "parts/x.yml": ""}, "run.yml:1: base: parts: is a folder, not a YAML file"),
    ({"run.yml": "base: {a: 1}\n"}, "run.yml:1: base: a mapping where a file name or a list of file names is expected"),
    ({"run.yml": "base:\n"}, "run.yml:1: base: null where a file name or a list of file names is expected"),
    ({"run.yml": "base: [[good]]\n"}, "run.yml:1: base: a list of 1 where a file name or a list of file names"),
    ({"run.yml": "base: a\n", "a.yml": "x: [1\n"}, "a.yml:2: not valid YAML"),
    ({"run.yml": 'base: ""\n'}, "run.yml:1: base: "),
])
def test_a_base_that_cannot_be_used_names_the_file_that_asks_for_it(folder, files, expected):
    for name, text in files.items():
        write(name, text)
    [problem] = faults("run.yml")
    assert problem.startswith(expected)


def test_a_misspelt_base_is_offered_the_near_one(folder):
    write("run.yml", "base: models/olmo3_7bb\n")
    assert faults("run.yml")[0].endswith("did you mean models/olmo3_7b?")
    write("run.yml", "base: olmo3_7b_\n")
    assert "did you mean" in faults("run.yml")[0]


def test_an_absent_base_does_not_hide_faults_of_its_file_nor_invent_missing_keys(folder):
    write("run.yml", "base: nowhere\noptim: {lrr: 1}\n")
    assert len(faults("run.yml")) == 2
    assert faults("run.yml")[1].startswith("run.yml:2: optim.lrr: unknown key")


# Finding and listing


def test_a_config_is_found_by_path_and_by_name(folder):
    assert find_config("good") == Path("good.yml")
    assert find_config(folder / "good.yml") == folder / "good.yml"
    assert find_config("olmo3_7b") == CONFIGS / "olmo3_7b.yml"
    assert find_config("models/olmo3_7b.yml") == CONFIGS / "models" / "olmo3_7b.yml"


@pytest.mark.parametrize(("name", "expected"), [
    ("quickstrt", "did you mean quickstart?"), ("configs/quikstart.yml", "did you mean quickstart?"),
    ("nothing_like_it", "no such config (looked for nothing_like_it, nothing_like_it.yml"),
    ("nothing.yml", "no such config (looked for nothing.yml, "), ("", "(empty name): no such"),
    ("models", "is a folder, not a YAML file"), (".", "is a folder, not a YAML file"),
])
def test_a_config_that_is_not_there_is_one_line_with_the_near_name(folder, name, expected):
    [problem] = faults(name)
    assert expected in problem
    assert ".yml.yml" not in problem


def test_an_unreadable_file_is_one_line(folder):
    os.mkfifo("pipe.yml")  # exists, but is no regular file
    assert "no such config" in faults("pipe.yml")[0]


def test_the_run_is_named_after_its_file_unless_it_names_itself(folder):
    assert load("good.yml").run_name == "good"
    write("other.yml", "base: good\n")
    assert load("other.yml").run_name == "other"
    write("named.yml", "base: good\nrun_name: mine\n")
    assert load("named.yml").run_name == "mine"


def test_configs_are_listed_with_their_descriptions_and_broken_ones_say_so(folder):
    write("list/b.yml", "description: The second,\n  in two lines.\n")
    write("list/a.yml", GOOD)
    write("list/c.yml", "model: [\n")
    write("list/not.txt", "")
    assert list_configs("list")[:2] == [("a", ""), ("b", "The second, in two lines.")]
    assert list_configs("list")[2][1].startswith("(cannot be read: list/c.yml:2: not valid YAML")
