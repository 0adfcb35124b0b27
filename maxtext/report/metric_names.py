"""The metrics of a run by name, with unit and meaning: the one table that docs/metrics.md shows. The names are stable.

`python -m maxtext.report.metric_names` writes the table into docs/metrics.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN, END = ("<!-- metrics: written by python -m maxtext.report.metric_names -->", "<!-- metrics: end -->")

_TASK = "eval/downstream/<task>"
# Name, with <...> for what differs; unit; what it is; when it is written.
METRICS: tuple[tuple[str, str, str, str], ...] = (
    ("step", "", "number of the update; 0: before the first", "always"),
    ("time/unix (s)", "s", "when the line was written, since 1970", "always"),
    ("model/parameters", "", "parameters of the model", "step 0"),
    ("train/CE loss", "nats/token", "mean cross-entropy over the real targets of the global batch", "every update"),
    ("train/PPL", "", "its exponential, where that loss is below 10", "every update"),
    ("train/Z loss", "nats/token", "squared log-partition times `train.z_loss`", "every update"),
    ("train/Z loss unscaled", "", "mean squared log-partition", "every update"),
    ("train/masked labels (%)", "share 0..1", "positions of the batch without a target; the reference's name, whose "
                                              "value is a share", "every update"),
    ("train/masked instances (%)", "share 0..1", "instances left out by `data.instance_filter`", "every update"),
    ("train/load imbalance", "", "largest load of an expert over the mean one, worst layer", "experts"),
    ("train/router entropy", "nats", "of the scores of a token, mean over layers", "experts"),
    ("train/dropped assignments (%)", "%", "of tokens to experts beyond their capacity", "`capacity_factor`"),
    ("train/load balancing loss", "", "weighted, sum over layers", "experts"),
    ("train/load balancing loss unscaled", "", "unweighted, sum over layers", "experts"),
    ("train/router Z loss", "", "weighted, sum over layers", "experts"),
    ("train/router Z loss unscaled", "", "unweighted, sum over layers", "experts"),
    ("train/block <NN>/<router metric>", "", "the same of one layer", "experts"),
    ("optim/total grad norm", "", "norm of the gradient, before clipping", "every update"),
    ("optim/LR (group <N>)", "", "learning rate; group 1 is without weight decay", "every update"),
    ("optim/LR (Muon)", "", "learning rate of the matrices", "Muon with `matrix_lr`"),
    ("optim/step skipped", "0 or 1", "whether the update changed nothing: an outlier, or not finite", "every update"),
    ("throughput/device/TPS", "tokens/s", "of one device", "every update"),
    ("throughput/device/MFU", "%", "model FLOPs over the device's peak in bfloat16", "known accelerators"),
    ("throughput/device/data loading (s)", "s", "that the update waited for its batch", "every update"),
    ("throughput/device/data loading (%)", "%", "of the update's time", "every update"),
    ("throughput/total tokens", "tokens", "seen since the start of the run", "every update"),
    ("throughput/in-loop eval time (s)", "s", "that the evaluation took", "evaluations"),
    ("data/fingerprint", "", "hash of the batch's tokens", "every update"),
    ("data/tokens/<source>", "tokens", "of each source, read since the start of the run", "every update"),
    ("memory/host (GiB)", "GiB", "resident memory of process 0", "every update"),
    ("time/step (s)", "s", "of the update alone", "every update"),
    ("time/start (s)", "s", "before compiling", "first update of an attempt"),
    ("time/compile (s)", "s", "compiling the update", "first update of an attempt"),
    ("time/eval (s)", "s", "evaluating", "evaluations"),
    ("time/checkpoint (s)", "s", "of a save that training waited for", "saves"),
    ("time/snapshot (s)", "s", "copying the state to the hosts' memory", "snapshots, elastic runs"),
    ("time/gradient log (s)", "s", "that the gradient before was not yet in the hosts' memory",
     "`checkpoint.gradient_log`"),
    ("time/samples (s)", "s", "completing `generate.prompts`", "samples"),
    ("time/comparison (s)", "s", "comparing devices", "`guard.compare_devices_every`"),
    ("time/profile (s)", "s", "writing and reading the profile", "`profile.steps`"),
    ("eval/lm/<set>/CE loss", "nats/token", "held-out loss; the sets macro and micro are the mean over sets and the "
                                            "mean over tokens", "evaluations"),
    ("eval/lm/<set>/PPL", "", "its exponential", "evaluations"),
    ("eval/lm/<set>/BPB", "bits/byte", "of the set's text", "evaluations, where bytes are known"),
    ("eval/lm/<set>/tokens", "tokens", "that were scored", "evaluations"),
    (f"{_TASK} (<kind>)", "", "kind: BPB, CE loss, soft loss, log soft loss, accuracy or length-normalized accuracy; "
                              "with v2 over whole answers, without over all but the first character", "`eval.tasks`"),
)


def matching(name: str) -> list[str]:
    """The rows that a metric's name fits, which is one."""
    return [row for row, *_ in METRICS if _pattern(row).fullmatch(name)]


def table() -> str:
    """The table in Markdown, with its marks."""
    rows = ["| metric | unit | what it is | when |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {unit} | {what} | {when} |" for name, unit, what, when in METRICS]
    return "\n".join([BEGIN, "", *rows, "", END])


def rewritten(page: str) -> str:
    """The text of the page with the table as it is now."""
    before, rest = page.split(BEGIN)
    return before + table() + rest.split(END)[1]


def _pattern(row: str) -> re.Pattern[str]:
    parts = re.split(r"(<[^>]*>)", row)
    kinds = {"<NN>": r"\d\d", "<N>": r"\d", "<router metric>": "(load|router|dropped)[^/]*"}
    return re.compile("".join(kinds.get(part, ".+") if part.startswith("<") else re.escape(part) for part in parts))


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
