"""The recipes of end_to_end/, run by bash as they stand, on the committed text and in small numbers.

`MAXTEXT` is a program that hands its words to this process, which runs the verb: starting Python and JAX for each of
them would take most of the time. What starts processes of its own starts the real command.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.report.run_files import read_metrics
from maxtext.train import loop
from tests.materials import long, program
from tests.runs import ROOT, some_devices

RECIPES = sorted(path.name for path in (ROOT / "end_to_end").glob("*.sh"))
STEPS = 8
SMALLER = ("model.vocab_size=384 model.d_model=32 model.n_layers=2 model.layer_pattern=[window,full] model.window=8 "
           "data.sequence_length=32 log.tensorboard=false log.report=false schedule.warmup_steps=2 checkpoint.every=4")
DENSE = f"{SMALLER} model.d_ff=64 eval.every=4 eval.batch=32"
ONE_LAYER = "model.n_layers=1 model.layer_pattern=[window] model.last_layer_full=false"
FORWARD = """\
#!{python} -S
import json, os, socket, sys
link, folder = socket.socket(socket.AF_UNIX), os.getcwd()
os.chdir({place!r})  # an address has no room for a long path
link.connect("link")
link.sendall(json.dumps([sys.argv[1:], folder, os.environ.get("XLA_FLAGS", "")]).encode() + b"\\n")
code, out, err = json.loads(link.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Recipes:
    """Runs recipes on runs below one folder; they may build on each other's."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.runs, self._data = folder / "runs", data
        self.program = folder / "maxtext"
        self.program.write_text(FORWARD.format(python=sys.executable, place=str(folder)))
        self.program.chmod(0o755)

    def __call__(self, recipe: str, smaller: str = DENSE, **variables: str) -> str:
        """Everything that the recipe and its verbs said; it must succeed."""
        environment = os.environ | {"MAXTEXT": str(self.program), "DATA": str(self._data), "RUNS": str(self.runs),
                                    "STEPS": str(STEPS), "SMALLER": smaller, "XLA_FLAGS": ""} | variables
        with socket.socket(socket.AF_UNIX) as link, contextlib.chdir(self.runs.parent), open("said", "w+") as said:
            link.bind("link")
            link.listen()
            link.settimeout(0.1)
            script = subprocess.Popen([str(ROOT / "end_to_end" / recipe)], env=environment, text=True,
                                      stdout=said, stderr=subprocess.STDOUT)
            try:
                while script.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        _serve(link.accept()[0])
            finally:
                script.kill()
                os.unlink("link")
            script.wait()
            said.seek(0)
            text = said.read()
        assert script.returncode == 0, text
        return text

    def steps(self, name: str) -> list[int]:
        return [line["step"] for line in read_metrics(str(self.runs / name / "metrics.jsonl"))]


def _serve(link: socket.socket) -> None:
    link.settimeout(None)
    with link, link.makefile() as file:
        words, folder, flags = json.loads(file.readline())
        found = re.search(r"device_count=(\d+)", flags)
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            devices = some_devices(int(found[1]) if found else 1)
            patch.setattr(loop, "train", functools.partial(loop.train, devices=devices))
            try:
                code = cli.main(words)
            except SystemExit as ended:  # of argparse
                code = ended.code
        link.sendall(json.dumps([code, out.getvalue(), err.getvalue()]).encode())


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


@long  # test_stages.py trains the same chain
def test_stages(recipes: Recipes):
    recipes("stages.sh", f"model.vocab_size=384 {ONE_LAYER} eval.every=null log.tensorboard=false log.report=false")
    assert recipes.steps("olmo3_tiny_stage1")[-1] == 48
    assert (recipes.runs / "olmo3_tiny_mean" / "config.yml").exists()


@long
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


@long  # tests/elastic has the drills
@pytest.mark.timeout(300)
def test_elastic(recipes: Recipes, tmp_path: Path):
    real = tmp_path / "maxtext"
    real.write_text(f'#!/bin/sh\nexec {sys.executable} -m maxtext.cli "$@"\n')
    real.chmod(0o755)
    said = recipes("elastic.sh", f"{DENSE} eval.every=null checkpoint.snapshot_every=5", MAXTEXT=str(real),
                   WORKERS="2", STEPS="60", PYTHONPATH=str(ROOT), XLA_FLAGS="--xla_backend_optimization_level=0")
    assert re.search(r'"event": "death".*"code": -9', said)
    assert recipes.steps("elastic") == list(range(61))


def test_every_recipe_is_run_here_and_is_sound():
    text = Path(__file__).read_text()
    assert [name for name in RECIPES if name != "places.sh" and f'"{name}"' not in text] == []
    found = subprocess.run([program("shellcheck"), "-x", "-P", "SCRIPTDIR", *RECIPES], cwd=ROOT / "end_to_end",
                           text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stdout
