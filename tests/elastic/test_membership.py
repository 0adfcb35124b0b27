"""The files in which supervisor and workers meet."""

import json

from maxtext.elastic.membership import Beat, Control, Generation, Journal
from maxtext.elastic.worker import Spec


def test_a_generation_is_seen_by_all_and_only_once_it_changes(tmp_path):
    supervisor, worker = Control(str(tmp_path)), Control(str(tmp_path))
    assert worker.generation() is None
    first = Generation(0, (0, 2), False, "127.0.0.1:1", False, 5.0)
    supervisor.publish(first)
    assert worker.generation() == first
    assert worker.generation() is worker.generation(), "not read again"
    second = Generation(0, (0, 2), False, "127.0.0.1:1", True, 5.0)
    supervisor.publish(second)
    assert worker.generation() == second


def test_answers_count_for_their_generation_and_later_ones(tmp_path):
    control = Control(str(tmp_path))
    control.answer(0, 3)
    control.answer(11, 4)
    assert control.answered(3) == {0, 11}
    assert control.answered(4) == {11}
    control.forget(11)
    assert control.answered(3) == {0}
    control.forget(11)


def test_beats_and_outcomes(tmp_path):
    control = Control(str(tmp_path))
    assert control.beat_of(1) is None
    beat = Beat(7, 2, "step", 40, 1.0, 0.25, 2.0)
    control.beat(1, beat)
    assert control.beat_of(1) == beat
    control.say_outcome(1, {"error": "why"})
    assert control.outcome_of(1) == {"error": "why"}


def test_a_journal_is_a_line_an_event(tmp_path):
    path = tmp_path / "run" / "elastic.jsonl"
    Journal(str(path), "supervisor").write("death", worker=1)
    Journal(str(path), "worker 0").write("left", generation=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["who"], line["event"]) for line in lines] == [("supervisor", "death"), ("worker 0", "left")]
    assert lines[0]["monotonic"] <= lines[1]["monotonic"]


def test_a_spec_comes_back(tmp_path):
    spec = Spec("c.yml", "root", "run", 2, 4, 99, True)
    (tmp_path / "spec.json").write_text(json.dumps(spec.__dict__))
    assert Spec.read(str(tmp_path / "spec.json")) == spec
