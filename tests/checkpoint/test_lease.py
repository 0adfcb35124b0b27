"""Leases: one writer at a time on file systems that several machines share, whose clocks nobody compares."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxtext.checkpoint import lease, manifest
from maxtext.checkpoint.lease import Lease, LeaseError, acquire
from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from tests.checkpoint.states import child_environment, config

PATIENCE = 0.5
X = {"x": jax.ShapeDtypeStruct((3,), jnp.int32)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)


def on(machine: str, run_dir: Path, patience: float = PATIENCE) -> Lease:
    """A lease claimed by this process as if it ran on another machine."""
    return acquire(str(run_dir), lambda: manifest.counted(str(run_dir / "checkpoints")), machine=machine,
                   patience=patience)


def stop(held: Lease) -> None:
    """The holder dies, or stands still: no beat any more, and nothing released."""
    held._end.set()
    held._thread.join()


def save(run_dir: Path, held: Lease, step: int) -> Checkpoints:
    checkpoints = Checkpoints(str(run_dir / "checkpoints"), config(asynchronous=False), lease=held)
    checkpoints.save(step, {"x": jnp.full(3, step)}, {})
    return checkpoints


def test_a_living_holder_is_left_alone_and_named(tmp_path: Path):
    first = on("a", tmp_path)
    with pytest.raises(LeaseError, match=rf"another process is training in {tmp_path} \(process {os.getpid()} on .*, "
                                         r"since 20.*\); wait for it, stop it, or choose another run_name"):
        on("b", tmp_path)
    first.check()
    first.release()
    began = time.monotonic()
    second = on("b", tmp_path)
    assert time.monotonic() - began < PATIENCE, "nothing to wait for after a release"
    assert (first.token, second.token) == (1, 2)
    second.release()


@pytest.mark.parametrize(("machine", "waits"), [("a", False), ("b", True)])
def test_a_dead_holder_is_followed(tmp_path: Path, machine: str, waits: bool):
    """At once on its own machine, where the file lock has told that it is gone; elsewhere after a while."""
    stop(on("a", tmp_path))
    began = time.monotonic()
    second = on(machine, tmp_path)
    assert (time.monotonic() - began >= PATIENCE) is waits
    assert second.token == 2
    second.release()


def test_clocks_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the time of day nor the time of a file decides, so a jump of an hour changes nothing."""
    first = on("a", tmp_path)
    for hours in (-1, 1):
        monkeypatch.setattr(time, "time", lambda hours=hours: 1e9 + 3600 * hours)
        for path in (tmp_path / lease.DIRECTORY).iterdir():
            os.utime(path, (1e9, 1e9 + 3600 * hours))
        with pytest.raises(LeaseError):
            on("b", tmp_path)
    stop(first)
    second = on("b", tmp_path)
    assert second.token == 2
    second.release()


def test_of_many_that_claim_at_once_one_gets_it(tmp_path: Path):
    stop(on("a", tmp_path))
    held: list[Lease] = []
    refused: list[LeaseError] = []

    def claim(number: int) -> None:
        try:
            held.append(on(f"m{number}", tmp_path))
        except LeaseError as error:
            refused.append(error)

    claims = [threading.Thread(target=claim, args=(number,)) for number in range(6)]
    for one in claims:
        one.start()
    for one in claims:
        one.join()
    assert (len(held), len(refused)) == (1, 5)
    held[0].release()


def test_a_writer_that_lost_its_lease_saves_nothing(tmp_path: Path):
    old = on("a", tmp_path)
    checkpoints = save(tmp_path, old, 10)
    stop(old)
    new = on("b", tmp_path)
    with pytest.raises(CheckpointError, match=r"step 20 was not saved .*: another process took over .*process \d+ on"):
        checkpoints.save(20, {"x": jnp.full(3, 20)}, {})
    assert old.lost
    with pytest.raises(LeaseError):
        old.refuse_if_late()
    assert checkpoints.steps() == [10]
    assert not (tmp_path / "checkpoints" / "step_00000020" / manifest.NAME).exists()
    new.release()


def test_a_stale_manifest_that_slips_in_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture):
    """A writer that is held up between its last look and its rename, while another takes over and goes on."""
    old = on("a", tmp_path)
    zombie = save(tmp_path, old, 10)
    new: list[Lease] = []
    commit = manifest.commit

    def late(step_dir: str, token: int = 0) -> None:
        monkeypatch.setattr(manifest, "commit", commit)
        stop(old)
        new.append(on("b", tmp_path))
        commit(step_dir, token)

    monkeypatch.setattr(manifest, "commit", late)
    zombie.save(30, {"x": jnp.full(3, -1)}, {})
    assert (tmp_path / "checkpoints" / "step_00000030" / manifest.NAME).exists(), "the test has teeth"
    checkpoints = save(tmp_path, new[0], 20)
    restored = checkpoints.restore(X)
    assert restored is not None
    assert (restored.step, restored.state["x"].tolist()) == (20, [20, 20, 20])
    assert "step_00000030: was written under token 1, after token 2 had taken the lease" in caplog.text
    new[0].release()
    third = on("c", tmp_path)  # what did not count then does not count later
    assert checkpoints.steps() == [10, 20]
    third.release()
    checkpoints.close()


def test_two_writers_of_one_step_do_not_mix(tmp_path: Path):
    """Their arrays and their manifests have names of their own."""
    old = on("a", tmp_path)
    save(tmp_path, old, 10).close()
    stop(old)
    new = on("b", tmp_path)
    save(tmp_path, new, 10).close()
    assert sorted(os.listdir(tmp_path / "checkpoints" / "step_00000010")) == ["arrays-2-t2", "manifest.json"]
    assert manifest.read(str(tmp_path / "checkpoints" / "step_00000010")).token == 2
    new.release()


def test_checkpoints_that_have_all_gone_are_missed(tmp_path: Path):
    """A file system that is not mounted must not look like a new run."""
    held = on("a", tmp_path)
    save(tmp_path, held, 10).close()
    held.release()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    held = on("a", tmp_path)
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), config(), lease=held)
    with pytest.raises(CheckpointError, match=r"it holds none at all, though step 10 was saved \(is it mounted\?\)\. "
                                              r"Bring one back from a copy, or set checkpoint\.allow_fresh=true"):
        checkpoints.restore(X)
    checkpoints.close()
    fresh = Checkpoints(str(tmp_path / "checkpoints"), config(allow_fresh=True), lease=held)
    assert fresh.restore(X) is None
    fresh.close()
    held.release()


HOLD = """
import sys, time
from maxtext.checkpoint import lease
lease.BEAT_SECONDS = 0.05
held = lease.acquire(sys.argv[1], dict, machine='a')
print('held', flush=True)
while held.lost is None:
    time.sleep(0.01)
print(held.lost, flush=True)
"""


def test_a_stopped_process_finds_out_when_it_goes_on(tmp_path: Path):
    """SIGSTOP, another takes over, SIGCONT."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], env=child_environment(), text=True,
                             stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(LeaseError):
        on("b", tmp_path)
    child.send_signal(signal.SIGSTOP)
    held = on("b", tmp_path)
    child.send_signal(signal.SIGCONT)
    assert f"another process took over {tmp_path} (process {os.getpid()} on" in child.stdout.readline()
    child.wait(10)
    held.check()
    held.release()
    beat = json.loads((tmp_path / lease.DIRECTORY / "00000002.beat").read_text())
    assert beat["released"] is True
