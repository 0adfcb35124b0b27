"""docs/hardware.md holds the plans of docs/plans, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from maxtext.plan.page import COLUMNS, records, row, write

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_written_from_the_records(tmp_path: Path):
    page = shutil.copy(DOCS / "hardware.md", tmp_path)
    write(Path(page), DOCS / "plans")
    assert Path(page).read_text() == (DOCS / "hardware.md").read_text(), "run python -m maxtext.plan.page"


def test_every_record_was_compiled_for_a_tpu_or_gpu():
    plans = records(DOCS / "plans")
    assert plans
    for plan in plans:
        assert len(row(plan)) == len(COLUMNS)
        compilers = {"jax", "jaxlib", "jax-cuda13-plugin" if plan["topology"].startswith("h100") else "libtpu"}
        assert compilers <= set(plan["program"]["versions"])
        assert plan["program"]["compile_seconds"] > 1


def test_a_step_with_loops_of_unknown_length_has_no_time():
    plan = json.loads(json.dumps(records(DOCS / "plans")[0]))
    plan["program"]["unknown_loops"] = ["while.1", "while.2"]
    cells = row(plan)
    assert cells[COLUMNS.index("MFU")] == cells[COLUMNS.index("step, s")] == "n/a"
    assert cells[COLUMNS.index("compiled / model FLOPs")].endswith(", 2 loops counted once")


def test_a_row_says_what_was_set_beside_its_config():
    plan = records(DOCS / "plans")[0] | {"overrides": ["mesh.fsdp=8", "train.remat.mode=full"]}
    assert row(plan)[0].endswith("; `mesh.fsdp=8` `train.remat.mode=full`")
    assert "`" not in row(plan | {"overrides": []})[0]


def test_a_refused_step_has_a_row_too():
    plan = json.loads(json.dumps(records(DOCS / "plans")[0])) | {"program": None}
    plan["memory"] |= {"needed": 20 << 30, "capacity": 16 << 30}
    assert "refused: needs 20.0 of 16" in row(plan)
    assert len(row(plan)) == len(COLUMNS)


@pytest.mark.parametrize(("traffic", "cell"), [
    ([], "-"),
    ([{"kind": "all-gather", "axes": "fsdp", "asynchronous": True, "count": 3, "bytes_sent": 3 << 30},
      {"kind": "all-reduce", "axes": "fsdp", "asynchronous": False, "count": 9, "bytes_sent": 100}],
     "3 all-gather over fsdp, 3.00 GiB, asynchronous"),
])
def test_collectives_that_move_little_are_left_out(traffic: list[dict], cell: str):
    plan = json.loads(json.dumps(records(DOCS / "plans")[0]))
    plan["program"]["traffic"] = traffic
    assert cell in row(plan)
