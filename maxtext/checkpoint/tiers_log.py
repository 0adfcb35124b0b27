"""The log of gradients between two snapshots in memory: the difference that one update makes, in a sixth of the bytes.

What Adam changes in a state is as large as the state. What is small is the gradient, rounded to two bytes a weight, if
updates take in just that. An entry is a file like a slot (`tiers`), sealed and hashed alike, wherever the worker's
snapshots lie. It names the state that its update began with. A restore reads the newest complete snapshot, then does
again, with the optimizer of the run, those updates whose entries follow from it without a gap.

The idea: LowDiff (arXiv 2509.04084), which logs compressed gradients; what is logged here is exact, because it is
rounded before the update in normal training too.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxtext.checkpoint.integrity import named_leaves
from maxtext.checkpoint.tiers import Slot, SnapshotId, Snapshots, host_parts, slots_below, worker_folder, write_slot
from maxtext.checkpoint.tiers_vote import Exchange, Listed, Vote, listed, newest_complete
from maxtext.config.reason import placed

PyTree = Any
ENDING = ".gradient"
_NAME = re.compile(r"_(\d+)_(\d+)\.gradient$")


class GradientLog:
    """Writes the entries of one worker, beside its snapshots; all in a thread, the copy out of the devices too.

    Attributes:
      stands_on: what the state of the last restore was made from; None: nothing that lies in memory.
    """

    def __init__(self, snapshots: Snapshots, update: str) -> None:
        """`update` is what an update is made of besides state and gradient: entries with another are not used."""
        self._snapshots, self._update = snapshots, update
        own, worker = worker_folder(snapshots.root, snapshots.worker), snapshots.worker
        self._prefixes = [os.path.join(own, "own")]
        if snapshots.peer is not None:
            self._prefixes.append(os.path.join(worker_folder(snapshots.root, snapshots.peer), f"of_{worker}"))
        self._thread: threading.Thread | None = None
        self._dropped_for: SnapshotId | None = None
        self.stands_on: SnapshotId | None = None

    def keep(self, step: int, gradient: PyTree, extra: dict[str, Any]) -> None:
        """Begins the entry of update `step`. One is under way at a time; nobody may donate the gradient's arrays.

        Args:
          extra: what a snapshot of the state after it would have.
        """
        self.wait()
        generation, run = self._snapshots.generation, self._snapshots.run
        follows, self.stands_on = self.stands_on, None
        if follows is None or follows.step != step - 1:
            follows = SnapshotId(generation, step - 1, run)
        self._thread = threading.Thread(target=self._write, args=(SnapshotId(generation, step, run), follows, gradient,
                                                                  extra), name=f"gradient {step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the entry under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self) -> None:
        """Removes what this worker has written, for a run that goes back."""
        self.wait()
        self._remove(lambda step: True)
        self.stands_on = None

    def _write(self, at: SnapshotId, follows: SnapshotId, gradient: PyTree, extra: dict[str, Any]) -> None:
        paths = [f"{prefix}_{at.generation}_{at.step}{ENDING}" for prefix in self._prefixes]
        words = {"follows": [follows.generation, follows.step], "update": self._update, "extra": extra}
        try:
            parts = host_parts(gradient)
            shapes = {name: leaf.shape for name, leaf in named_leaves(gradient).items()}
            for path in paths:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write_slot(path, at, parts, words, shapes)
            self._drop_old()
        except OSError as error:
            for path in paths:
                with contextlib.suppress(OSError):
                    os.remove(path)
            self._snapshots.told(f"the gradient of update {at.step} was not kept in memory: {placed(error)}; until the "
                                 f"next snapshot, no later update can be done again from there")

    def _drop_old(self) -> None:
        """Removes what no restore needs: entries up to the newest snapshot, once it is complete.

        Where the slots of other hosts cannot be seen they may not have theirs yet: then up to the one before it.
        """
        sealed = self._snapshots.sealed()
        if not sealed or sealed[-1] == self._dropped_for:
            return
        slots = [slot for slot in slots_below(self._snapshots.root, self._snapshots.run, lambda text: None)
                 if slot.id == sealed[-1]]
        if slots and newest_complete(map(listed, slots), slots[0].shapes) == sealed[-1]:
            self._dropped_for = sealed[-1]
            self._remove(lambda step: step <= sealed[-1].step)
        elif len(sealed) > 1:
            self._remove(lambda step: step <= sealed[0].step)

    def _remove(self, unneeded: Callable[[int], bool]) -> None:
        """Of this worker's entries in its own folder and any other's; those of earlier processes of it too."""
        root, worker = glob.escape(self._snapshots.root), self._snapshots.worker
        own = glob.escape(worker_folder(self._snapshots.root, worker))
        for path in [*glob.glob(f"{own}/own_*{ENDING}"), *glob.glob(f"{root}/worker_*/of_{worker}_*{ENDING}")]:
            named = _NAME.search(path)
            if named is not None and unneeded(int(named[2])):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)


class Entries:
    """What all processes of a job can read of the log; each of them makes the same calls."""

    def __init__(self, root: str, run: str, update: str, abstract: PyTree, exchange: Exchange,
                 told: Callable[[str], None]) -> None:
        """
        Args:
          abstract: shapes, types and wanted shardings of a gradient.
          update: see `GradientLog`.
          told: hears of each damaged entry by name, and of where the log ends for it.
        """
        found = {slot.path: slot for slot in slots_below(root, run, told, ENDING)}
        self._vote = Vote(abstract, found, map(_listed, found.values()), exchange, "gradient ", told)
        self._update, self._told = update, told

    def after(self, at: SnapshotId) -> Iterator[SnapshotId]:
        """The entries that lead on from a state, each from the one before, without a gap."""
        while (following := _next(at, self._vote.usable())) is not None:
            at, update = following
            if update != self._update or not self._vote.complete(at):
                return
            yield at

    def reach(self, at: SnapshotId) -> int:
        """The update that can be reached from a snapshot."""
        return max((one.step for one in self.after(at)), default=at.step)

    def read(self, at: SnapshotId) -> Iterator[tuple[SnapshotId, PyTree, dict[str, Any]]]:
        """Id, gradient and `extra` of each entry after a state; verified. Ends before the first that is not whole."""
        while (following := _next(at, self._vote.usable())) is not None:
            entry, update = following
            if update != self._update:
                self._told(f"the logged gradient of update {entry.step} was made for another optimizer or schedule; it "
                           f"is not used, nor are later ones")
                return
            found = None
            while found is None and self._vote.complete(entry):  # a damaged one may have a copy
                found = self._vote.read(entry)
            if found is None:
                self._told(f"the log of gradients ends before update {entry.step}, whose entry is not whole")
                return
            yield entry, found[0], found[1]["extra"]
            at = entry


def _listed(slot: Slot) -> Listed:
    one, (generation, step) = listed(slot), slot.extra["follows"]
    return Listed(one.path, one.id, one.parts, SnapshotId(generation, step, slot.id.run), slot.extra["update"])


def _next(at: SnapshotId, entries: Iterable[Listed]) -> tuple[SnapshotId, str] | None:
    """The entry of the update after a state, of the attempt that lived last, and what its update was made of."""
    return max(((entry.id, entry.update) for entry in entries if entry.follows == at), default=None)
