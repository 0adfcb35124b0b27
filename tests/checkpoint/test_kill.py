"""kill -9 at any moment of a save: the newest committed step restores bit for bit, and the next run cleans up."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext.checkpoint.manager import Checkpoints
from tests.checkpoint.states import abstract, child_environment, config, found, host_bits, make_mesh, make_state

WIDTH = 128
# Saves steps 1, 2, 3 ... with seed = step; at the named point of the save of step 3 the process kills itself.
CHILD = f"""
import os, signal, sys
from maxtext.checkpoint import manager, manifest, upkeep
from tests.checkpoint.states import config, make_mesh, make_state

directory, point, again = sys.argv[1], sys.argv[2], sys.argv[3] == "again"

def kill_around(module, name, when, matches):
    original = getattr(module, name)
    def wrapped(*arguments, **how):
        hit = matches(*arguments)
        if hit and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **how)
        if hit and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, wrapped)

armed = [False]
step_3 = lambda path, *rest: armed[0]
doomed = lambda path, *rest: armed[0] and path.endswith(".deleted.tmp")
points = {{
    "never": [],
    "begun": [(manager, "_begin", "after", step_3)],
    "arrays written": [(manifest, "record_files", "before", step_3)],
    "manifest staged": [(manifest, "stage", "after", step_3)],
    "committing": [(manifest, "commit", "before", step_3)],
    "committed": [(manifest, "commit", "after", step_3)],
    "deleting the old": [(upkeep.shutil, "rmtree", "before", doomed)],
}}
for module, name, when, matches in points[point]:
    kill_around(module, name, when, matches)
checkpoints = manager.Checkpoints(directory, config(keep_last=1))
print("ready", flush=True)
step = 0
while True:
    step += 1
    armed[0] = step == 3
    checkpoints.save(2 if again and step == 3 else step, make_state(make_mesh(2), seed=step, width={WIDTH}), {{}})
    checkpoints.wait()
    print("saved", step, flush=True)
"""


def start(directory: Path, point: str, how: str = "") -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(directory), point, how], env=child_environment(),
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def check(directory: Path, step: int, seed: int) -> None:
    """The next start restores `step`, whose arrays are those of `seed`, and nothing half-done is left on disk."""
    checkpoints = Checkpoints(str(directory), config(keep_last=1))
    restored = found(checkpoints.restore(abstract(make_mesh(4, 2), WIDTH)))
    checkpoints.close()
    assert restored.step == step
    assert host_bits(restored.state) == host_bits(make_state(make_mesh(2), seed=seed, width=WIDTH))
    left = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    assert not [name for name in left if "tmp" in name or ".bad" in name]
    for step_dir in directory.iterdir():
        assert len(os.listdir(step_dir)) == 2, "one manifest and one directory of arrays"


@pytest.mark.parametrize(
    ("point", "how", "step", "seed"),
    [
        ("begun", "", 2, 2),
        ("arrays written", "", 2, 2),
        ("manifest staged", "", 2, 2),
        ("committing", "", 2, 2),
        ("committed", "", 3, 3),
        ("deleting the old", "", 3, 3),
        ("committing", "again", 2, 2),
        ("committed", "again", 2, 3),
    ],
)
def test_killed_at(tmp_path: Path, point: str, how: str, step: int, seed: int):
    child = start(tmp_path, point, how)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert out.split("\n")[:3] == ["ready", "saved 1", "saved 2"]
    assert "saved 3" not in out
    check(tmp_path, step, seed)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment(tmp_path: Path, seed: int):
    """Once at least one step is saved, at a time drawn over about two saves."""
    child = start(tmp_path, "never")
    assert child.stdout is not None
    lines = iter(child.stdout.readline, "")
    for line in lines:
        if line.startswith("saved 1"):
            break
    time.sleep(random.Random(seed).uniform(0.0, 0.6))
    child.kill()
    saved = max([1, *(int(line.split()[1]) for line in lines if line.startswith("saved ") and line.endswith("\n"))])
    child.wait(timeout=60)
    child.stdout.close()
    checkpoints = Checkpoints(str(tmp_path), config(keep_last=1))
    newest = checkpoints.latest()
    checkpoints.close()
    assert newest in (saved, saved + 1), "a step that was reported as saved is there"
    check(tmp_path, newest, newest)
