"""The format on disk, without jax: which directories are checkpoints, and whether their bytes are those saved.

    <directory>/step_00000100/manifest.json         the commit: written last and renamed into place
                              arrays-1/...          what Orbax wrote; the manifest names the directory that counts
                              manifest.json.tmp     only while a save is under way, or after one was killed
                              manifest.json.t7.tmp  the manifest of token 7 (lease.py), about to be renamed
    <directory>/step_00000100.bad-1/                failed its checks; kept for people, never restored
    <directory>/step_00000300.superseded-1/         later than a step that was saved after a rewind
    <directory>/step_00000100.deleted.tmp/          being deleted

Saving a step again writes arrays-2 and replaces the manifest in one rename, so a reader sees the old or the new one.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from maxtext.checkpoint import lease
from maxtext.checkpoint.early_hashes import EarlyHashes, sha256, stamp

FORMAT = 1
NAME = "manifest.json"
MARKER = "manifest.json.tmp"
STEP_DIR = re.compile(r"step_(\d{8,})")
ASIDE_DIR = re.compile(r"step_(\d{8,})\.(bad|superseded)-\d+")
DELETED_DIR = re.compile(r"step_\d{8,}\.deleted\.tmp")
ARRAYS_DIR = re.compile(r"arrays-(\d+)(-t\d+)?(\.orbax.*)?")
STAGED = re.compile(r"manifest\.json\.t\d+\.tmp")
_HASH_THREADS = 4

Status = Literal["good", "damaged", "partial", "unfinished", "bad", "superseded", "stale", "deleted", "foreign"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or restored; the message names the path, the reason and the next step."""


class Damaged(Exception):
    """A step on disk is not what was saved; the text says which file or leaf and how."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: its shape, dtype, fingerprint (integrity.py) and how many elements were NaN or infinite."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: tuple[int, int]
    nonfinite: int = 0
    key_impl: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that is known about one saved step. `files` are relative to the step's directory.

    `provenance` says what made it: mesh, devices, processes, SHA-256 of the config, compiler flags. `token` is that of
    the lease under which it was written, 0 without one.
    """

    step: int
    arrays: str
    leaves: dict[str, Leaf]
    files: dict[str, FileRecord]
    extra: Any
    config_text: str
    versions: dict[str, str]
    saved_at: str
    token: int = 0
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Tells this save from every other one of the same step."""
        return f"{self.token} {self.arrays} {self.saved_at}"

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name in a directory of checkpoints and what it is; `reason` says why it does not count."""

    name: str
    step: int | None
    status: Status
    reason: str = ""
    manifest: Manifest | None = None


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def dumps(manifest: Manifest) -> str:
    """The text of a manifest; it carries its own SHA-256, so that a flipped digit is noticed."""
    body = {"format": FORMAT, **dataclasses.asdict(manifest)}
    return json.dumps({"sha256": _digest(body), "body": body}, indent=1)


def loads(text: str | bytes) -> Manifest:
    """The inverse of `dumps`; Damaged when the text is not one, CheckpointError when a newer version wrote it."""
    try:
        document = json.loads(text)
        body = document["body"]
        intact = _digest(body) == document["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{NAME} is not readable JSON of a manifest") from None
    if not intact:
        raise Damaged(f"{NAME} does not match its own sha256")
    if (version := body.pop("format")) != FORMAT:
        raise CheckpointError(f"{NAME} has format {version}, this version reads format {FORMAT}; use a newer maxtext")
    body["leaves"] = {
        name: Leaf(**leaf | {"shape": tuple(leaf["shape"]), "fingerprint": tuple(leaf["fingerprint"])})
        for name, leaf in body["leaves"].items()
    }
    body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
    return Manifest(**body)


def read(step_dir: str) -> Manifest:
    """The manifest of a step's directory; Damaged when it is not one of this very step."""
    with open(os.path.join(step_dir, NAME), "rb") as file:
        manifest = loads(file.read())
    if os.path.basename(step_dir) != step_name(manifest.step):
        raise Damaged(f"{NAME} is of step {manifest.step}, not of this directory")
    return manifest


