"""Every test sees 8 virtual CPU devices; the variables must stand before jax is imported, and go to child processes."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runs import Runs

os.environ["JAX_PLATFORMS"] = "cpu"
flag = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# Virtual devices share one thread pool: collectives that wait in it must leave room for what they wait for.
os.environ["PJRT_NPROC"] = "18"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
# What is tested is arithmetic, not speed: without LLVM's optimisations a train step compiles in half the time.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
# The same tiny models are compiled over and over, by child processes too: one cache for all processes of a test run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="maxtext-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


@pytest.fixture(scope="session")
def prepared_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed text, prepared: a tokenizer and token files of two sources."""
    from tests.runs import prepare_text

    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def runs(tmp_path: Path, prepared_text: Path) -> Runs:
    """Configs of small runs in a folder of this test alone."""
    from tests.runs import Runs

    return Runs(tmp_path, prepared_text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.work_units import ByUnit

    return ByUnit(config, log)


def pytest_collection_modifyitems(config, items):
    for marker in ("all_meshes", "full_shapes"):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out and not config.getoption(f"--{marker.replace('_', '-')}"):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):  # one of several processes
        from tests.work_units import rank, unit

        items.sort(key=lambda item: rank(unit(item.nodeid)))


def pytest_addoption(parser):
    parser.addoption("--all-meshes", action="store_true", help="run every family on every mesh, not on some")
    parser.addoption("--full-shapes", action="store_true", help="compile the whole models of docs/plans for TPUs again")
    parser.addoption("--oracle-cases", metavar="DIR",
                     help="replay every case of the reference found in DIR, instead of those in tests/oracles/cases")
    parser.addoption("--hf-folders", metavar="DIR",
                     help="convert every transformers folder in DIR that has an expected.npz of input_ids, logits and "
                          "hidden_states, instead of those in tests/oracles/hf")
