"""Options of the compiler by platform."""

import jax
import pytest

from maxtext.parallel.compiler import SPARSE_CORE_KINDS, SPARSE_CORES, TPU, compiler_options

pytestmark = pytest.mark.one_pass

H100 = "NVIDIA H100 80GB HBM3"


def test_options_are_those_of_the_platform():
    assert compiler_options("tpu", "TPU v4") == TPU
    assert compiler_options("tpu", "TPU7x") == compiler_options("tpu", "TPU v5 lite") == TPU
    assert all(compiler_options("tpu", kind) == TPU | SPARSE_CORES for kind in SPARSE_CORE_KINDS)
    assert compiler_options("cpu", "cpu") == compiler_options("gpu", H100) == {}


def test_a_run_that_must_repeat_its_bits_asks_gpus_for_it():
    assert compiler_options("gpu", H100, deterministic=True) == {"xla_gpu_deterministic_ops": "True"}
    assert compiler_options("tpu", "TPU v4", deterministic=True) == TPU
    # Known to XLA on every platform: another name would be an error here.
    jax.jit(lambda x: x + 1, compiler_options=compiler_options("gpu", H100, deterministic=True)).lower(1.0).compile()


def test_what_a_user_sets_stands(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768 --xla_other=1")
    assert compiler_options("tpu", "TPU v4") == {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
