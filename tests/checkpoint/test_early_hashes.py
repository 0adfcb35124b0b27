"""Files are hashed while others are being written; a hash counts only of a file that has not changed since."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint import arrays, early_hashes, manifest
from maxtext.checkpoint.early_hashes import EarlyHashes, stamp
from maxtext.checkpoint.manager import Checkpoints
from tests.checkpoint.states import P, config, found, host_bits, make_mesh

NAME = "arrays-1/d/large"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One large file of a step that is being written."""
    path = tmp_path / "step_00000001" / "arrays-1" / "d" / "large"
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(2 << 20))
    return path


@pytest.fixture
def early(file: Path) -> Iterator[EarlyHashes]:
    hashes = EarlyHashes(str(file.parents[2]), "arrays-1")
    yield hashes
    hashes.stop()


def hashed(early: EarlyHashes, path: Path) -> str:
    """Waits until the file has been hashed as it is."""
    end = time.monotonic() + 60
    while (digest := early.of(stamp(os.stat(path)))) is None:
        assert time.monotonic() < end, f"{path} was not hashed"
        time.sleep(0.01)
    return digest


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_is_left_alone_is_hashed(file: Path, early: EarlyHashes):
    assert hashed(early, file) == sha256(file)


def test_its_hash_is_taken_and_not_made_again(file: Path, early: EarlyHashes):
    """Told by a file whose bytes changed without a trace: the hash is that of what was written."""
    before, stat = hashed(early, file), os.stat(file)
    with open(file, "r+b") as open_file:
        open_file.write(b"rot")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    records = manifest.record_files(str(file.parents[2]), "arrays-1", early)
    assert records == {NAME: manifest.FileRecord(2 << 20, before)}
    assert before != sha256(file)


def rewritten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(1 << 20)
        file.write(b"changed")


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """By a file of the same size and time."""
    stat, other = os.stat(path), path.with_name("other")
    other.write_bytes(bytes(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("change", [rewritten, grown, replaced], ids=lambda change: change.__name__)
def test_a_file_that_changed_is_hashed_again(file: Path, early: EarlyHashes, change):
    hashed(early, file)
    early.stop()
    change(file)
    records = manifest.record_files(str(file.parents[2]), "arrays-1", early)
    assert records == {NAME: manifest.FileRecord(os.path.getsize(file), sha256(file))}


def test_a_renamed_directory_keeps_its_hashes(tmp_path: Path):
    """Orbax writes to arrays-1.orbax-checkpoint-tmp and renames that last."""
    step_dir = tmp_path / "step_00000001"
    written = step_dir / "arrays-1.orbax-checkpoint-tmp" / "large"
    written.parent.mkdir(parents=True)
    written.write_bytes(os.urandom(2 << 20))
    early = EarlyHashes(str(step_dir), "arrays-1")
    digest = hashed(early, written)
    early.stop()
    written.parent.rename(step_dir / "arrays-1")
    assert early.of(stamp(os.stat(step_dir / "arrays-1" / "large"))) == digest


def test_a_file_that_cannot_be_read_is_left_to_the_one_who_asks(file: Path, early: EarlyHashes, monkeypatch):
    def fail(path: str) -> str:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(early_hashes, "sha256", fail)
    end = time.monotonic() + 60
    at = stamp(os.stat(file))
    while at not in early._hashes and time.monotonic() < end:
        time.sleep(0.01)
    assert early.of(at) is None
    assert manifest.record_files(str(file.parents[2]), "arrays-1", early)[NAME].sha256 == sha256(file)


def test_a_save_hashes_several_data_files_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The files of a save are so small that some are done while others are written, and are hashed by then."""
    monkeypatch.setattr(arrays, "_FILE_BYTES", 2 << 20)
    record_files, early_of = manifest.record_files, []

    def record(step_dir: str, name: str, early: EarlyHashes | None = None) -> dict[str, manifest.FileRecord]:
        assert early is not None
        large = [path for path in Path(step_dir).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
        early_of.append({str(path.relative_to(step_dir)): hashed(early, path) for path in large})
        return record_files(step_dir, name, early)

    monkeypatch.setattr(manifest, "record_files", record)
    mesh = make_mesh(8)
    place = jax.sharding.NamedSharding(mesh, P("fsdp"))
    state = {name: jax.device_put(np.random.default_rng(seed).random((8, 256 << 10), np.float32), place)
             for seed, name in enumerate("ab")}
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    checkpoints.save(1, state, {})
    checkpoints.close()
    saved = manifest.read(str(tmp_path / "step_00000001"))
    assert len(early_of[0]) >= 4, "16 MiB in files of about 2 MiB"
    assert early_of[0].items() <= {name: record.sha256 for name, record in saved.files.items()}.items()
    reader = Checkpoints(str(tmp_path), config(), writer=False)
    one = jax.sharding.NamedSharding(make_mesh(1), P())
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in state.items()}
    assert host_bits(found(reader.restore(wanted)).state) == host_bits(state)
    reader.close()
