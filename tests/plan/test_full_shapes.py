"""The records of docs/plans: each is of its config as it stands, and compiled again it is what it was.

Compiling them takes minutes each, so that is left out unless asked for, in an environment that has libtpu:

    python -m pytest tests/plan/test_full_shapes.py --full-shapes -n 0 -k v5p
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from maxtext.config.load import load
from maxtext.parallel.mesh import INNER
from maxtext.plan.program import Program, compile_program
from maxtext.plan.topology import GIB, make_devices, prepare_process, read_target
from tests.materials import absent

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "plans").glob("*.json"))}
# Those that say of what config they are; older ones do not.
REPEATABLE = {name: plan for name, plan in RECORDS.items() if "config" in plan}
ON_TPU = [name for name, plan in REPEATABLE.items() if "libtpu" in plan["program"]["versions"]]

# The goals of OLMo 3 7B with a batch of 4.2 M tokens: most GiB of temporaries a device.
MOST_GIB = {"olmo3_7b_v5p_128": 20, "olmo3_7b_tpu7x_128_remat_names_less": 45}
COLLECTIVE_BYTES = 1 << 28  # of a step: what carries weights is larger


def config_of(plan: dict[str, Any]):
    return load(str(ROOT / plan["config"]), plan["overrides"])


@pytest.mark.parametrize("name", REPEATABLE)
def test_a_record_is_of_its_config_as_it_stands(name: str):
    plan = REPEATABLE[name]
    cfg, mesh = config_of(plan), dict(plan["program"]["mesh"])
    mesh["fsdp"] *= mesh.pop(INNER, 1)
    assert plan["tokens_per_step"] == cfg.batch_tokens
    assert plan["gradient_accumulation_steps"] == cfg.train.gradient_accumulation_steps
    assert plan["remat"] == json.loads(json.dumps(dataclasses.asdict(cfg.train.remat)))
    given = {axis: getattr(cfg.mesh, axis) for axis in mesh}
    assert mesh == {axis: mesh[axis] if size == -1 else size for axis, size in given.items()}


@pytest.mark.parametrize("name", MOST_GIB)
def test_a_recorded_step_keeps_to_its_goals(name: str):
    program = Program.from_json(REPEATABLE[name]["program"])
    assert program.memory.temporaries <= MOST_GIB[name] * GIB
    assert program.matmul_cycles > 0.8 * program.cycles
    weights = [row for row in program.traffic if row.bytes_sent > COLLECTIVE_BYTES]
    assert {row.kind for row in weights} == {"all-gather", "reduce-scatter"}


@pytest.mark.full_shapes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ON_TPU)
def test_a_record_compiled_again_is_what_it_was(name: str):
    if importlib.util.find_spec("libtpu") is None:
        absent("libtpu")
    plan = REPEATABLE[name]
    target, before = read_target(plan["topology"]), Program.from_json(plan["program"])
    prepare_process(target)
    now = compile_program(config_of(plan), make_devices(target))
    assert isinstance(now, Program), now
    assert now.memory.temporaries < 1.03 * before.memory.temporaries
    assert now.cycles < 1.02 * before.cycles
    assert now.matmul_flops + now.kernel_flops < 1.01 * (before.matmul_flops + before.kernel_flops)
    assert now.matmul_cycles / now.cycles > before.matmul_cycles / before.cycles - 0.02
    assert now.kernel_names == before.kernel_names
    rows = [{(row.kind, row.axes, row.asynchronous): row.count for row in program.traffic
             if row.bytes_sent > COLLECTIVE_BYTES} for program in (now, before)]
    assert rows[0] == rows[1]
