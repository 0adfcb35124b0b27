"""Small train steps compiled for TPUs, with no TPU: kernels, kinds of collectives, memory, cycles and FLOPs."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import pytest

from maxtext.config.architecture import MoeConfig
from maxtext.config.schema import Config, MeshConfig, ModelConfig, RematConfig
from maxtext.plan.estimate import estimate
from maxtext.plan.program import Program, compile_program
from maxtext.plan.topology import make_devices, prepare_process, read_target
from tests.materials import absent
from tests.tiny import tiny_config

if importlib.util.find_spec("libtpu") is None:
    absent("libtpu")
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True, scope="module")
def environment():
    """A plan sets variables for its process; here they go back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def compiled(cfg: Config, topology: str) -> Program:
    target = read_target(topology)
    prepare_process(target)
    made = compile_program(cfg, make_devices(target))
    assert isinstance(made, Program), made
    return made


def config(model: ModelConfig, topology: str, **train) -> Config:
    """A step of four sequences of 256 tokens a device, the weights over all devices."""
    devices = read_target(topology).n_devices
    cfg = tiny_config(model, global_batch=4 * devices, compute_dtype="bfloat16", loss_chunk_tokens=1024, **train)
    data = dataclasses.replace(cfg.data, sequence_length=256, vocab_size=1024, prepared="never-read")
    return dataclasses.replace(cfg, data=data, mesh=MeshConfig(data=1, fsdp=devices, tensor=1))


DENSE = ModelConfig(vocab_size=1024, d_model=512, n_layers=2, n_heads=4, d_ff=1024, layer_pattern=("window",),
                    window=128)
KEPT = RematConfig(mode="names", save=("attention", "mlp_out"))
ROUTED = dataclasses.replace(DENSE, layer_pattern=("full",), window=None, d_model=256, n_heads=2, d_ff=None,
                             moe=MoeConfig(experts=64, top_k=8, d_expert=128))
WHOLE_SLICES = ["v5p:4x4x4", "v6e:8x8"]  # over all of whose devices XLA gathers by all-reduces

# Most MiB of temporaries and million cycles of the dense step on four chips: as compiled by libtpu 0.0.50, and a tenth.
BOUNDS = {"tpu7x:2x2x1": (73, 1.29), "v5p:2x2x1": (54, 1.95), "v6e:2x2": (26, 1.02)}


def large_kinds(program: Program) -> set[str]:
    """Kinds of the collectives that carry more than gains of norms and sums for metrics."""
    return {row.kind for row in program.traffic if row.bytes_sent > 1 << 18}


@pytest.mark.parametrize("topology", BOUNDS)
def test_a_dense_step_runs_the_kernels_once_and_gathers_its_weights(topology: str):
    program = compiled(config(DENSE, topology, remat=KEPT), topology)
    assert program.kernels == 3 * DENSE.n_layers  # forward, and two backward: what is kept spares a fourth
    assert program.silent_kernels == 0
    assert large_kinds(program) == {"all-gather", "reduce-scatter"}
    mib, cycles = BOUNDS[topology]
    assert 0.8 * mib < program.memory.temporaries / (1 << 20) < mib
    assert 0.8 * cycles < program.cycles / 1e6 < cycles


@pytest.mark.parametrize("topology", WHOLE_SLICES)
def test_weights_are_gathered_over_a_whole_slice(topology: str):
    """All-gathers and reduce-scatters, over one part of the slice after the other, and beside the matmuls."""
    cfg = config(dataclasses.replace(DENSE, n_layers=1, d_model=1024, n_heads=8), topology, remat=KEPT)
    program = compiled(cfg, topology)
    assert large_kinds(program) == {"all-gather", "reduce-scatter"}
    assert {row.axes for row in program.traffic if row.kind == "all-gather"} == {"fsdp", "fsdp_inner"}
    assert all(row.asynchronous for row in program.traffic if row.bytes_sent > 1 << 18)


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_a_routed_step_multiplies_each_token_by_its_own_experts_alone(topology: str):
    cfg = config(ROUTED, topology, remat=RematConfig(mode="none"))
    program = compiled(cfg, topology)
    active = estimate(cfg, read_target(topology), program).model_flops
    assert program.silent_kernels == 0
    assert 0.9 < (program.matmul_flops + program.kernel_flops) / active < 1.15


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
def test_a_sequence_shared_by_two_devices_compiles(strategy: str):
    cfg = config(DENSE, "v5p:2x2x1", remat=KEPT)
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(data=1, fsdp=2, context=2, tensor=1, context_strategy=strategy))
    program = compiled(cfg, "v5p:2x2x1")
    assert program.kernel_flops > 0
    assert program.silent_kernels == 0
    if strategy == "ulysses":
        assert "all-to-all" in {row.kind for row in program.traffic if row.axes == "context"}
