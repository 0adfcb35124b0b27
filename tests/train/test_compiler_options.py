"""Options of the compiler by platform."""

import pytest

from maxtext.parallel.compiler import TPU, compiler_options

pytestmark = pytest.mark.one_pass


def test_options_are_those_of_the_platform():
    assert compiler_options("tpu") == TPU
    assert compiler_options("cpu") == compiler_options("gpu") == {}


def test_what_a_user_sets_stands(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768 --xla_other=1")
    assert compiler_options("tpu") == {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}
