"""The recipes of end_to_end/: each runs, in small numbers, and does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.materials import program
from tests.recipes import DENSE, SMALLER, STEPS, Recipes
from tests.runs import ROOT

RECIPES = sorted(path.name for path in (ROOT / "end_to_end").glob("*.sh"))
ONE_LAYER = "model.n_layers=1 model.layer_pattern=[window] model.last_layer_full=false"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Recipes:
    return Recipes(tmp_path_factory.mktemp("recipes"), prepared_text)


@pytest.fixture(scope="module")
def quickstart(recipes: Recipes) -> str:
    return recipes("quickstart.sh")


def test_quickstart(recipes: Recipes, quickstart: str):
    assert recipes.steps("quickstart") == list(range(STEPS + 1))
    assert f"quickstart is complete: update {STEPS} of {STEPS}" in quickstart
    assert "held-out set" in quickstart
    assert (recipes.runs / "quickstart" / "report.html").exists()


def test_resume_and_resize(recipes: Recipes, quickstart: str):
    said = recipes("resume.sh")
    assert "every array has the same bits" in said
    assert f"resuming {recipes.runs}/resumed from update {STEPS // 2} of {STEPS}" in said
    assert recipes.steps("resumed") == list(range(STEPS + 1))
    said = recipes("resize.sh")
    assert "4 x cpu" in said
    assert recipes.steps("resumed") == list(range(STEPS + 9))


@pytest.mark.parametrize(("code", "said", "same"), [
    (0, "the same", True), (1, "config: run_name", True), (1, "params.embed: 3 of 4 values differ", False),
    (2, "no such run", False)])
def test_resume_is_not_proven_by_a_comparison_that_failed(code: int, said: str, same: bool, tmp_path: Path):
    """Beside a command that only answers `checkpoint diff`."""
    (tmp_path / "maxtext").write_text(f'#!/bin/sh\n[ "$1" = train ] || {{ echo "{said}"; exit {code}; }}\n')
    (tmp_path / "maxtext").chmod(0o755)
    found = subprocess.run([str(ROOT / "end_to_end" / "resume.sh")], env=os.environ | {
        "MAXTEXT": str(tmp_path / "maxtext")}, text=True, capture_output=True, check=False)
    assert (found.returncode == 0, "every array has the same bits" in found.stdout) == (same, same)


def test_hugging_face_round_trip(recipes: Recipes, quickstart: str):
    assert "wrote" in recipes("hf_round_trip.sh")
    assert (recipes.runs / "hf_again" / "model.safetensors").exists()


@pytest.mark.slow
def test_stages(recipes: Recipes):
    recipes("stages.sh", f"model.vocab_size=384 {ONE_LAYER} eval.every=null log.tensorboard=false log.report=false")
    assert recipes.steps("olmo3_tiny_stage1")[-1] == 48
    assert (recipes.runs / "olmo3_tiny_mean" / "config.yml").exists()


@pytest.mark.slow
def test_mixture_of_experts(recipes: Recipes):
    said = recipes("moe.sh", f"{SMALLER} {ONE_LAYER} model.moe.experts=4 eval.every=null")
    assert "expert 4" in said
    assert recipes.steps("quickstart_moe") == list(range(STEPS + 1))


def test_ray_is_asked(recipes: Recipes):
    said = recipes("ray.sh", OPTIONS="--dry-run")
    assert json.loads(said[said.index("{"):])["scaling_config"]["num_workers"] == 2


def test_what_the_7b_would_be(recipes: Recipes):
    said = recipes("olmo3_7b_tpu.sh", "")
    assert said.count("Dry run of olmo3_7b") == said.count("kind: JobSet") == 4
    assert "mesh data 4, fsdp 64, tensor 1 (planned)" in " ".join(said.split())
    assert "cloud.google.com/gke-tpu-topology: 4x4x4" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_elastic(recipes: Recipes, tmp_path: Path):
    real = tmp_path / "maxtext"
    real.write_text(f'#!/bin/sh\nexec {sys.executable} -m maxtext.cli "$@"\n')
    real.chmod(0o755)
    smaller = f"{DENSE} {ONE_LAYER} eval.every=null checkpoint.every=40 checkpoint.snapshot_every=5"
    said = recipes("elastic.sh", smaller, MAXTEXT=str(real), WORKERS="2", STEPS="60", PYTHONPATH=str(ROOT),
                   XLA_FLAGS="--xla_backend_optimization_level=0")
    assert re.search(r'"event": "death".*"code": -9', said)
    assert recipes.steps("elastic") == list(range(61))


def test_every_recipe_is_run_and_is_sound():
    text = Path(__file__).read_text() + (ROOT / "tests" / "launch" / "test_ray.py").read_text()
    assert [name for name in RECIPES if name != "places.sh" and f'"{name}"' not in text] == []
    found = subprocess.run([program("shellcheck"), "-x", "-P", "SCRIPTDIR", *RECIPES], cwd=ROOT / "end_to_end",
                           text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stdout