def stage(step_dir: str, manifest: Manifest) -> None:
    """Write the manifest beside its final name and force it to disk. `commit` then makes the step count."""
    with open(_staged(step_dir, manifest.token), "w", encoding="utf-8") as file:
        file.write(dumps(manifest))
        file.flush()
        os.fsync(file.fileno())


def commit(step_dir: str, token: int = 0) -> None:
    """Rename the manifest that `stage` wrote into place, durably."""
    os.replace(_staged(step_dir, token), os.path.join(step_dir, NAME))
    sync_dir(step_dir)
    sync_dir(os.path.dirname(step_dir))
    with contextlib.suppress(FileNotFoundError):  # removed after the sync: a marker does no harm beside a manifest
        os.remove(os.path.join(step_dir, MARKER))


def _staged(step_dir: str, token: int) -> str:
    """Of each token another name, so that a writer which lost its lease cannot slip its text under another's commit."""
    return os.path.join(step_dir, f"{NAME}.t{token}.tmp")


def sync_dir(path: str) -> None:
    """Force a directory's names to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """`[function(item) for item in items]` over a few threads; the first error is raised after all have ended.

    Not an executor: those refuse work once the main thread has ended, and a last save may still be under way then.
    """
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    queue = iter(enumerate(items))
    lock = threading.Lock()

    def worker() -> None:
        while not errors:
            with lock:
                index, item = next(queue, (-1, None))
            if index < 0:
                return
            try:
                results[index] = function(item)  # type: ignore[arg-type]
            except Exception as error:
                errors[index] = error

    pool = [threading.Thread(target=worker, daemon=True) for _ in range(min(threads, len(items)))]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]


def record_files(step_dir: str, arrays: str, early: EarlyHashes | None = None) -> dict[str, FileRecord]:
    """Hash every file that Orbax wrote and force files and directories to disk (Orbax does not sync all of them).

    Of a file that has not changed since `early` hashed it that hash is taken.
    """
    names, dirs = [], []
    for folder, _, files in os.walk(os.path.join(step_dir, arrays)):
        dirs.append(folder)
        names += [os.path.relpath(os.path.join(folder, name), step_dir) for name in files]
    names.sort()

    def record(name: str) -> FileRecord:
        with open(os.path.join(step_dir, name), "rb") as file:
            stat = os.fstat(file.fileno())
            digest = early.of(stamp(stat)) if early else None
            digest = digest or hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # who reads it next reads the disk, and not what the system remembers
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return FileRecord(stat.st_size, digest)

    records = in_threads(record, names, _HASH_THREADS)
    for folder in reversed(dirs):
        sync_dir(folder)
    return dict(zip(names, records, strict=True))


def check_sizes(step_dir: str, manifest: Manifest) -> None:
    """Damaged unless every file of the manifest is there with its size; cheap enough for every listing."""
    for name, record in manifest.files.items():
        try:
            size = os.stat(os.path.join(step_dir, name)).st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None
        if size != record.size:
            raise Damaged(f"{name} has {size} bytes, {record.size} were saved")


def check_files(step_dir: str, manifest: Manifest, share: slice = slice(None)) -> None:
    """Damaged unless the files of the manifest have their size and SHA-256. `share` picks one process's part."""
    check_sizes(step_dir, manifest)

    def check(name: str) -> None:
        try:
            digest = sha256(os.path.join(step_dir, name))
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None
        if digest != manifest.files[name].sha256:
            raise Damaged(
                f"{name} has changed since it was saved (sha256 {digest[:12]}..., not "
                f"{manifest.files[name].sha256[:12]}...)"
            )

    in_threads(check, sorted(manifest.files)[share], _HASH_THREADS)


