"""The supervisor by itself, with workers that follow the protocol and train nothing."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.elastic import read_lines
from maxtext.config.load import to_yaml
from maxtext.config.schema import ElasticConfig, MeshConfig
from maxtext.elastic import supervisor as module
from maxtext.elastic.last_breath import killed_by
from maxtext.elastic.supervisor import Supervisor
from tests.runs import ROOT
from tests.tiny import tiny_config

STUB = (sys.executable, str(ROOT / "tests" / "elastic" / "stub_worker.py"))


class Ports:
    """In place of the process that hosts coordination services, which the stubs do not need."""

    made, dies = 0, False

    def __init__(self, root, environment, log):
        Ports.made += 1
        self.opened = 0

    def open(self, members):
        if self.opened == 1 and Ports.dies:
            raise BrokenPipeError
        self.opened += 1
        return f"127.0.0.1:{self.opened}"

    def knows(self, pid):
        pass

    def close(self):
        pass


class Watched:
    """A supervisor in a thread, and its journal."""

    def __init__(self, folder, workers=3, **elastic):
        self.root = folder / "memory"
        self.root.mkdir(parents=True)
        cfg = dataclasses.replace(
            tiny_config(global_batch=12), output_dir=str(folder), run_name="run", mesh=MeshConfig(data=-1, fsdp=1),
            elastic=dataclasses.replace(ElasticConfig(hang_seconds=0.6), **elastic))
        self.journal = Path(cfg.run_dir) / "elastic.jsonl"
        self.supervisor = Supervisor(cfg, to_yaml(cfg), workers, 1, str(self.root), False,
                                     os.environ | {"PYTHONPATH": str(ROOT)}, STUB)
        self.code = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        self.code = self.supervisor.run()

    def events(self, name):
        return [event for event in read_lines(self.journal) if event["event"] == name]

    def groups(self):
        return [event["members"] for event in self.events("opened")]

    def wait(self, what, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, read_lines(self.journal)
            assert self.thread.is_alive() or what(), read_lines(self.journal)
            time.sleep(0.01)

    def signal(self, number, *workers):
        for worker in workers:
            self.supervisor.processes[worker].popen.send_signal(number)

    def without_replacement(self, *workers):
        """Those that were just killed do not come back, until they are told nothing any more."""
        for worker in workers:
            self.tell(worker, "crash_early")

    def with_replacement(self, *workers):
        for worker in workers:
            (self.root / f"does_{worker}").unlink()

    def tell(self, worker, what):
        (self.root / f"does_{worker}").write_text(what)

    def end(self, seconds=20.0):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), read_lines(self.journal)
        return self.code


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Coordinator", Ports)
    made = []

    def make(**how):
        made.append(Watched(tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.request_stop(signal.SIGTERM)
        one.supervisor.request_stop(signal.SIGTERM)
        one.thread.join(10)


def test_deaths_at_one_moment_are_one_generation_and_all_grow_back(watch):
    one = watch()
    one.wait(lambda: one.groups() == [[0, 1, 2]])
    at = time.monotonic()
    one.signal(signal.SIGKILL, 0, 2)
    one.without_replacement(0, 2)
    one.wait(lambda: len(one.groups()) >= 2)
    one.with_replacement(0, 2)
    assert one.groups()[1] == [1], "not first without 0, which would wait for 2"
    deaths = one.events("death")[:2]
    assert sorted(event["worker"] for event in deaths) == [0, 2]
    # 0.01 and 0.1 s on a machine that has nothing else to do; by heartbeats it would be 0.6 s and more.
    assert max(event["monotonic"] for event in deaths) - at < 0.5
    assert one.events("opened")[1]["monotonic"] - at < 2.0
    one.wait(lambda: len(one.groups()[-1]) == 3)
    assert one.groups()[-1][0] == 1, "who lived through it is rank 0 now"
    growth = one.events("proposed")[-1]
    assert growth["gentle"]


def test_a_death_is_known_before_the_system_has_ended_the_process(watch, monkeypatch):
    """And the replacement waits for that, because both are the same worker."""
    poll, until = module.subprocess.Popen.poll, {}

    def late(popen):
        """As if its threads took a second to end."""
        if killed_by(popen.pid) is None:
            return poll(popen)
        return poll(popen) if time.monotonic() > until.setdefault(popen.pid, time.monotonic() + 1.0) else None

    one = watch()
    one.wait(lambda: one.groups() == [[0, 1, 2]])
    monkeypatch.setattr(module.subprocess.Popen, "poll", late)
    at = time.monotonic()
    one.signal(signal.SIGKILL, 1)
    one.wait(lambda: bool(one.events("death")))
    assert one.events("death")[0]["monotonic"] - at < 0.8
    assert one.events("death")[0]["code"] == -signal.SIGKILL
    one.wait(lambda: len(one.events("started")) == 4)
    assert one.events("started")[-1]["monotonic"] - at > 0.9
    monkeypatch.undo()


def test_of_a_process_on_its_way_out_only_a_signal_is_told():
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert killed_by(killed.pid) is None, "alive"
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # they have ended, and nobody has asked for their codes
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert killed_by(killed.pid) == signal.SIGKILL
    assert killed_by(ended.pid) is None
    assert (killed.wait(), ended.wait()) == (-signal.SIGKILL, 3)
    assert killed_by(killed.pid) is None, "gone"


def test_deaths_in_short_order_are_gathered(watch, monkeypatch):
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.5)
    one = watch()
    one.wait(lambda: bool(one.groups()))
    for worker in (0, 2):
        one.tell(worker, "crash_early")  # so that there is no replacement before long
    processes = dict(one.supervisor.processes)
    processes[0].popen.kill()
    one.wait(lambda: len(one.events("death")) == 1)
    processes[2].popen.kill()
    one.wait(lambda: len(one.groups()) >= 2)
    assert one.groups()[1] == [1]
    assert len(one.events("proposed")) == 2, "no proposal with a worker that died right after"


def test_the_host_of_the_services_is_started_again(watch, monkeypatch):
    monkeypatch.setattr(Ports, "made", 0)
    monkeypatch.setattr(Ports, "dies", True)
    one = watch()
    one.wait(lambda: bool(one.groups()))
    one.signal(signal.SIGKILL, 1)
    one.wait(lambda: len(one.groups()) >= 2)
    assert Ports.made >= 2
    assert one.events("coordinator died")


def test_a_silent_worker_is_killed_and_replaced(watch):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    process = one.supervisor.processes[1].popen
    one.signal(signal.SIGSTOP, 1)
    one.without_replacement(1)
    one.wait(lambda: [0, 2] in one.groups())
    one.with_replacement(1)
    assert process.returncode == -signal.SIGKILL
    assert one.events("hang")[0]["why"].startswith("no sign of life for 0.")
    one.wait(lambda: len(one.groups()[-1]) == 3)


def test_an_update_that_does_not_end_is_left_by_all_and_nobody_is_blamed(watch):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    for worker in range(3):
        one.tell(worker, "stuck")
    one.wait(lambda: len(one.groups()) >= 2)
    assert one.groups()[1] == [0, 1, 2]
    assert not one.events("death")
    assert one.events("stuck")


def test_who_does_not_leave_its_group_is_killed(watch, monkeypatch):
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.5)
    one = watch(hang_seconds=5.0)
    one.wait(lambda: bool(one.groups()))
    one.tell(2, "no_answer")
    one.signal(signal.SIGKILL, 0)
    one.wait(lambda: any(event["worker"] == 2 for event in one.events("death")))
    (one.root / "does_2").unlink()
    one.wait(lambda: one.groups()[-1] == [1] or len(one.groups()[-1]) == 3)
    assert "did not leave its group" in one.events("hang")[0]["why"]


def test_pause_waits_for_the_replacement(watch):
    one = watch(policy="pause", pause_seconds=15.0)
    one.wait(lambda: bool(one.groups()))
    one.signal(signal.SIGKILL, 1)
    one.wait(lambda: len(one.groups()) == 2)
    assert sorted(one.groups()[1]) == [0, 1, 2], "no group without it in between"


def test_pause_ends(watch):
    one = watch(policy="pause", pause_seconds=0.4)
    one.wait(lambda: bool(one.groups()))
    one.tell(1, "crash_early")
    one.signal(signal.SIGKILL, 1)
    one.wait(lambda: one.groups()[-1] == [0, 2])
    assert one.events("opened")[1]["monotonic"] - one.events("death")[0]["monotonic"] >= 0.4


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_or_a_failure_of_training_ends_the_run(watch, capsys, code):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    one.tell(1, f"exit {code}")
    assert one.end() == code
    assert "worker 1 was told to" in capsys.readouterr().err
    assert not one.root.exists(), "nothing is left in memory"


def test_of_the_last_words_those_of_rank_0_count(watch, capsys):
    """The others may know no more than that rank 0 has a reason."""
    one = watch()
    one.wait(lambda: bool(one.groups()))
    one.tell(1, "exit 3")
    one.wait(lambda: one.supervisor.control.outcome_of(1) is not None)
    one.tell(0, "exit 3")
    assert one.end() == 3
    assert capsys.readouterr().err == "worker 0 was told to\n"


def test_the_end_waits_for_rank_0_and_then_for_the_others(watch):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    for worker in (1, 0):
        one.tell(worker, "exit 0")
        one.wait(lambda worker=worker: worker not in one.supervisor.processes)
        time.sleep(0.3)
        assert one.code is None
    one.tell(2, "exit 0")
    assert one.end() == 0


def test_when_rank_0_dies_at_the_end_all_go_once_more(watch):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    for worker in (1, 2):
        one.tell(worker, "exit 0")
    one.wait(lambda: set(one.supervisor.processes) == {0})
    for worker in (1, 2):
        (one.root / f"does_{worker}").unlink()
    one.signal(signal.SIGKILL, 0)
    one.wait(lambda: len(one.groups()) >= 2)
    assert one.groups()[-1] == [0, 1, 2]
    one.signal(signal.SIGKILL, 1)
    one.without_replacement(1)
    one.wait(lambda: one.groups()[-1] == [0, 2])
    one.with_replacement(1)
    one.wait(lambda: len(one.groups()[-1]) == 3)


def test_too_many_changes_end_the_run_as_a_temporary_failure(watch, capsys):
    one = watch(regroups_per_hour=2)
    for count in (1, 2, 3):
        one.wait(lambda: bool(one.groups()) and len(one.groups()[-1]) == 3)
        one.signal(signal.SIGKILL, one.groups()[-1][0])
        one.wait(lambda count=count: len(one.events("death")) == count)
        with contextlib.suppress(AssertionError):
            one.wait(lambda: len(one.groups()[-1]) == 2, 1.0)
    assert one.end() == 75
    assert "2 changes of members within an hour (elastic.regroups_per_hour)" in capsys.readouterr().out


def test_workers_that_never_start_end_the_run(watch, monkeypatch):
    monkeypatch.setattr(module, "FRUITLESS", 1)
    one = watch()
    for worker in range(3):
        one.tell(worker, "crash_early")
    assert one.end() == 75


def test_sigterm_reaches_all(watch):
    one = watch()
    one.wait(lambda: bool(one.groups()))
    one.supervisor.request_stop(signal.SIGTERM)
    assert one.end() == 0
    assert not one.events("death")
