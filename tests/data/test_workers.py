"""Reader processes and their parent: signals that are meant for it, and its sudden death."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve
from tests.runs import Runs, environment

ORPHANED = """\
import multiprocessing, os, signal, sys
from maxtext.config.load import load
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve

cfg = load(sys.argv[1], ["data.workers=1"])
batches = make_batches(cfg, resolve(cfg))
next(batches)
(worker,) = multiprocessing.active_children()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_run_stops_no_reader(runs: Runs, number: signal.Signals):
    """Ctrl-C, and schedulers that signal every process: the run may still need a batch before it stops by itself."""
    cfg = runs.config("run", "data.workers=1")
    batches, exact = make_batches(cfg, resolve(cfg)), make_batches(runs.config(), resolve(cfg))
    try:
        for step in range(30):  # more than is read ahead
            np.testing.assert_array_equal(next(batches).tokens_BT, next(exact).tokens_BT)
            if step == 1:
                (worker,) = multiprocessing.active_children()
                os.kill(worker.pid, number)
    finally:
        batches.close()
        exact.close()
    worker.join(timeout=10)
    assert not worker.is_alive()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")
def test_a_reader_ends_with_its_parent(runs: Runs):
    """Also when that is killed and can tell nobody."""
    child = subprocess.run([sys.executable, "-c", ORPHANED, str(runs.yaml)], env=environment(1), text=True,
                           stdout=subprocess.PIPE, timeout=60)
    assert child.returncode == -signal.SIGKILL
    worker, deadline = int(child.stdout), time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{worker}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":  # dead; nobody has asked for its exit status yet
                    return
        except FileNotFoundError:
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the reader outlived its parent")
