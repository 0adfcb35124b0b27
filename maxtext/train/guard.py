"""When a run goes back by itself: too many skipped updates, and what is passed over then.

An update whose loss or gradient is an outlier or not finite changes nothing (optim.py). A few of these are borne. More
are a place in the data that does not get better by waiting: the run goes back to the last checkpoint before it, passes
over the batches there (as people did for PaLM: Chowdhery et al. 2022, section 5.1), and writes that down
(data/journal.py), so that every continuation does the same. A second return to the same checkpoint needs a person.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from maxtext.checkpoint.manager import Checkpoints
from maxtext.checkpoint.processes import from_process_0
from maxtext.config.guards import GuardConfig
from maxtext.data.global_batches import GlobalBatches
from maxtext.data.journal import Journal, Jump

WINDOW = 1000


@dataclasses.dataclass(frozen=True)
class Skips:
    """The updates that were skipped among the last 1,000, ascending; part of every checkpoint's extra."""

    updates: tuple[int, ...] = ()

    def after(self, update: int, skipped: bool) -> Skips:
        """The same once `update` is done."""
        kept = tuple(one for one in self.updates if update - WINDOW < one < update)
        return Skips((*kept, update) if skipped else kept)

    @property
    def streak(self) -> int:
        """How many of the last ones follow each other."""
        length = min(1, len(self.updates))
        while length < len(self.updates) and self.updates[-length - 1] == self.updates[-length] - 1:
            length += 1
        return length

    def complaint(self, update: int, cfg: GuardConfig) -> str | None:
        """Why these are too many after `update`, or None."""
        if not self.updates or self.updates[-1] != update:
            return None
        if self.streak > cfg.skips_in_a_row:
            return f"{self.streak} updates in a row were skipped (guard.skips_in_a_row {cfg.skips_in_a_row})"
        if len(self.updates) > cfg.skips_per_1000:
            return (f"{len(self.updates)} of the last {WINDOW:,} updates were skipped (guard.skips_per_1000 "
                    f"{cfg.skips_per_1000})")
        return None


class GoBack(Exception):
    """The run goes back to an earlier checkpoint and on from there."""


def way_back(skips: Skips, update: int, steps: Sequence[int], jumps: Sequence[Jump]) -> int | str:
    """The checkpoint to go back to; or why there is no way back.

    Args:
      skips: with too many of them, the last at `update`.
      steps: of the good checkpoints.
      jumps: made before.
    """
    before = [step for step in steps if step <= update - skips.streak]
    if not before:
        return "there is no checkpoint before them to go back to"
    back_to = max(before)
    if any(jump.back_to == back_to for jump in jumps):
        return (f"the run has gone back to update {back_to} before for the same reason and come no further than this; "
                f"it needs a person")
    return back_to


class Guard:
    """Counts the skipped updates of a run and sends it back when they are too many.

    Attributes:
      skips: so far; set from the checkpoint that the run goes on from.
    """

    def __init__(self, cfg: GuardConfig, checkpoints: Checkpoints, batches: GlobalBatches) -> None:
        self._cfg, self._checkpoints, self._batches = cfg, checkpoints, batches
        self.skips = Skips()

    def observe(self, update: int, values: Mapping[str, float]) -> str | None:
        """Takes in the metrics of an update, the same in every process; returns why the run cannot go on, or None.

        Raises:
          GoBack: after the decision is written down.
        """
        finite = math.isfinite(values["grad_norm"]) and math.isfinite(values["cross_entropy"])
        skipped = bool(values["skipped"])
        self.skips = self.skips.after(update, skipped)
        complaint = self.skips.complaint(update, self._cfg)
        if complaint is None and (finite or skipped):
            return None
        what = "is an outlier" if finite else "is not finite"
        seen = f"update {update} {what}: loss {values['cross_entropy']}, grad norm {values['grad_norm']}."
        if complaint is None:  # the weights may be spoilt although the loss, which is of the weights before, looks well
            return f"{seen} {self._unsaved()}"
        return f"{seen} {self._unsaved()} {complaint}, and {self._go_back(update, complaint)}."

    def _go_back(self, update: int, complaint: str) -> str:
        """Raises GoBack, or returns why there is no way back."""
        journal, why = self._batches.journal, ""
        batches = {one: self._batches.data_step(one) for one in self.skips.updates}  # as long as no new jump is made
        self._checkpoints.join()

        def jump(back_to: int) -> Jump:
            first = min(one for one in self.skips.updates if one > back_to)
            return Jump(update, back_to, batches[first], batches[update], complaint)

        def decide() -> int:
            nonlocal why
            found = way_back(self.skips, update, self._checkpoints.steps(), journal.jumps)
            if isinstance(found, str):
                why = found
                return -1
            journal.jump(jump(found))
            return found

        back_to = from_process_0(decide)
        if back_to < 0:
            return why or "there is no way back (the log of process 0 says why)"
        made = jump(back_to)
        journal.add_jumps([made])
        raise GoBack(f"{complaint} at update {update}: going back to update {back_to} and past batches {made.first} to "
                     f"{made.last} of the data")

    def _unsaved(self) -> str:
        newest = self._checkpoints.latest()
        back = "no checkpoint was saved before" if newest is None else f"the newest checkpoint is of update {newest}"
        return f"It was not saved and {back}."


def leave_branch(checkpoints: Checkpoints, journal: Journal) -> int:
    """Sets aside the checkpoints of a branch that the journal has left; returns the newest that is left, or -1.

    For process 0 alone.
    """
    while (newest := checkpoints.latest()) is not None:
        lacking = journal.lacking(checkpoints.read_extra(newest).get("data", {}), newest)
        if lacking is None:
            return newest
        checkpoints.set_aside_after(lacking.back_to)
    return -1
