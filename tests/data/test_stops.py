"""Every source that can be prepared, in every packing: five stops, each on another number of hosts."""

import dataclasses
import shlex

import jax
import numpy as np
import pytest

from maxtext import cli
from maxtext.config.schema import DataConfig
from tests.data.batches import STOPS, hosts_rows, read, tokens_of
from tests.data.test_data_page import SOURCES, write


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
        assert len(seen) == len(whole), "repeated = 0, missing = 0"
        assert np.array_equal(np.concatenate([np.concatenate(hosts) for hosts in seen]), tokens_of(whole))
        real = sum(64 * 4 if batch.real_B is None else int(batch.real_B.sum()) for batch in whole)
        assert states[-1]["source_tokens"] == {name: real}
        assert jax.tree.leaves(whole[0])
