"""The numerics gate of every option that is meant to change how a run is computed, not what.

    python benchmarks/gates.py [NAME ...]

Each row runs `maxtext compare`: one config as it is and with the option, from the same weights on the same batches, on
virtual CPU devices. Results are kept in docs/gates.json (those of other rows stay) and written as a table into
docs/performance.md. Exit code 1 when a row is not within its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_page import write_page
from maxtext.compare.command import GROUPS, Row, compare, measured

DOCS = Path(__file__).resolve().parents[1] / "docs"
DENSE, EXPERTS = "configs/tiny/olmo3_tiny_stage1.yml", "configs/tiny/olmo3_moe_tiny.yml"
# Documents are masked, and there are four layers, so that every axis of a mesh has something to do. Adam divides
# gradients by their own size, and so blows up the rounding of those near zero: a large epsilon keeps it in proportion.
SHAPE = ("data.document_masking=true", "model.n_layers=4", "model.d_model=128", "model.n_heads=4", "mesh.fsdp=1",
         "optim.eps=1e-3")
BASE, MOE = (*SHAPE, "model.d_ff=128"), (*SHAPE, "model.moe.d_expert=64")
BF16 = ("train.compute_dtype=bfloat16",)
ROUNDING = 1e-5  # float32 sums in another order
FUSED = "float32 between operations that XLA fuses; bfloat16 is as far from float32"
STEPS = 3


class Gate(NamedTuple):
    """One option, what both sides have, and the largest relative difference that is right for it."""

    option: tuple[str, ...]
    bound: float = 0.0  # 0: the same bytes
    config: str = DENSE
    both: tuple[str, ...] = BASE
    why: str = ""  # it is not within rounding


GATES = {
    "remat full": Gate(("train.remat.mode=full",), ROUNDING),
    "remat minimal": Gate(("train.remat.mode=minimal",), ROUNDING),
    "remat balanced": Gate(("train.remat.mode=balanced",), ROUNDING),
    "remat offload": Gate(("train.remat.mode=offload",), ROUNDING),
    "remat full, bfloat16": Gate(("train.remat.mode=full",), 3e-2, both=BASE + BF16, why=FUSED),
    "moments in host memory": Gate(("optim.offload=host",)),
    "weights in host memory": Gate(("optim.offload_weights=host",)),
    "weights in host memory, bfloat16": Gate(("optim.offload_weights=host",), both=BASE + BF16),
    "4 micro-batches": Gate(("train.gradient_accumulation_steps=4",), ROUNDING),
    "loss in chunks of 64 tokens": Gate(("train.loss_chunk_tokens=64",), ROUNDING),
    "data 8": Gate(("mesh.data=8",), ROUNDING),
    "fsdp 8": Gate(("mesh.fsdp=8",), ROUNDING),
    "tensor 2 x fsdp 4": Gate(("mesh.tensor=2", "mesh.fsdp=4"), ROUNDING),
    "context 4, all-gather": Gate(("mesh.context=4", "mesh.fsdp=2"), ROUNDING),
    "context 4, ring": Gate(("mesh.context=4", "mesh.fsdp=2", "mesh.context_strategy=ring"), ROUNDING),
    "context 4, Ulysses": Gate(("mesh.context=4", "mesh.fsdp=2", "mesh.context_strategy=ulysses"), ROUNDING),
    "pipeline 2 x fsdp 2 x tensor 2": Gate(("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2",
                                            "train.gradient_accumulation_steps=2"), ROUNDING),
    "experts: expert 4 x fsdp 2": Gate(("mesh.expert=4", "mesh.fsdp=2"), ROUNDING, EXPERTS, MOE),
    "experts: XLA's ragged_dot": Gate(("kernels.grouped_matmul=ragged_dot",), ROUNDING, EXPERTS, MOE),
    "experts: remat full": Gate(("train.remat.mode=full",), ROUNDING, EXPERTS, MOE),
    "compute in bfloat16": Gate(BF16, 0.1, why="8 bits of mantissa"),
    "moments in bfloat16": Gate(("optim.moments_dtype=bfloat16",), 1e-2, why="moments have 8 bits, rounded at random"),
    "int8": Gate(("quant.kind=int8",), 0.2, why="8-bit operands"),
    "fp8": Gate(("quant.kind=fp8",), 0.5, why="4 bits of mantissa, 3 in gradients"),
    "mxfp8": Gate(("quant.kind=mxfp8",), 0.5, why="4 bits of mantissa"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of the rows; all by default: {', '.join(GATES)}")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(GATES)):
        parser.error(f"there is no gate {unknown[0]!r}; there are: {', '.join(GATES)}")
    kept = DOCS / "gates.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    bases: dict[tuple, dict[str, np.ndarray]] = {}
    for name in args.names or GATES:
        gate = GATES[name]
        if (gate.config, gate.both) not in bases:
            bases[gate.config, gate.both] = measured(gate.config, [*gate.both], STEPS)
        changed = measured(gate.config, [*gate.both, *gate.option], STEPS)
        results[name] = result(gate, compare(bases[gate.config, gate.both], changed))
        print(f"{name}: {cells(name, results[name])[-1]}", flush=True)
        results = {name: results[name] for name in GATES if name in results}
        kept.write_text(json.dumps(results, indent=1) + "\n")
        write(DOCS / "performance.md", results)
    return int(not all(passes(one) for one in results.values()))


def result(gate: Gate, rows: Sequence[Row]) -> dict[str, Any]:
    """What is recorded of one comparison: the worst relative difference of each kind of array."""
    worst = {group: max(row.relative for row in rows if row.name.split(" ")[0] == group) for group in GROUPS}
    return {"option": list(gate.option), "config": Path(gate.config).stem, "bound": gate.bound, "why": gate.why,
            "arrays": len(rows), "identical": sum(row.identical for row in rows), "worst": worst,
            "jax": jax.__version__}


def passes(one: Mapping[str, Any]) -> bool:
    """Whether all arrays are within the bound; a bound of 0 wants every byte."""
    if one["bound"] == 0:
        return one["identical"] == one["arrays"]
    return all(worst <= one["bound"] for worst in one["worst"].values())


def cells(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a row, in the order of the table's columns; the last is the verdict."""
    same = one["identical"] == one["arrays"]
    bound = "the same bytes" if one["bound"] == 0 else f"{one['bound']:g}" + (f" ({one['why']})" if one["why"] else "")
    worst = ["0" if value == 0 else f"{value:.1e}" for value in one["worst"].values()]
    verdict = (f"byte-identical, {one['arrays']} arrays" if same else "within" if passes(one) else "NOT within")
    return name, f"`{' '.join(one['option'])}`", bound, *worst, verdict


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table, one row a gate."""
    head = ("gate", "option", "bound", *GROUPS, "result")
    rows = [head, ("---",) * len(head), *(cells(name, one) for name, one in results.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(page: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts the table between the marks of a page."""
    write_page(page, "gates: written by python benchmarks/gates.py", table(results))


if __name__ == "__main__":
    sys.exit(main())
