"""Settings of the process: memory that a CPU's programs free stays with the process."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALLS = 4
THP_DISABLE = 41  # of prctl: no transparent huge pages
PROGRAM = f"""
import ctypes, json, resource
assert ctypes.CDLL(None).prctl({THP_DISABLE}, 1, 0, 0, 0) == 0  # pages of one size on every machine
from maxtext.parallel.runtime import keep_freed_memory, prepare_runtime
prepare_runtime()
import jax, jax.numpy as jnp
x = jnp.ones(1 << 24)

@jax.jit
def twice(x):  # 64 MiB of temporaries, more than an arena of a thread holds
    return jax.lax.optimization_barrier(x + 1).sum() + jax.lax.optimization_barrier(jnp.sin(x)).sum()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    twice(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = [faults() for _ in range({CALLS})]
keep_freed_memory()
faults()
print(json.dumps([given_back, [faults() for _ in range({CALLS})]]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc gives large blocks back like this")
def test_a_cpu_program_finds_its_temporaries_where_the_last_call_left_them():
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "GLIBC_TUNABLES")}
    child = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, capture_output=True, timeout=120,
                           env=environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""})
    assert child.returncode == 0, child.stderr
    given_back, kept = json.loads(child.stdout.splitlines()[-1])
    # The least of a few calls: now and then a thread of the pool needs a page of its own.
    assert min(given_back) > (1 << 26) // 4096, "the temporaries are no longer cleared anew: this has lost its purpose"
    assert min(kept) < 100
