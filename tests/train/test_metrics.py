"""metrics.jsonl and TensorBoard events: one line a step whatever happens, and no failure reaches the training loop."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]  # made at run time
from tensorboardX.record_writer import masked_crc32c

from maxtext.config import schema
from maxtext.report.run_files import last_step, read_metrics
from maxtext.train import console
from maxtext.train.metrics import MetricsWriter


def config(tensorboard=False) -> schema.Config:
    return schema.Config(
        model=schema.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=8), optim=schema.OptimConfig(lr=1e-3),
        train=schema.TrainConfig(steps=10, global_batch=1), log=schema.LogConfig(tensorboard=tensorboard))


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(console, "_warned", set())


def write(folder, steps, resume_step=0, **kwargs):
    writer = MetricsWriter(str(folder), config(), resume_step=resume_step, **kwargs)
    for step in steps:
        writer.write(step, {"train/CE loss": step / 7})
    writer.close()


def lines(folder):
    return (folder / "metrics.jsonl").read_bytes().split(b"\n")


def steps(folder):
    return [record["step"] for record in read_metrics(str(folder / "metrics.jsonl"))]


def test_one_json_object_a_step_with_exact_numbers(tmp_path):
    writer = MetricsWriter(str(tmp_path), config(), resume_step=0)
    before = time.time()
    writer.write(1, {"train/CE loss": np.float32(0.1), "data/fingerprint": np.uint32(4294967295), "x": jnp.int32(3)})
    written = lines(tmp_path)
    assert len(written) == 2, "the line is in the file before close"
    assert written[1] == b""
    record = json.loads(written[0])
    assert before - 1 < record.pop("time/unix (s)") < time.time() + 1
    assert record == {"step": 1, "train/CE loss": float(np.float32(0.1)), "data/fingerprint": 4294967295, "x": 3}
    assert isinstance(record["data/fingerprint"], int)
    writer.close()
    writer.close()


def test_numbers_that_json_lacks_come_back(tmp_path):
    writer = MetricsWriter(str(tmp_path), config(), resume_step=0)
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": -np.inf})
    writer.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(lines(tmp_path)[0], parse_constant=refuse)["b"] == "Infinity"
    record = read_metrics(str(tmp_path / "metrics.jsonl"))[0]
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_a_second_write_of_a_step_is_merged_into_its_line(tmp_path):
    writer = MetricsWriter(str(tmp_path), config(), resume_step=0)
    writer.write(1, {"a": 0.1234567})
    writer.write(2, {"a": 0.1234567, "b": 1})
    writer.write(2, {"a": 5, "c": 2})
    writer.write(2, {"a": 0.1234567})
    writer.write(2, {"a": 0.1})  # a shorter line than before leaves nothing of the longer one
    assert len(lines(tmp_path)) == 3
    writer.write(3, {"a": 1})
    writer.close()
    records = [{k: v for k, v in r.items() if k != "time/unix (s)"}
               for r in read_metrics(str(tmp_path / "metrics.jsonl"))]
    assert records == [{"step": 1, "a": 0.1234567}, {"step": 2, "a": 0.1, "b": 1, "c": 2}, {"step": 3, "a": 1}]


def test_an_older_step_is_refused(tmp_path):
    writer = MetricsWriter(str(tmp_path), config(), resume_step=0)
    writer.write(5, {})
    with pytest.raises(AssertionError, match="step 4 after those of step 5"):
        writer.write(4, {})


@pytest.mark.parametrize("tail", [b"", b'{"step": 8, "train/C', b'{"step": 8}', b"\0\0\0"])
def test_resuming_drops_later_steps_and_a_torn_line(tmp_path, tail):
    write(tmp_path, range(1, 8))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    kept = lines(tmp_path)[:5]
    write(tmp_path, range(6, 9), resume_step=5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lines(tmp_path)[:5] == kept, "lines that stay keep every byte"
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.jsonl"]


def test_resuming_mends_a_file_with_doubled_and_damaged_lines(tmp_path, capsys):
    numbered = [b'{"step": %d, "n": %d}\n' % pair for pair in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1))]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*numbered[:3], b"garbage\n", *numbered[3:]]))
    write(tmp_path, [5], resume_step=4)
    records = read_metrics(str(tmp_path / "metrics.jsonl"))
    assert [(r["step"], r.get("n")) for r in records] == [(1, 0), (2, 1), (3, 1), (4, 1), (5, None)]
    assert "dropped 1 damaged lines" in capsys.readouterr().err


def test_after_a_resume_the_last_line_can_still_be_extended(tmp_path):
    write(tmp_path, range(1, 6))
    writer = MetricsWriter(str(tmp_path), config(), resume_step=4)
    writer.write(4, {"eval/lm/code/BPB": 2.0})
    writer.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    record = read_metrics(str(tmp_path / "metrics.jsonl"))[-1]
    assert (record["train/CE loss"], record["eval/lm/code/BPB"]) == (4 / 7, 2.0)


def test_a_fresh_run_in_a_used_folder_starts_over(tmp_path):
    write(tmp_path, [0, 1, 2])
    write(tmp_path, [0, 1], resume_step=0)
    assert steps(tmp_path) == [0, 1]


def test_kill_at_any_moment_loses_no_written_step(tmp_path):
    program = ("import sys\nfrom tests.train.test_metrics import MetricsWriter, config\n"
               "writer = MetricsWriter(sys.argv[1], config(), resume_step=0)\n"
               "step = 0\nwhile True:\n    step += 1\n"
               "    writer.write(step, {f'metric {i}': step / 7 for i in range(30)})\n    print(step, flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parents[2])
    assert child.stdout is not None
    for _ in range(200):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    printed = 200 + len(child.stdout.read().splitlines())
    child.wait()
    assert steps(tmp_path)[:printed] == list(range(1, printed + 1))
    assert last_step(str(tmp_path)) == steps(tmp_path)[-1]


def test_last_step(tmp_path):
    assert last_step(str(tmp_path)) == -1
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    assert last_step(str(tmp_path)) == -1
    long = b"x" * 100_000
    text = b'{"step": 41}\n{"step": 42, "a": "%s"}\n{"step": 43, "a": "%s' % (long, long)
    (tmp_path / "metrics.jsonl").write_bytes(text)
    assert last_step(str(tmp_path)) == 42


def test_reading_names_the_line_that_is_damaged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2\n{"step": 3}\n{"step"')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a metrics line"):
        read_metrics(str(path))
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [r["step"] for r in read_metrics(str(path))] == [1, 2]


def events(path):
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12:12 + length]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        assert struct.unpack("<I", data[12 + length:16 + length])[0] == masked_crc32c(body)
        found.append(Event.FromString(body))
        data = data[16 + length:]
    return found


def test_tensorboard_keeps_names_and_marks_a_resume(tmp_path):
    for resume_step, written in ((-1, (1, 2, 3)), (2, (3, 4)), (-1, (0, 1))):  # the last one starts all over
        writer = MetricsWriter(str(tmp_path), config(tensorboard=True), resume_step=resume_step)
        for step in written:
            writer.write(step, {"optim/LR (group 0)": 0.5, "eval/lm/code/CE loss": float("nan")})
        writer.close()
    first, second, third = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.suffix)
    version, *scalars = events(first)
    assert version.file_version == "brain.Event:2"
    assert [event.step for event in scalars] == [1, 2, 3]
    assert {value.tag: value.simple_value for value in scalars[0].summary.value}["optim/LR (group 0)"] == 0.5
    _, start, *scalars = events(second)
    assert (start.session_log.status, start.step) == (SessionLog.START, 3)
    assert [event.step for event in scalars] == [3, 4]
    _, start, *_ = events(third)
    assert (start.session_log.status, start.step) == (SessionLog.START, 0)


def test_a_full_disk_stops_no_training_and_warns_once(tmp_path, capsys, monkeypatch):
    writer = MetricsWriter(str(tmp_path), config(tensorboard=True), resume_step=0)
    writer.write(1, {"a": 1.0})
    real = os.pwrite

    def full(file, data, offset):
        return real(file, data[:20], offset)  # what fits

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        writer.write(2, {"a": 1.0})
        writer.write(3, {"a": 1.0})
    assert lines(tmp_path)[1:] == [b""], "no half line stays"
    error = capsys.readouterr().err
    assert error.count("warning:") == 1
    assert "No space left on device" in error
    writer.write(4, {"a": 1.0})  # there is room again
    writer.close()
    assert steps(tmp_path) == [1, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_events_on_a_full_disk_are_given_up(tmp_path, capsys):
    writer = MetricsWriter(str(tmp_path), config(tensorboard=True), resume_step=0)
    writer.write(1, {"a": 1.0})
    with open("/dev/full", "wb", buffering=0) as full:
        assert writer._events is not None
        writer._events._file = full
        writer.write(2, {"a": 1.0})
        writer.write(3, {"a": 1.0})
    writer.close()
    assert steps(tmp_path) == [1, 2, 3]
    assert capsys.readouterr().err.count("TensorBoard events are no longer written") == 1


def test_a_folder_that_cannot_be_written_warns_and_goes_on(tmp_path, capsys):
    (tmp_path / "run").write_text("a file where the folder should be")
    write(tmp_path / "run", [1, 2])
    assert capsys.readouterr().err.count("warning:") == 1


def test_only_the_primary_process_writes(tmp_path):
    write(tmp_path / "run", [1, 2], primary=False)
    assert not (tmp_path / "run").exists()
