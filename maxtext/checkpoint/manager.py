"""Save training states. Orbax writes the arrays; our manifest, written last, makes a step count.

Orbax's CheckpointManager is not used: it lists any directory with a number for a name, forgets steps after a failed
save, skips a step that exists already and checks no stored byte. See `manifest` for the layout on disk.
"""

import concurrent.futures.thread
import contextlib
import dataclasses
import glob
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from maxtext.checkpoint import arrays, integrity, manifest, streamed, upkeep
from maxtext.checkpoint.early_hashes import EarlyHashes
from maxtext.checkpoint.lease import Lease
from maxtext.checkpoint.manifest import CheckpointError, Damaged, Leaf, Manifest
from maxtext.checkpoint.processes import from_process_0
from maxtext.checkpoint.provenance import provenance, versions
from maxtext.checkpoint.restoring import Restored, SavedSteps
from maxtext.config.reason import placed
from maxtext.config.schema import CheckpointConfig

__all__ = ["CheckpointError", "Checkpoints", "Restored"]

PyTree = Any
log = logging.getLogger("maxtext.checkpoint")
_RETRY_SECONDS = (5.0, 600.0)  # after a first failed save; doubled with each further one up to the second


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save under way."""

    step: int
    step_dir: str
    leaves: dict[str, Leaf]
    sums: dict[str, Any]
    extra: Any
    provenance: dict[str, Any]
    arrays: str = ""


class Checkpoints(SavedSteps):
    """The checkpoints in one directory: what is there is read by the base class, and more are saved.

    Args:
      directory: a local or mounted path; it need not exist yet.
      cfg: which steps are kept, and whether saves run in the background.
      config_text: the resolved config as text; it is stored with every step.
      writer: False for a reader (evaluation, conversion): nothing on disk is created, renamed or removed.
      lease: held on the folder above; a save after it was lost fails, and its token goes into every manifest.

    Close it in a `finally` (or use contextlib.closing). A program that ends without, while a save is under way, waits
    for it too, except on early Python 3.12, where no thread can start by then and the save is lost with an error.
    A writer removes what killed saves left behind when it is made. Only one writer may use a directory at a time.
    In a job of several processes all of them make the same calls; process 0 alone renames, deletes and commits.
    Raises CheckpointError when the directory cannot be used.
    """

    def __init__(self, directory: str, cfg: CheckpointConfig, *, config_text: str = "", writer: bool = True,
                 lease: Lease | None = None) -> None:
        super().__init__(directory, cfg, writer)
        self._config_text, self._lease = config_text, lease
        self._saving: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._failures, self._failed_at, self._good_at = 0, 0.0, time.monotonic()
        self._abandoned = False
        # Python's public hooks run too late for a last save: the executors that Orbax needs have stopped by then. This
        # one runs before they stop, because hooks run last in, first out and theirs stands already.
        assert concurrent.futures.thread
        threading._register_atexit(_join_at_exit, weakref.ref(self))  # type: ignore[attr-defined]
        if writer and jax.process_index() == 0:
            self._prepare()

    # ---- saving

    def save(self, step: int, state: PyTree, extra: dict[str, Any]) -> None:
        """Save `state` (jax arrays) and `extra` (plain JSON) as `step`; in the background when so configured.

        After it returns the caller may donate the arrays: what the background still reads is either on the host
        already or held by a view, and JAX then leaves a held buffer alone and puts the output elsewhere. A save waits
        for the one before it. Saving an existing step again replaces it in one rename. Saving below existing steps
        (after a rewind) sets the later ones aside as `.superseded-N`, so that nobody resumes the abandoned branch.

        A failure to write is logged as an error at once, leaves all earlier steps as they are, and is raised by
        `wait()` (a synchronous save raises it itself); `failure` has it too, and the next save tries anew.
        CheckpointError at once for a state or extra that can never be saved.
        """
        if not self._writer:
            raise CheckpointError(f"{self.directory} was opened for reading; open it with writer=True to save")
        step, extra = _natural(step), manifest.plain_json(extra)
        leaves, to_write = arrays.describe(state)
        # Dispatched before anybody can donate: the sums are of exactly the arrays that Orbax is given.
        sums, origin = integrity.tree_sums(state), provenance(state, self._config_text)
        job = _Save(step, self._path(manifest.step_name(step)), leaves, sums, extra, origin)
        self.join()
        self._failure, self._saving_step = None, step
        try:
            attempt = from_process_0(lambda: _begin(job.step_dir))
            job = dataclasses.replace(job, arrays=manifest.arrays_name(attempt, from_process_0(self._token)))
            self._orbax.start(os.path.join(job.step_dir, job.arrays), to_write)
        except Exception as error:
            self._failed(job, error)
        else:
            self._saving = threading.Thread(target=self._finish, args=(job,), name=f"checkpoint {step}")
            self._saving.start()
        if not self._cfg.asynchronous:
            self.wait()

    def save_streamed(self, step: int, leaves: dict[str, streamed.StreamedLeaf],
                      pieces: Iterable[tuple[str, int | None, np.ndarray]], extra: dict[str, Any]) -> None:
        """Save a state whose leaves come piece by piece from the host, so that no whole state is ever in memory.

        Args:
          leaves: every leaf by its dotted name.
          pieces: (leaf, row of its first dim or None for the whole leaf, array); each exactly once, in any order.

        Waits until the step is committed; of one process only. Raises CheckpointError as `wait` does, and what `pieces`
        raises.
        """
        assert self._writer, "opened for reading"
        assert jax.process_count() == 1, "only one process can stream"
        step_dir = self._path(manifest.step_name(_natural(step)))
        described = {name: Leaf(leaf.shape, leaf.dtype, (0, 0)) for name, leaf in leaves.items()}
        job = _Save(step, step_dir, described, {}, manifest.plain_json(extra), provenance({}, self._config_text))
        self.join()
        self._failure = None
        try:
            job = dataclasses.replace(job, arrays=manifest.arrays_name(_begin(step_dir), self._token()))
            writer = streamed.Writer(os.path.join(step_dir, job.arrays), leaves)
            for name, row, array in _apart(pieces):
                writer.write(name, row, array)
            writer.close()
            self._commit(dataclasses.replace(job, sums=writer.sums))
        except _NotOurs as error:
            self._discard(job)
            raise error.why from None
        except Exception as error:
            self._failed(job, error)
        self.wait()

    @property
    def failure(self) -> CheckpointError | None:
        """Why the last save failed, None when it did not or has not ended yet. Does not wait."""
        return self._failure

    @property
    def retry_due(self) -> bool:
        """Whether the last save failed long enough ago to try again before the next one is due."""
        first, most = _RETRY_SECONDS
        pause = min(first * 2.0 ** (self._failures - 1), most)
        return self._failures > 0 and self._saving_step is None and time.monotonic() - self._failed_at >= pause

    @property
    def stale_seconds(self) -> float:
        """For how long nothing has been saved while saves fail; 0 when the last one did not fail."""
        return time.monotonic() - self._good_at if self._failures else 0.0

    def _token(self) -> int:
        return 0 if self._lease is None else self._lease.token

    def wait(self) -> None:
        """Wait for the save under way; CheckpointError with path and reason if the last save failed."""
        self.join()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Commits nothing from now on: this process no longer speaks for the run. A save under way comes to nothing."""
        self._abandoned = True

    def close(self) -> None:
        """Wait for the save under way and free Orbax's threads. A failure was logged; `wait` raises it."""
        self.join()
        self._orbax.close()

    def join(self) -> None:
        """Wait for the save under way, however it ends."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _finish(self, job: _Save) -> None:
        """In the background: hash while Orbax writes, then commit and apply the policy."""
        early = EarlyHashes(job.step_dir, job.arrays) if jax.process_index() == 0 else None
        try:
            self._orbax.finish()
            if jax.process_index() == 0:
                self._commit(job, early)
        except Exception as error:
            self._failed(job, error)
        finally:
            self._saving_step = None
            if early is not None:
                early.stop()

    def _commit(self, job: _Save, early: EarlyHashes | None = None) -> None:
        self._refuse_abandoned()
        sums = integrity.fetch_sums(job.sums)
        leaves = {
            name: dataclasses.replace(leaf, fingerprint=sums[name][:2], nonfinite=sums[name][2])
            for name, leaf in job.leaves.items()
        }
        if broken := [name for name, leaf in leaves.items() if leaf.nonfinite]:
            log.warning("step %d holds NaN or infinite values in %s", job.step, ", ".join(broken))
        files = manifest.record_files(job.step_dir, job.arrays, early)
        saved = Manifest(job.step, job.arrays, leaves, files, job.extra, self._config_text, versions(),
                         manifest.utc_now(), self._token(), job.provenance)
        manifest.stage(job.step_dir, saved)
        if self._lease is not None:
            self._lease.check()  # as late as can be; what still slips in is not in the base of the newer token
        self._refuse_abandoned()
        before = [entry.step for entry in manifest.scan(self.directory) if entry.status == "good"]
        for aside in upkeep.set_aside_after(self.directory, job.step):
            log.warning("step %d is saved after a rewind: %s was set aside as %s", job.step, aside.split(".")[0], aside)
        manifest.commit(job.step_dir, saved.token)
        self._tidy(saved, [step for step in before if step is not None and step < job.step])
        self._failures, self._good_at = 0, time.monotonic()
        if self._lease is not None:
            self._lease.saved(job.step)

    def _refuse_abandoned(self) -> None:
        if self._abandoned:
            raise CheckpointError("the members of the job changed during the save")

    def _tidy(self, saved: Manifest, earlier: list[int]) -> None:
        """Delete what the policy does not keep, once the step that was just committed has been read back."""
        step_dir = self._path(manifest.step_name(saved.step))
        try:
            upkeep.clean_unfinished(self.directory)
            if doomed := {*earlier} - manifest.kept([*earlier, saved.step], self._cfg.keep_last, self._cfg.keep_every):
                manifest.check_files(step_dir, saved)
                if self._lease is not None:
                    self._lease.check()
                upkeep.delete(self.directory, doomed)
        except Damaged as damage:
            aside = upkeep.set_aside(self.directory, manifest.step_name(saved.step), "bad")
            raise OSError(f"read back right after it was written, {damage}; set aside as {aside}, and no earlier step "
                          f"was deleted") from damage
        except OSError as error:
            log.error("step %d is saved, but an old one could not be deleted: %s", saved.step, placed(error))

    def _failed(self, job: _Save, error: Exception) -> None:
        """Log and keep the failure; the room of what this attempt wrote comes back to a full disk."""
        self._failure = CheckpointError(
            f"step {job.step} was not saved to {job.step_dir}: {arrays.reason(error)}; earlier steps are as they were: "
            f"mend that, and run the same command again"
        )
        self._failure.__cause__ = error
        self._failures, self._failed_at = self._failures + 1, time.monotonic()
        log.error("%s", self._failure)
        self._discard(job)

    def _discard(self, job: _Save) -> None:
        """Remove what an attempt wrote."""
        self._saving_step = None
        with contextlib.suppress(Exception):
            self._orbax.close()
        # The marker stays: Orbax's other threads may still write, and that must not pass for a copy of a step. The next
        # save that succeeds, or the next start, removes the rest.
        if jax.process_index() == 0 and job.arrays:
            written = glob.escape(os.path.join(job.step_dir, job.arrays))
            upkeep.remove([*glob.glob(written), *glob.glob(f"{written}.*")], tolerant=True)

    def _prepare(self) -> None:
        """Make the directory, see that it can be written, and remove what killed saves left."""
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the checkpoint directory {self.directory}: {error.strerror}; set "
                "output_dir to a place that you may write"
            ) from None
        effective = os.access in os.supports_effective_ids
        if not os.access(self.directory, os.W_OK | os.X_OK, effective_ids=effective):
            raise CheckpointError(
                f"the checkpoint directory {self.directory} is not writable; set output_dir to a "
                "place that you may write"
            )
        upkeep.clean_unfinished(self.directory)

    def set_aside_after(self, step: int) -> None:
        """Set later steps aside, because the run has left their branch; in process 0 alone."""
        self.join()
        for aside in upkeep.set_aside_after(self.directory, step):
            log.warning("%s: set aside, the run has gone back to step %d", self._path(aside), step)


def _join_at_exit(checkpoints: "weakref.ref[Checkpoints]") -> None:
    if (alive := checkpoints()) is not None:
        alive.join()


class _NotOurs(Exception):
    """What should be saved could not be had."""

    def __init__(self, why: Exception) -> None:
        super().__init__(why)
        self.why = why


def _apart(pieces: Iterable[Any]) -> Iterator[Any]:
    """The same, with its own failures told apart from those of saving."""
    try:
        yield from pieces
    except Exception as error:
        raise _NotOurs(error) from error


def _begin(step_dir: str) -> int:
    """Mark a step's directory as being written; returns the number of this attempt at it."""
    os.makedirs(step_dir, exist_ok=True)
    with open(os.path.join(step_dir, manifest.MARKER), "w"):
        pass
    return manifest.next_attempt(step_dir)


def _natural(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
    return int(step)
