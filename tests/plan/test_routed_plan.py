"""A plan counts experts whose loops end with the data; for GPUs where JAX's plugin for CUDA is here."""

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
from tests.tiny import tiny_config

CUDA = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
ROUTED = ModelConfig(vocab_size=1024, d_model=256, n_layers=2, n_heads=2, layer_pattern=("full",), window=None,
                     d_ff=None, moe=MoeConfig(experts=64, top_k=8, d_expert=128))


@pytest.fixture(autouse=True)
def environment():
    """A plan sets variables for its process; here they go back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def routed(devices: int) -> Config:
    """Four sequences of 256 tokens a device: 128 rows for each of 64 experts, which are whole blocks."""
    cfg = tiny_config(ROUTED, global_batch=4 * devices, compute_dtype="bfloat16", loss_chunk_tokens=1024,
                      remat=RematConfig(mode="none"))
    data = dataclasses.replace(cfg.data, sequence_length=256, vocab_size=1024, prepared="never-read")
    return dataclasses.replace(cfg, data=data, mesh=MeshConfig(data=1, fsdp=devices, tensor=1))


@pytest.mark.parametrize("topology", ["cpu:4", pytest.param("h100:1x4", marks=pytest.mark.skipif(
    not CUDA, reason="compiling for a GPU needs the cuda extra"))])
def test_a_routed_step_multiplies_each_token_by_its_own_experts_alone(topology: str):
    """Forward and backward in both layers are six loops each; what is counted twice is attention's masked half."""
    target = read_target(topology)
    if target.chip is not None:
        prepare_process(target)
    cfg = routed(target.n_devices)
    program = compile_program(cfg, make_devices(target))
    assert isinstance(program, Program)
    assert program.unknown_loops == ()
    assert program.named_loops > 0
    made = estimate(cfg, target, program)
    assert 0.9 < (program.matmul_flops + program.kernel_flops) / made.model_flops < 1.15
    assert target.chip is None or any("experts shared all rows evenly" in line for line in made.assumptions)
