"""The `guard` and `watchdog` sections: what a run does by itself when updates go wrong, or nothing goes on."""

from __future__ import annotations

import dataclasses

from maxtext.config.field import field


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Skipped updates that are still borne: outliers (optim.skip) and losses or gradients that are not finite."""

    skips_in_a_row: int = field("More skipped updates in a row than this, and the run goes back to the last checkpoint "
                                "before them and passes over their batches.", 5, minimum=0)
    skips_per_1000: int = field("The same for skipped updates among the last 1,000.", 50, minimum=0)
    compare_devices_every: int | None = field(
        "Updates between comparisons of devices, bit for bit: copies of the state, and the gradient of one row on two "
        "devices, for which all weights must fit on one. null: never.", None, minimum=1)


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """For how long a run may stay in one phase; then it writes all stacks into its folder and exits with code 75."""

    init_seconds: float = field("Opening data, state and files.", 3600.0, above=0)
    compile_seconds: float = field("Compiling the update.", 3600.0, above=0)
    data_seconds: float = field("Waiting for one batch.", 600.0, above=0)
    step_seconds: float = field("One update.", 900.0, above=0)
    save_seconds: float = field("The part of a save that training waits for.", 1800.0, above=0)
    restore_seconds: float = field("Verifying and reading a checkpoint.", 3600.0, above=0)
    eval_seconds: float = field("One evaluation, or all samples.", 7200.0, above=0)
