"""An attempt that must end now: in Python code, in a wait for devices, and in a call that never returns."""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from maxtext.checkpoint.tiers import Snapshots
from maxtext.elastic.attempt import Attempt, ElasticAttendance, Requests
from maxtext.train.attendance import MembersChanged
from maxtext.train.state import abstract_state
from maxtext.train.stop import MEMBERS
from tests.checkpoint.states import config, make_mesh, make_state
from tests.tiny import mesh_of, tiny_config


class Never:
    """In place of an array that a device will never finish."""

    polls = 0

    def is_ready(self):
        self.polls += 1
        return False


@pytest.fixture
def attendance(tmp_path):
    events = []
    snapshots = Snapshots(str(tmp_path), 0, "run", 0, None, events.append)
    made = ElasticAttendance(Requests(), snapshots, 4, lambda topic, words: [words], True,
                             lambda event, **details: events.append((event, details)), {})
    made.events = events
    return made


def leave(function, attendance):
    """Starts an attempt, leaves it after a moment; whether it ended, and how long that took."""
    attempt = Attempt(function, attendance)
    time.sleep(0.1)
    assert attempt.running
    began = time.monotonic()
    ended = attempt.leave()
    return attempt, ended, time.monotonic() - began


def test_a_wait_for_devices_ends(attendance):
    never = Never()
    attempt, ended, seconds = leave(lambda: attendance.fetch({"loss": never}), attendance)
    assert ended
    assert isinstance(attempt.result, MembersChanged)
    assert seconds < 0.06, "it asks between two polls"
    assert 10 < never.polls < 200, "every 2 ms, not as fast as it can"


def test_python_code_gets_an_exception(attendance):
    def tracing():
        while True:
            sum(range(1000))

    attempt, ended, seconds = leave(tracing, attendance)
    assert ended
    assert isinstance(attempt.result, MembersChanged)
    assert seconds < 1.0


def test_a_call_that_does_not_return_is_left_behind_and_does_nothing_when_it_does(attendance):
    held, wrote = threading.Event(), []

    def stuck():
        held.wait()  # as a collective whose peer died: in C, without Python's lock
        attendance.check()
        wrote.append("metrics")

    attempt, ended, seconds = leave(stuck, attendance)
    assert not ended
    assert attempt.running
    assert seconds < 0.6
    held.set()
    for _ in range(100):
        if not attempt.running:
            break
        time.sleep(0.01)
    assert isinstance(attempt.result, MembersChanged)
    assert not wrote


def test_results_come_as_numpy_and_errors_as_results(attendance):
    read = attendance.fetch({"loss": jnp.float32(2), "many": jnp.arange(3)})
    assert (read["loss"].item(), read["many"].tolist()) == (2.0, [0, 1, 2])
    attempt = Attempt(lambda: 1 // 0, attendance)
    while attempt.running:
        time.sleep(0.01)
    assert isinstance(attempt.result, ZeroDivisionError)


def test_nothing_is_committed_once_the_members_have_changed(tmp_path, attendance):
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), config(), config_text="a: 1")
    attendance.opened(checkpoints)
    checkpoints.save(1, make_state(make_mesh(2)), {})
    checkpoints.wait()
    attendance.abandon()
    checkpoints.save(2, make_state(make_mesh(2)), {})
    with pytest.raises(CheckpointError, match="members of the job changed"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.close()
    with pytest.raises(MembersChanged):
        attendance.check()
    with pytest.raises(MembersChanged), attendance.phase("eval"):
        pytest.fail("it may not begin")


def test_the_loop_hears_of_a_stop_and_of_new_members(attendance):
    stopper = attendance.stopper(time.monotonic(), None)
    assert stopper.reason() is None
    attendance._requests.regroup = True
    assert stopper.reason() == MEMBERS
    attendance._requests.stop = signal.SIGTERM
    assert stopper.reason() == "SIGTERM", "to end comes before to regroup"
    assert stopper.received == signal.SIGTERM


def test_phases_nest_and_updates_are_timed(attendance):
    attendance.entered("init")
    with attendance.phase("compile"):
        assert attendance.phase_name == "compile"
        with attendance.phase("data"):
            assert attendance.phase_name == "data"
        assert attendance.phase_name == "compile"
    assert [event for event, _ in attendance.events] == ["compile"]
    attendance.progress(5)
    assert (attendance.phase_name, attendance.step, attendance.longest) == ("step", 5, 0.0)
    time.sleep(0.05)
    attendance.progress(6)
    assert 0.05 <= attendance.longest < 1.0


def test_a_run_that_goes_back_finds_no_snapshot_of_the_branch_that_it_leaves(tmp_path, attendance, monkeypatch):
    """It will do updates of the same numbers, of which another member might still hold those of before."""
    state = {"w": jnp.arange(4.0)}
    assert attendance.restore(state, -1) is None
    assert attendance.snapshot(4, state, {}, wait=True)
    assert attendance.snapshot(8, state, {}, wait=False)
    assert list(tmp_path.rglob("*.slot"))
    monkeypatch.setattr(attendance._memory, "_exchange",
                        lambda topic, words: pytest.fail("a topic is used once in a group"))
    assert attendance.restore(state, 0) is None
    assert not list(tmp_path.rglob("*.slot"))
    assert attendance.snapshot(4, state, {}, wait=True)


def test_a_second_group_of_the_same_size_traces_nothing(attendance, monkeypatch):
    cfg, first = tiny_config(), mesh_of((2, 2, 1))
    expected = attendance.abstract(cfg, first)
    second = Mesh(first.devices[::-1], first.axis_names, axis_types=first.axis_types)
    monkeypatch.setattr("maxtext.train.attendance.abstract_state", lambda *_: pytest.fail("traced again"))
    again = attendance.abstract(cfg, second)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), again) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding.spec), expected)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(again)} == {second}
    monkeypatch.undo()
    other = attendance.abstract(cfg, mesh_of((1, 2, 1)))
    assert other == abstract_state(cfg, mesh_of((1, 2, 1))), "another size is another state"
