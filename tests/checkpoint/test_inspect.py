"""`maxtext checkpoint ls | verify`."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxtext.checkpoint.inspect import run
from maxtext.checkpoint.manager import Checkpoints
from tests.checkpoint.states import config
from tests.checkpoint.test_damage import flip, rehash


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with steps 1 and 2."""
    run_dir = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(str(run_dir / "checkpoints"), config(asynchronous=False))
    for step in (1, 2):
        state = {"w": jnp.arange(5000, dtype=jnp.bfloat16) + step, "key": jax.random.key(step), "none": jnp.zeros((0,)),
                 "bad": jnp.array([step, jnp.inf if step == 2 else 0])}
        checkpoints.save(step, state, {})
    checkpoints.close()
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_ls(run_dir: Path, capsys: pytest.CaptureFixture):
    flip(run_dir / "checkpoints" / "step_00000001" / "manifest.json")
    (run_dir / "checkpoints" / "40").mkdir()
    assert run(["ls", str(run_dir)]) == 0
    stray, first, second = capsys.readouterr().out.splitlines()
    assert stray.split()[0] == "40"
    assert "foreign: not the name of a checkpoint" in stray
    assert first.startswith("step_00000001")
    assert "damaged: manifest.json" in first
    saved_at = json.loads((run_dir / "checkpoints/step_00000002/manifest.json").read_text())["body"]["saved_at"]
    assert second.split()[:2] == ["step_00000002", saved_at]
    assert "KiB  good; NaN or infinite values in bad" in second


def test_verify_good(run_dir: Path, capsys: pytest.CaptureFixture):
    assert run(["verify", str(run_dir / "checkpoints")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in out] == ["step_00000001  good", "step_00000002  good"]
    assert out[0].endswith(" files, 4 leaves")


def test_verify_names_the_file_and_the_leaf(run_dir: Path, capsys: pytest.CaptureFixture):
    files = {}
    for step in (1, 2):
        step_dir = run_dir / "checkpoints" / f"step_0000000{step}"
        largest = max((path for path in step_dir.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        files[step] = str(largest.relative_to(step_dir))
        flip(largest)
    rehash(run_dir / "checkpoints" / "step_00000002", files[2])
    assert run(["verify", str(run_dir)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step_00000001  BAD: {files[1]} has changed since it was saved")
    assert second == "step_00000002  BAD: leaf w does not have the fingerprint that it was saved with"
    assert run(["verify", str(run_dir), "--step", "2"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_nothing_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    what_to_give = "give the folder of a run, <output_dir>/<run_name>, or its checkpoints folder"
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, fault, code in (("none", "does not exist", 2), ("file", "is no folder", 2)):
        for verb in ("ls", "verify"):
            assert run([verb, str(tmp_path / name)]) == code
            assert capsys.readouterr().err == f"error: {tmp_path / name} {fault}; {what_to_give}\n"
    assert run(["ls", str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err == f"no checkpoints in {tmp_path / 'empty'}; {what_to_give}\n"
    assert run(["verify", str(tmp_path / "empty")]) == 1
    assert "no such checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run(["remove", str(tmp_path)])
    assert caught.value.code == 2
