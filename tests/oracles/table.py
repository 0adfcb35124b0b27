"""For each training case of the reference, the worst gap of our replay against its limit, as a table.

    python -m tests.oracles.table [FOLDER_OF_CASES]

keeps it in docs/measured/replays.json and writes it into docs/numerics.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.oracles.replay import Replay

COLUMNS = ("case", "steps", "cross-entropy, first step", "cross-entropy, worst step", "mean signed gap",
           "grad norm, worst relative", "final logits, worst", "skip decisions")


def row(folder: Path) -> list[str | int]:
    """The cells of one case, in the order of COLUMNS."""
    import numpy as np

    from tests.oracles.test_cases import FINAL_LOGITS_ATOL, GRAD_NORM_RTOL, exact_steps, limits, metrics, replayed

    case, ours = replayed(folder)
    gaps = np.array(ours.cross_entropy) - metrics(case, "train/CE loss")
    norms = metrics(case, "optim/total grad norm")
    exact = case.about["train"]["precision"] == "fp32"
    norm_limit = f" (limit {GRAD_NORM_RTOL:.0e})" if exact else ""
    logit_limit = FINAL_LOGITS_ATOL["float32" if exact else "bfloat16"]
    held = exact_steps(case)  # a case with experts may part from the reference when a router's near-tie flips
    until = "" if held == len(gaps) else f"; {np.abs(gaps[:held]).max():.1e} through step {held} (limit 5e-06)"
    logit_cell = "not held" if until else f"{final_logits_gap(folder, ours):.1e} (limit {logit_limit:.0e})"
    same = all(a == b for a, b in zip(ours.skipped, metrics(case, "optim/step skipped").tolist(), strict=True))
    return [
        folder.name, len(case.steps), f"{abs(gaps[0]):.1e}",
        f"{np.abs(gaps).max():.1e} (limit {limits(case).max():.0e}){until}", f"{gaps.mean():+.1e}",
        f"{(np.abs(ours.grad_norm - norms) / norms)[:held].max():.1e}{norm_limit}",
        logit_cell,
        "equal" if same else "differ",
    ]


def final_logits_gap(folder: Path, ours: Replay) -> float:
    import numpy as np

    golden = np.load(folder / "logits.npz")
    logits = ours.last_logits[:, golden["positions"]] if "positions" in golden else ours.last_logits
    return np.abs(logits - golden["final"]).max()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "cases"
    from benchmarks.measured_page import keep, machine

    where, rows = machine(), [row(path.parent) for path in sorted(folder.glob("*/record.json"))]
    keep("replays", "numerics.md", COLUMNS, rows, machine=where, command="python -m tests.oracles.table",
         what="models of 5 layers and width 64")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ.update(JAX_PLATFORMS="cpu", JAX_CPU_ENABLE_ASYNC_DISPATCH="false", PJRT_NPROC="8")
    main()
