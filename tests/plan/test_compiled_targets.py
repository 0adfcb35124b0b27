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


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_a_dense_step_runs_the_kernels_once_and_gathers_its_weights(topology: str):
    program = compiled(config(DENSE, topology, remat=KEPT), topology)
    assert program.kernels == 3 * DENSE.n_layers  # forward, and two backward: what is kept spares a fourth
    assert program.silent_kernels == 0
    print(topology, program.memory, program.cycles, program.matmul_cycles, program.traffic)
    large = {row.kind for row in program.traffic if row.bytes_sent > 1 << 18}
    assert large == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_a_routed_step_multiplies_each_token_by_its_own_experts_alone(topology: str):
    cfg = config(ROUTED, topology, remat=RematConfig(mode="none"))
    program = compiled(cfg, topology)
    active = estimate(cfg, read_target(topology), program).model_flops
    assert program.silent_kernels == 0
    assert 0.9 < (program.matmul_flops + program.kernel_flops) / active < 1.15
