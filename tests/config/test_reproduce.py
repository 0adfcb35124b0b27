"""The commands of docs/reproduce_olmo3.md: each names configs, keys, verbs and meshes that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from maxtext.cli import USAGE, train
from maxtext.config.load import find_config, load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reproduce_olmo3.md").read_text()
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
TRAIN = [line for line in LINES if line.startswith("python ")]
VERBS = set(re.findall(r"(?m)(?:^ +|`)maxtext ([a-z]+(?: [a-z]+)?)", PAGE))
BATCHES = ("olmo3_7b", "olmo3_7b_stage2", "olmo3_7b_long")


def words(line: str) -> list[str]:
    return shlex.split(line.replace("$BUCKET", "/mnt/bucket").replace("$REPO", str(ROOT)))


@pytest.mark.parametrize("line", TRAIN)
def test_a_training_command_describes_a_run(line: str, capsys: pytest.CaptureFixture[str]):
    program, script, name, *overrides = words(line)
    assert (program, Path(script).name) == ("python", "train.py")
    devices = "2" if "tiny" in name else "64"
    assert train([name, *overrides, "--dry-run", "--devices", devices]) == 0
    cfg = load(find_config(name), overrides)
    assert f"outputs {cfg.run_dir}" in " ".join(capsys.readouterr().out.split())


def test_each_stage_finds_the_run_before_it():
    made = set()
    for line in TRAIN:
        cfg = load(find_config(words(line)[2]), words(line)[3:])
        source = cfg.train.init_from.path
        if source is not None:
            assert source in made or f"merge {source.replace('/mnt/bucket', '$BUCKET')} " in PAGE, line
        if cfg.train.take_over_at is not None:
            assert cfg.run_dir in made
        made.add(cfg.run_dir)
    assert len(TRAIN) == 12


def test_the_verbs_exist():
    assert {"checkpoint merge", "convert import", "convert verify", "convert export", "data prepare"} <= VERBS
    for verb in VERBS:
        first, _, second = verb.partition(" ")
        known = re.search(rf"(?m)^  {first} (.*)", USAGE)
        assert known, verb
        assert first in ("eval", "report") or re.search(rf"(?m)^  {first} .*\b{second}\b", USAGE), verb


def test_every_setting_that_is_named_exists():
    settings = set(re.findall(r"(?<![\w./$-])((?:train|data|optim|eval|checkpoint|mesh)\.[a-z_.]+=[\w.]+)", PAGE))
    assert len(settings) > 15
    for setting in settings:
        load("olmo3_32b_long", [setting, "train.init_from.path=x"])  # raises on an unknown key
    for key in set(re.findall(r"`((?:train|data|optim|eval|checkpoint|mesh|schedule)\.[a-z_.]+)`", PAGE)):
        node = load("olmo3_32b_long")
        for part in key.split("."):
            node = getattr(node, part)


def test_the_meshes_of_the_table_fit_every_stage(capsys: pytest.CaptureFixture[str]):
    rows = re.findall(r"(?m)^\| .*?(\d+) (?:devices|H100) \| hardware/(\w+) \| `(.*?)` \| `(.*?)` \| `(.*?)` \|$", PAGE)
    assert len(rows) == 4
    for devices, part, *meshes in rows:
        assert (ROOT / "configs" / "hardware" / f"{part}.yml").exists()
        for name, mesh in zip(BATCHES, meshes, strict=True):
            assert train([name, *mesh.split(), "--dry-run", "--devices", devices]) == 0, (part, name)
