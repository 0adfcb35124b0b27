"""Every source that can be prepared, every packing: five stops, on other numbers of hosts or in a new process."""

import dataclasses
import pickle
import shlex
import subprocess
import sys

import numpy as np
import pytest

from maxtext import cli
from maxtext.config.schema import DataConfig, StreamConfig
from tests.data.batches import STOPS, hosts_rows, read, tokens_of
from tests.data.record_files import TEXTS, jsonl
from tests.data.test_data_page import SOURCES, write
from tests.materials import imported
from tests.runs import ROOT

CONTINUE = """
import pickle, sys
from tests.data.batches import read, tokens_of
with open(sys.argv[1], "rb") as file:
    runs = pickle.load(file)
found = {name: [tokens_of(read(cfg, 3, position)[0]) for position in positions]
         for name, (cfg, positions) in runs.items()}
with open(sys.argv[2], "wb") as file:
    pickle.dump(found, file)
"""


@pytest.mark.parametrize("line", SOURCES, ids=lambda line: line.split("$OUT/")[1].split()[0])
def test_stops_in_each_source_and_packing_repeat_and_miss_nothing(tmp_path, make_config, line):
    write(tmp_path / "text", line)
    words = shlex.split(line.replace("$TEXT", str(tmp_path / "text")).replace("$OUT", str(tmp_path / "out")))
    name = words[words.index("--source") + 1].split("=")[0]
    assert cli.main([*words[1:], "--heldout-fraction", f"{name}=0"]) == 0
    for packing in ("chunk", "best_fit", "first_fit", "padded"):
        cfg = make_config({}, batch=4)
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=259), data=DataConfig(
            sequence_length=64, prepared=str(next((tmp_path / "out").iterdir())), packing=packing))
        whole, states = read(cfg, 12)
        seen: list[list[np.ndarray]] = []
        for (stop, hosts), until in zip(STOPS, [*(stop for stop, _ in STOPS[1:]), 12], strict=True):
            parts = [read(cfg, until - stop, states[stop], rows) for rows in hosts_rows(4, hosts)]
            assert {part[1][-1]["step"] for part in parts} == {until}, "hosts stop together"
            assert all(part[1][-1]["source_tokens"] == states[until]["source_tokens"] for part in parts)
            seen += [[part[0][place].tokens_BT for part in parts] for place in range(until - stop)]
        assert np.array_equal(np.concatenate([np.concatenate(hosts) for hosts in seen]), tokens_of(whole)), \
            "repeated = 0, missing = 0"
        real = sum(64 * 4 if batch.real_B is None else int(batch.real_B.sum()) for batch in whole)
        assert states[-1]["source_tokens"] == {name: real}


def test_a_new_process_goes_on_exactly_in_each_packing(tmp_path, make_config, write_tokens, monkeypatch):
    """What is neither in the position nor on disk is lost with the process. One process goes on from all stops."""
    imported("datasets")
    monkeypatch.setattr("maxtext.data.stream.ENCODE_ROWS", 2)
    monkeypatch.setattr("maxtext.data.stream.ANCHOR_ROWS", 3)
    (tmp_path / "tokenizer.bytes").touch()
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    stream = StreamConfig("hf", (str(tmp_path / "a.jsonl"),), tokenizer=str(tmp_path / "tokenizer.bytes"), tail="pad")
    ids = {"vocab_size": 259, "eos_id": 256, "pad_id": 257, "sequence_length": 64}
    path = write_tokens("a.npy", np.concatenate([[*text.encode(), 256] for text in TEXTS]))
    runs = {f"stream {packing}": make_config({}, batch=4, **ids, stream=stream, packing=packing)
            for packing in ("chunk", "padded")}
    runs |= {packing: make_config({"a": [path]}, batch=4, **ids, packing=packing)
             for packing in ("chunk", "best_fit", "first_fit", "padded")}
    straight = {name: read(cfg, 13) for name, cfg in runs.items()}
    positions = {name: [states[stop] for stop, _ in STOPS] for name, (_, states) in straight.items()}
    assert any(position["stream"]["anchor"] for position in positions["stream chunk"]), "the library's own position"
    (tmp_path / "stops").write_bytes(pickle.dumps({name: (cfg, positions[name]) for name, cfg in runs.items()}))
    done = subprocess.run([sys.executable, "-c", CONTINUE, str(tmp_path / "stops"), str(tmp_path / "found")], cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert [*found] == [*runs]
    for name, continued in found.items():
        for (stop, _), tokens in zip(STOPS, continued, strict=True):
            assert np.array_equal(tokens, tokens_of(straight[name][0][stop:stop + 3])), (name, stop)
