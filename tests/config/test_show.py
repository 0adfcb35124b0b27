"""The `config` verb."""

from __future__ import annotations

import pytest

from maxtext.config.load import CONFIGS, load
from maxtext.config.show import run


def test_show_prints_the_resolved_tree_with_origins(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert run(["show", "olmo3_7b", "optim.lr=1e-4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (tmp_path / "olmo3_7b.yml").write_text(out)
    assert load(tmp_path / "olmo3_7b.yml") == load("olmo3_7b", ["optim.lr=1e-4"])
    assert "\n  lr: 0.0001                                      # command line\n" in out
    assert "\n  d_model: 4096                                   # configs/models/olmo3_7b.yml:5\n" in out
    assert "\n  tensor: 1                                       # default\n" in out


def test_show_prints_every_fault_on_stderr_and_exits_2(capsys):
    assert run(["show", "quickstart", "optim.leaning_rate=1", "trian.steps=3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "command line: optim.leaning_rate: unknown key; did you mean optim.lr (also known as learning_rate)?",
        "command line: trian.steps: unknown key; did you mean train.steps?"]


def test_list_prints_runs_first_then_parts_each_with_its_description(capsys):
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names.index("olmo3_7b") < names.index("quickstart") < names.index("data/olmo_mix_0625")
    folders = [name.rpartition("/")[0] for name in names]
    assert folders == sorted(folders)
    assert len(lines) == len(list(CONFIGS.rglob("*.yml")))
    assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize("argv", [[], ["show"], ["list", "x"], ["shwo", "quickstart"]])
def test_a_wrong_command_prints_the_usage_and_exits_2(argv, capsys):
    assert run(argv) == 2
    assert capsys.readouterr().err.startswith("usage: maxtext config show CONFIG")


def test_help_exits_0(capsys):
    assert run(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
