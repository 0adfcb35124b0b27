"""A second trainer in the same run directory is refused; the lock goes with its process, however that ends."""

import re
import signal
import socket
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
    def others() -> dict:
        return {name: found for name, found in contents(runs.directory()).items() if not name.startswith(".lease")}

    before = others()
    assert train(runs.arguments()) == 2
    who = rf"process {holder.pid} on {re.escape(socket.gethostname())}, since 20\d\d-\d\d-\d\dT[\d:]+\+00:00"
    assert re.fullmatch(rf"another process is training in {runs.directory()} \({who}\); wait for it, stop it, or "
                        rf"choose another run_name\n", capsys.readouterr().err)
    assert others() == before
    assert sorted(path.suffix for path in (runs.directory() / ".lease").iterdir() if path.suffix != ".tmp") == [
        ".base", ".beat", ".json"], "no claim was made"


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