def scan(directory: str) -> list[Entry]:
    """What every name in a directory of checkpoints is, by step. Only entries of status good count.

    The lease beside the directory decides which manifests were written by somebody who had lost it.
    """
    fence = lease.fence_of(os.path.dirname(os.path.abspath(directory)))
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoints in {directory}: {error.strerror}") from None
    entries = [entry for name in names if (entry := _classify(directory, name, fence)) is not None]
    return sorted(entries, key=lambda entry: (-1 if entry.step is None else entry.step, entry.name))


def _classify(directory: str, name: str, fence: lease.Fence) -> Entry | None:
    """One name's entry; None when it vanished meanwhile (a save in the background deletes old steps)."""
    path = os.path.join(directory, name)
    if DELETED_DIR.fullmatch(name):
        return Entry(name, None, "deleted", "was being deleted")
    if aside := ASIDE_DIR.fullmatch(name):
        status: Status = "bad" if aside[2] == "bad" else "superseded"
        return Entry(name, int(aside[1]), status, "set aside")
    match = STEP_DIR.fullmatch(name)
    if not match or not os.path.isdir(path):
        return Entry(name, None, "foreign", "not the name of a checkpoint")
    step = int(match[1])
    # Twice, because a save in the background may replace or delete this very step between the two reads.
    for last in (False, True):
        try:
            manifest = read(path)
            if refusal := fence.refusal(name, manifest.token, manifest.identity):
                return Entry(name, step, "stale", refusal)
            check_sizes(path, manifest)
            return Entry(name, step, "good", manifest=manifest)
        except Damaged as damage:
            if last:
                return Entry(name, step, "damaged", str(damage)) if os.path.isdir(path) else None
        except FileNotFoundError:
            break
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {os.path.join(path, NAME)}: {error.strerror}") from None
    try:
        inside = os.listdir(path)
    except FileNotFoundError:
        return None
    if MARKER in inside:
        return Entry(name, step, "unfinished", "a save that did not end")
    if any(ARRAYS_DIR.fullmatch(item) for item in inside):
        return Entry(name, step, "partial", f"holds arrays but no {NAME}; a copy that did not end?")
    return Entry(name, step, "foreign", f"holds no {NAME}")


def leftovers(step_dir: str, keep: str | None) -> list[str]:
    """Paths in a step's directory that earlier attempts left; `keep` is the arrays directory that counts.

    The marker comes last, so that a removal that is killed half-way can be taken up again.
    """
    names = os.listdir(step_dir)
    arrays = [name for name in names if (ARRAYS_DIR.fullmatch(name) and name != keep) or STAGED.fullmatch(name)]
    return [os.path.join(step_dir, name) for name in (*arrays, *({MARKER} & {*names}))]


def next_attempt(step_dir: str) -> int:
    """One more than the number of any arrays directory that stands there already."""
    used = [int(match[1]) for name in os.listdir(step_dir) if (match := ARRAYS_DIR.fullmatch(name))]
    return max(used, default=0) + 1


def arrays_name(attempt: int, token: int = 0) -> str:
    return f"arrays-{attempt}-t{token}" if token else f"arrays-{attempt}"


def counted(directory: str) -> dict[str, str]:
    """`Manifest.identity` of every step that counts, by directory name."""
    return {entry.name: entry.manifest.identity for entry in scan(directory)
            if entry.status == "good" and entry.manifest is not None}


def kept(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> set[int]:
    """The steps that the policy keeps: the newest `keep_last` (all when None) and multiples of `keep_every`."""
    newest = set(steps) if keep_last is None else set(sorted(steps)[-keep_last:])
    return newest | {step for step in steps if keep_every and step % keep_every == 0}


def plain_json(extra: Any) -> Any:
    """`extra` as it will be read back; CheckpointError when JSON cannot hold it."""
    try:
        if not isinstance(extra, dict):
            raise TypeError(f"it is a {type(extra).__name__}, not a dict")
        _refuse_other_keys(extra)
        return json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the extra of a checkpoint must be plain JSON: {error}") from None


def _refuse_other_keys(value: Any) -> None:
    """TypeError for a key that JSON would silently turn into a string."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is a {type(key).__name__}, not a str")
            _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item)
