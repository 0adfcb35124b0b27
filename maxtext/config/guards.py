"""The `guard` section: what a run does by itself when updates go wrong."""

from __future__ import annotations

import dataclasses

from maxtext.config.field import field


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Skipped updates that are still borne: outliers (optim.skip) and losses or gradients that are not finite."""

    skips_in_a_row: int = field("More skipped updates in a row than this, and the run goes back to the last checkpoint "
                                "before them and passes over their batches.", 3, minimum=0)
    skips_per_1000: int = field("The same for skipped updates among the last 1,000.", 10, minimum=0)
