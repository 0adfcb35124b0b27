"""`maxtext checkpoint ls | verify`."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
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
    assert run(["ls", str(run_dir)]) == 1
    stray, first, second = capsys.readouterr().out.splitlines()
    assert stray.split()[0] == "40"
    assert "foreign: not the name of a checkpoint" in stray
    assert first.startswith("step_00000001")
    assert "damaged: manifest.json" in first
    saved_at = json.loads((run_dir / "checkpoints/step_00000002/manifest.json").read_text())["body"]["saved_at"]
    assert second.split()[:2] == ["step_00000002", saved_at]
    assert "KiB  good; NaN or infinite values in bad" in second
    shutil.rmtree(run_dir / "checkpoints" / "step_00000001")
    assert run(["ls", str(run_dir)]) == 0
    shutil.rmtree(run_dir / "checkpoints" / "step_00000002")
    capsys.readouterr()
    assert run(["ls", str(run_dir)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err  # what else lies there is none


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
    for name, fault, code in (("none", "does not exist", 2), ("file", "is a file, not a folder", 2)):
        for verb in ("ls", "verify", "scrub"):
            assert run([verb, str(tmp_path / name)]) == code
            assert capsys.readouterr().err == f"{tmp_path / name} {fault}; {what_to_give}\n"
    assert run(["ls", str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'empty'} holds no checkpoint; {what_to_give}\n"
    assert run(["verify", str(tmp_path / "empty")]) == 1
    assert "no such checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run(["remove", str(tmp_path)])
    assert caught.value.code == 2


def test_scrub_sets_bad_steps_aside(run_dir: Path, capsys: pytest.CaptureFixture):
    step_dir = run_dir / "checkpoints" / "step_00000002"
    flip(max((path for path in step_dir.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    (run_dir / "checkpoints" / "step_00000003" / "arrays-1").mkdir(parents=True)
    assert run(["scrub", str(run_dir)]) == 1
    good, bad, partial = capsys.readouterr().out.splitlines()
    assert good.startswith("step_00000001  good")
    assert bad.endswith("; set aside as step_00000002.bad-1")
    assert partial.endswith("; left in place, because it may be a copy or a save under way")
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {
        "step_00000001", "step_00000002.bad-1", "step_00000003"}
    assert run(["verify", str(run_dir), "--step", "1"]) == 0


def test_diff(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert run(["diff", f"{run_dir}@1", f"{run_dir}@1"]) == 0
    assert capsys.readouterr().out == "the same: 4 arrays, bit for bit\n"
    other = Checkpoints(str(tmp_path / "other"), config(asynchronous=False), config_text="lr: 1  # default\n")
    other.save(2, {"w": jnp.arange(5000, dtype=jnp.bfloat16) + 1, "key": jnp.zeros(3), "scalar": jnp.float32(1)},
               {"data": {"step": 7}})
    other.save(3, {"scalar": jnp.float32(3)}, {})
    other.close()
    assert run(["diff", str(run_dir), f"{tmp_path / 'other'}@2"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "bad: only in the first (float32[2])" in out
    w = next(line for line in out if line.startswith("w: "))
    first, second = (np.arange(5000).astype(jnp.bfloat16) + jnp.bfloat16(n) for n in (2, 1))
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64))
    assert w == f"w: bfloat16[5000], {np.count_nonzero(gap):,} of 5,000 elements differ, by at most {gap.max():.3g}"
    assert "scalar: only in the second (float32[])" in out
    assert "extra data.step: None and 7" in out
    assert "config: + lr: 1" in out
    assert run(["diff", f"{tmp_path / 'other'}@2", f"{tmp_path / 'other'}@3"]) == 1
    assert "scalar: float32[], 1 of 1 elements differ, by at most 2" in capsys.readouterr().out
    assert run(["diff", f"{run_dir}@9", str(run_dir)]) == 2
    assert "holds no good step 9; good steps are [1, 2]" in capsys.readouterr().err
