"""Find and restore saved training states: only steps whose manifest, files and arrays are what was saved."""

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import jax

from maxtext.checkpoint import arrays, integrity, manifest, upkeep
from maxtext.checkpoint.lease import newest_saved
from maxtext.checkpoint.manifest import CheckpointError, Damaged, Entry, Manifest
from maxtext.checkpoint.processes import all_agree, from_process_0
from maxtext.checkpoint.provenance import versions
from maxtext.config.reason import placed
from maxtext.config.schema import CheckpointConfig

PyTree = Any
log = logging.getLogger("maxtext.checkpoint")
_NAMED = 5  # of the names that are no checkpoints, in a warning


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found: `state` has the structure and shardings that were asked for."""

    step: int
    state: PyTree
    extra: Any
    config_text: str
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    how: str = ""  # it was put together, in words; of a state that is more than read

    @property
    def other_versions(self) -> list[str]:
        """What it was saved with and is restored without, in words; such a run goes on, but not to the same bits."""
        now = versions()
        return [f"{name} {was}, now {now[name]}" for name, was in self.versions.items() if now.get(name, was) != was]


class SavedSteps:
    """The steps in one directory. In a job of several processes all of them make the same calls.

    Args:
      directory: a local or mounted path; it need not exist.
      cfg: of it, whether a run may start anew although it has saved steps.
      writer: whether a bad step may be renamed.
    """

    def __init__(self, directory: str, cfg: CheckpointConfig, writer: bool) -> None:
        if "://" in str(directory):
            raise CheckpointError(f"checkpoints need a local or mounted path, not {directory}; mount the bucket first")
        self.directory = os.path.abspath(directory)
        self._cfg, self._writer = cfg, writer
        self._orbax = arrays.Orbax()
        self._saving_step: int | None = None  # that is being written now
        self._told: set[str] = set()
        self._tried: set[str] = set()

    def join(self) -> None:
        """Wait for the save under way, however it ends; here there is none."""

    def steps(self) -> list[int]:
        """Steps that are complete on disk (manifest valid, every file there with its size), ascending."""
        return [entry.step for entry in self._scan() if entry.status == "good" and entry.step is not None]

    def latest(self) -> int | None:
        """The newest of `steps()`."""
        return max(self.steps(), default=None)

    def read_extra(self, step: int) -> Any:
        """The `extra` that step was saved with, without reading its arrays."""
        return self._manifest(step).extra

    def config_text(self, step: int) -> str:
        """The config that step was saved with, without reading its arrays."""
        return self._manifest(step).config_text

    def _manifest(self, step: int) -> Manifest:
        path = self._path(manifest.step_name(step))
        try:
            return manifest.read(path)
        except FileNotFoundError:
            raise CheckpointError(f"there is no step {step} in {self.directory}; good steps are "
                                  f"{self.steps()}") from None
        except (Damaged, OSError) as error:
            raise CheckpointError(f"{path}: {placed(error)}; good steps are {self.steps()}") from None

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _scan(self) -> list[Entry]:
        """All entries; whatever is ignored is named in a warning, once."""
        entries = manifest.scan(self.directory)
        for entry in entries:
            ours = entry.step is not None and entry.step == self._saving_step
            if entry.status in ("damaged", "partial", "unfinished", "stale") and not ours:
                self._tell([entry.name], f"{self._path(entry.name)}: {entry.reason}")
        if foreign := [entry.name for entry in entries if entry.status == "foreign"]:
            others = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
            self._tell(foreign, f"what is no checkpoint in {self.directory}: {', '.join(foreign[:_NAMED])}{others}")
        return entries

    def _tell(self, names: list[str], what: str) -> None:
        """A warning, unless it would say nothing new."""
        if not self._told.issuperset(names):
            log.warning("checkpoint directory: ignored %s", what)
        self._told.update(names)

    def restore(self, abstract_state: PyTree, step: int | None = None, *, partial: bool = False,
                finite: Callable[[str], bool] | None = None) -> Restored | None:
        """The newest good step (or `step`), verified, as arrays with the shardings of `abstract_state`.

        Args:
          abstract_state: a tree of jax.ShapeDtypeStruct; a leaf without a sharding goes to the first device. The mesh
            need not be the one that saved.
          step: exactly this step, with no fall-back; None tries the newest first.
          partial: leaves that were saved but are not in `abstract_state` are left unread instead of refused.
          finite: for which leaves, by name, a NaN or infinite value makes a step one that is not tried; None: for none.

        Returns None when the directory has never held a checkpoint, as far as it and the lease beside it tell, or when
        none of them is good and `checkpoint.allow_fresh` is set. A step whose manifest, files or restored arrays
        are not what was saved is renamed to `<name>.bad-N`, named in a warning, and the next older one is tried.
        Raises CheckpointError when there were checkpoints but none is good, and when the leaves asked for differ from
        those saved in name, shape or dtype (every such leaf is listed; nothing is renamed or converted).
        """
        self.join()
        wanted = integrity.named_leaves(abstract_state)
        treedef = jax.tree.structure(abstract_state)
        if step is not None:
            try:
                return self._load(self._path(manifest.step_name(step)), wanted, treedef, partial)
            except Damaged as damage:
                others = [other for other in self.steps() if other != step]  # steps() does not read the arrays
                raise CheckpointError(
                    f"step {step} in {self.directory} is bad: {damage}; good steps are {others}") from None
        while (candidate := from_process_0(lambda: self._newest(finite))) >= 0:
            name = manifest.step_name(candidate)
            try:
                return self._load(self._path(name), wanted, treedef, partial)
            except Damaged as damage:
                self._quarantine(name, str(damage))
        self._refuse_fresh_start()
        return None

    def _newest(self, finite: Callable[[str], bool] | None) -> int:
        """The newest step worth trying, -1 when there is none."""
        found = []
        for entry in self._scan():
            if entry.step is None or entry.status not in ("good", "damaged") or entry.name in self._tried:
                continue
            broken = []
            if entry.manifest is not None and finite is not None:
                broken = [name for name, leaf in entry.manifest.leaves.items() if leaf.nonfinite and finite(name)]
            if broken:
                self._tell([entry.name], f"{self._path(entry.name)}: NaN or infinite values in {', '.join(broken)}")
            else:
                found.append(entry.step)
        return max(found, default=-1)

    def _quarantine(self, name: str, reason: str) -> None:
        self._tried.add(name)
        if jax.process_index() != 0:
            return
        renamed = "left in place"
        if self._writer:
            try:
                renamed = f"renamed to {upkeep.set_aside(self.directory, name, 'bad')}"
            except OSError as error:
                renamed = f"could not be renamed ({error.strerror})"
            else:
                self._tried.discard(name)
        log.warning(
            "checkpoint %s is bad and was not used: %s; %s, trying the one before", self._path(name), reason, renamed
        )

    def _refuse_fresh_start(self) -> None:
        """CheckpointError if the run ever held a step: starting anew would silently throw it away."""
        seen = [f"{entry.name} ({entry.reason or 'failed its checks'})" for entry in manifest.scan(self.directory)
                if entry.status in ("good", "damaged", "partial", "bad", "superseded", "stale")]
        newest = newest_saved(os.path.dirname(self.directory))
        if not seen and newest is None:
            return
        listed = "; ".join(seen) or f"it holds none at all, though step {newest} was saved (is it mounted?)"
        if self._cfg.allow_fresh:
            log.warning("no good checkpoint is left in %s: %s; starting from scratch, as checkpoint.allow_fresh says",
                        self.directory, listed)
            return
        raise CheckpointError(
            f"no good checkpoint is left in {self.directory}: {listed}. Bring one back from a copy, or set "
            "checkpoint.allow_fresh=true (or another run_name) to start from scratch"
        )

    def _load(self, step_dir: str, wanted: dict[str, Any], treedef: Any, partial: bool) -> Restored:
        """Verify, read, verify again. Damaged in all processes when it is damaged for one."""
        found, damage = None, None
        try:
            found = manifest.read(step_dir)
            arrays.refuse_mismatch(step_dir, found, wanted, partial)
            manifest.check_files(step_dir, found, slice(jax.process_index(), None, jax.process_count()))
        except FileNotFoundError:
            damage = f"there is no {os.path.join(step_dir, manifest.NAME)}"
        except Damaged as error:
            damage = str(error)
        except OSError as error:
            raise CheckpointError(f"cannot read {step_dir}: {error.strerror}") from None
        if not all_agree(damage is None) or found is None:
            raise Damaged(damage or "another process found it damaged")
        try:
            restored = self._orbax.read(os.path.join(step_dir, found.arrays), found.leaves, wanted)
        except Exception as error:
            if not arrays.undecodable(error):
                # The files are what was saved, so this is the machine (memory, a missing device), not the checkpoint.
                raise CheckpointError(f"{step_dir} is intact but could not be read: {arrays.reason(error)}") from error
            restored, damage = {}, f"its files are as they were hashed, but hold no arrays: {arrays.reason(error)}"
        if not all_agree(damage is None):
            raise Damaged(damage or "another process found that its files hold no arrays")
        for name, sums in integrity.tree_fingerprints(restored).items():
            if sums != found.leaves[name].fingerprint:
                raise Damaged(f"leaf {name} does not have the fingerprint that it was saved with")
        state = jax.tree.unflatten(treedef, [restored[name] for name in wanted])
        return Restored(found.step, state, found.extra, found.config_text, found.versions)
