"""What is damaged on disk is noticed, named, set aside, and the newest good step is used instead."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint import manifest
from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from tests.checkpoint.states import abstract, config, found, host_bits, make_mesh, make_state

MESH = (4, 2)
GOOD, BAD = "step_00000010", "step_00000020"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20, saved with seeds 10 and 20."""
    directory = tmp_path_factory.mktemp("pristine")
    checkpoints = Checkpoints(str(directory), config(asynchronous=False))
    for step in (10, 20):
        checkpoints.save(step, make_state(make_mesh(*MESH), seed=step), {"step": step})
    checkpoints.close()
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def restore(directory: Path, *, writer: bool = True) -> int | None:
    """The step that a start would continue from, its arrays compared bit for bit with those of its seed."""
    checkpoints = Checkpoints(str(directory), config(), writer=writer)
    try:
        restored = checkpoints.restore(abstract(make_mesh(*MESH)))
        if restored is None:
            return None
        assert restored.extra == {"step": restored.step}
        assert host_bits(restored.state) == host_bits(make_state(make_mesh(*MESH), seed=restored.step))
        return restored.step
    finally:
        checkpoints.close()


def flip(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero_a_page(path: Path) -> None:
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + bytes(min(4096, len(data) - half)) + data[half + 4096 :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [flip, truncate, zero_a_page, empty, os.remove]


def test_every_damage_to_every_file_is_found_and_named(directory: Path):
    step_dir = directory / BAD
    saved = manifest.read(str(step_dir))
    kinds = {Path(name).name if "/d/" not in name else "data" for name in saved.files}
    assert {"data", "manifest.ocdbt", "_METADATA", "_sharding", "process_0"} <= kinds
    for name in saved.files:
        original = (step_dir / name).read_bytes()
        for damage in (*DAMAGES, lambda path: flip(path, 0), lambda path: flip(path, 1)):
            damage(step_dir / name)
            if not (step_dir / name).exists() or (step_dir / name).read_bytes() != original:
                with pytest.raises(manifest.Damaged, match=f"^{name} "):
                    manifest.check_files(str(step_dir), saved)
            (step_dir / name).write_bytes(original)
    manifest.check_files(str(step_dir), saved)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["largest", "manifest.ocdbt", "_METADATA", "manifest.json"])
def test_a_damaged_newest_step_is_set_aside(directory: Path, caplog: pytest.LogCaptureFixture,
                                            damage: Callable[[Path], None], kind: str):
    files = [path for path in (directory / BAD).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    target = largest if kind == "largest" else next(path for path in files if path.name == kind)
    damage(target)
    assert restore(directory) == 10
    if kind == "manifest.json" and damage is os.remove:
        assert f"ignored {directory / BAD}: holds arrays but no manifest.json" in caplog.text
        assert (directory / BAD).is_dir(), "it may be a copy under way: it is left alone"
        return
    warning = next(r.getMessage() for r in caplog.records if "is bad and was not used" in r.getMessage())
    assert str(directory / BAD) in warning
    assert target.name in warning
    assert "renamed to step_00000020.bad-1, trying the one before" in warning
    assert sorted(os.listdir(directory)) == [GOOD, f"{BAD}.bad-1"]
    caplog.clear()
    assert restore(directory) == 10
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == [], "said once, not at every start"


def test_random_bits_of_a_step_never_restore_wrong(directory: Path):
    """Each flip is either noticed, or the state is right all the same; never a third."""
    rng = np.random.default_rng(7)
    files = sorted(path for path in (directory / BAD).rglob("*") if path.is_file())
    weights = np.array([path.stat().st_size for path in files], float)
    for trial in range(6):
        copy = directory.parent / f"trial{trial}"
        shutil.copytree(directory, copy)
        flip(copy / files[rng.choice(len(files), p=weights / weights.sum())].relative_to(directory), rng.random())
        assert restore(copy) == 10


def test_arrays_that_were_wrong_when_they_were_hashed(directory: Path, caplog: pytest.LogCaptureFixture):
    """Memory that went bad between device and disk: the files match their hashes, the fingerprint does not match."""
    step_dir = directory / BAD
    saved = manifest.read(str(step_dir))
    name = max(saved.files, key=lambda name: saved.files[name].size)
    flip(step_dir / name, 0.6)
    rehash(step_dir, name)
    manifest.check_files(str(step_dir), manifest.read(str(step_dir)))
    assert restore(directory) == 10
    assert "does not have the fingerprint that it was saved with" in caplog.text
    assert (directory / f"{BAD}.bad-1").is_dir()


@pytest.mark.parametrize(("part", "word"), [
    ("arrays-1/manifest.ocdbt", "DATA_LOSS"), ("arrays-1/_METADATA", "Expecting value")])
def test_files_that_hold_no_arrays_although_they_are_as_hashed(directory: Path, part: str, word: str,
                                                               caplog: pytest.LogCaptureFixture):
    """What tells where the arrays lie was wrong when it was hashed: the step is set aside like any other bad one."""
    step_dir = directory / BAD
    flip(step_dir / part, 0)
    rehash(step_dir, part)
    assert restore(directory) == 10
    assert "its files are as they were hashed, but hold no arrays: " in caplog.text
    assert word in caplog.text
    assert (directory / f"{BAD}.bad-1").is_dir()


def test_a_read_that_the_machine_fails_leaves_the_step_alone(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*args: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("maxtext.checkpoint.arrays.Orbax.read", fails)
    with pytest.raises(CheckpointError, match="is intact but could not be read: RESOURCE_EXHAUSTED"):
        restore(directory)
    assert (directory / BAD).is_dir()


def rehash(step_dir: Path, name: str) -> None:
    """Make the manifest agree with a changed file."""
    document = json.loads((step_dir / "manifest.json").read_text())
    data = (step_dir / name).read_bytes()
    document["body"]["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    body = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (step_dir / "manifest.json").write_text(json.dumps(document))


def test_a_changed_manifest_is_noticed(directory: Path, caplog: pytest.LogCaptureFixture):
    path = directory / BAD / "manifest.json"
    path.write_text(path.read_text().replace('"step": 20', '"step": 21'))
    assert restore(directory) == 10
    assert "manifest.json does not match its own sha256" in caplog.text


def test_a_renamed_step_does_not_count(directory: Path, caplog: pytest.LogCaptureFixture):
    (directory / BAD).rename(directory / "step_00000030")
    assert restore(directory) == 10
    assert "manifest.json is of step 20, not of this directory" in caplog.text


def test_a_newer_format_is_refused_and_left_alone(directory: Path):
    path = directory / BAD / "manifest.json"
    document = json.loads(path.read_text())
    document["body"]["format"] = 2
    body = json.dumps(document["body"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"body": document["body"], "sha256": hashlib.sha256(body.encode()).hexdigest()}))
    with pytest.raises(CheckpointError, match=r"step_00000020: manifest.json has format 2, this version reads"):
        Checkpoints(str(directory), config())
    assert (directory / BAD).is_dir()


def test_when_every_step_is_bad_nothing_starts_from_scratch(directory: Path):
    for name in (GOOD, BAD):
        flip(max((directory / name).rglob("*"), key=lambda path: path.stat().st_size))
    for _ in range(2):  # at the next start too, when all are set aside already
        with pytest.raises(CheckpointError) as caught:
            restore(directory)
        assert str(caught.value).startswith(f"no good checkpoint is left in {directory}: ")
        assert f"{GOOD}.bad-1" in str(caught.value)
        assert f"{BAD}.bad-1" in str(caught.value)
        assert "set checkpoint.allow_fresh=true (or another run_name) to start from scratch" in str(caught.value)


def test_a_second_bad_copy_gets_the_next_number(directory: Path, pristine: Path):
    for _ in range(2):
        flip(directory / BAD / "manifest.json")
        assert restore(directory) == 10
        shutil.copytree(pristine / BAD, directory / BAD)
    assert sorted(os.listdir(directory)) == [GOOD, BAD, f"{BAD}.bad-1", f"{BAD}.bad-2"]
    assert restore(directory) == 20


@pytest.mark.parametrize("damage", [truncate, flip])
def test_an_asked_step_that_is_bad_is_an_error_and_stays(directory: Path, damage: Callable[[Path], None]):
    damage(max((directory / BAD).rglob("*"), key=lambda path: path.stat().st_size))
    checkpoints = Checkpoints(str(directory), config())
    with pytest.raises(CheckpointError, match=r"step 20 in .* is bad: arrays-1/.* saved.*; good .* are \[10\]"):
        checkpoints.restore(abstract(make_mesh(*MESH)), 20)
    assert sorted(os.listdir(directory)) == [GOOD, BAD]
    checkpoints.close()


def test_a_reader_falls_back_without_touching_anything(directory: Path, caplog: pytest.LogCaptureFixture):
    flip(directory / BAD / "manifest.json")
    assert restore(directory, writer=False) == 10
    assert "left in place, trying the one before" in caplog.text
    assert sorted(os.listdir(directory)) == [GOOD, BAD]


def test_stray_names_are_ignored_and_named_once(directory: Path, caplog: pytest.LogCaptureFixture):
    (directory / "40").mkdir()
    (directory / "step_00000040").mkdir()
    (directory / "notes.txt").write_text("keep")
    (directory / "step_00000050").write_text("a file")
    shutil.copytree(directory / BAD, directory / "step_20_copy")
    shutil.copytree(directory / BAD / "arrays-1", directory / "step_00000060" / "arrays-1")
    before = sorted(os.listdir(directory))
    checkpoints = Checkpoints(str(directory), config())
    for _ in range(2):
        assert checkpoints.steps() == [10, 20]
        assert found(checkpoints.restore(abstract(make_mesh(*MESH)))).step == 20
    checkpoints.close()
    assert caplog.text.count(f"ignored {directory / 'step_00000060'}: ") == 1
    names = "40, notes.txt, step_00000050, step_20_copy, step_00000040"
    assert caplog.text.count(f"ignored what is no checkpoint in {directory}: {names}\n") == 1
    assert sorted(os.listdir(directory)) == before


def test_a_copy_that_lacks_files_does_not_count(directory: Path):
    shutil.copytree(directory / BAD, directory / "step_00000020.partial")
    (directory / BAD / "arrays-1" / "manifest.ocdbt").unlink()
    checkpoints = Checkpoints(str(directory), config(), writer=False)
    assert checkpoints.steps() == [10]
    checkpoints.close()


def test_strays_alone_are_a_fresh_start_but_arrays_are_not(tmp_path: Path, pristine: Path):
    (tmp_path / "40").mkdir()
    (tmp_path / "step_00000040").mkdir()
    assert restore(tmp_path) is None
    shutil.copytree(pristine / BAD / "arrays-1", tmp_path / BAD / "arrays-1")
    with pytest.raises(CheckpointError, match=r"step_00000020 \(holds arrays but no manifest.json"):
        restore(tmp_path)


def test_a_missing_leaf_in_a_good_step_is_no_damage(directory: Path):
    checkpoints = Checkpoints(str(directory), config())
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), np.float32)})
    assert checkpoints.steps() == [10, 20]
    checkpoints.close()
