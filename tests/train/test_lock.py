"""A second trainer in the same run directory is refused; the lock goes with its process, however that ends."""

import signal
import subprocess
import sys

import pytest

from maxtext.cli import train
from maxtext.train.lock import RunInUseError, run_lock
from tests.runs import ROOT, Runs, contents

HOLD = """
import sys
from maxtext.train.lock import run_lock
with run_lock(sys.argv[1]):
    print('held', flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(runs: Runs):
    """Another process that trains in the run directory, as far as the lock is concerned."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(runs.directory())], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def test_a_second_trainer_is_refused_and_changes_nothing(runs, holder, capsys):
    before = contents(runs.directory())
    assert train(runs.arguments()) == 2
    assert capsys.readouterr().err == (f"another process is training in {runs.directory()}; wait for it, stop it, or "
                                       f"choose another run_name\n")
    assert contents(runs.directory()) == before


def test_a_killed_trainer_leaves_no_lock(runs, holder):
    with pytest.raises(RunInUseError), run_lock(str(runs.directory())):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(str(runs.directory())):
        pass


def test_the_lock_is_free_again_after_a_run(runs):
    with run_lock(str(runs.directory())):
        pass
    with run_lock(str(runs.directory())):
        pass


def test_a_place_that_cannot_be_written_is_left_to_others_to_report():
    with run_lock("/dev/null/run"):
        pass
