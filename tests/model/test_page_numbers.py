"""Numbers of docs/ that follow from the code alone are those of the code: of remat, and of shares of attention."""

from __future__ import annotations

import re

import numpy as np

from maxtext.config.load import load
from maxtext.config.schema import RematConfig
from maxtext.model.cost import kept_values
from maxtext.parallel.sequence import chunks_of
from maxtext.train.summary import optimizer_row
from tests.runs import ROOT

PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
PARALLELISM = (ROOT / "docs" / "parallelism.md").read_text()
BYTES = 2  # bfloat16


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_what_a_layer_keeps():
    model = load("olmo3_7b").model
    modes = re.findall(r"(?m)^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| [^|]+ \|$", PERFORMANCE)
    assert [mode for mode, *_ in modes] == ["none", "minimal", "balanced", "offload", "full"]
    for mode, device, host in modes:
        assert [BYTES * kept for kept in kept_values(model, RematConfig(mode=mode))] == [number(device), number(host)]
    names = re.findall(r"(?m)^\| `(\w+)` \| [^|]+ \| ([\d,]+) \|$", PERFORMANCE)
    assert len(names) == 6
    block = BYTES * kept_values(model, RematConfig(mode="full"))[0]
    for name, size in names:
        with_it = BYTES * kept_values(model, RematConfig(mode="names", save=(name,)))[0]
        assert (with_it if name == "block" else with_it - block) == number(size), name


def most_over_mean(length: int, devices: int, window: int | None, block: int, chunks: list[list[int]]) -> float:
    """Pairs of blocks with a query that sees a key, of the device that has most, over the mean of all.

    `chunks` are the runs of positions of each device, of length / (devices x runs of a device) each.
    """
    blocks = np.arange(length // block)
    first = np.zeros_like(blocks) if window is None else np.maximum(0, blocks * block - window + 1) // block
    pairs = blocks - first + 1  # of a block of queries, with all blocks of keys from the first that it sees to its own
    size = length // (devices * len(chunks[0])) // block
    work = [sum(pairs[chunk * size : (chunk + 1) * size].sum() for chunk in own) for own in chunks]
    return max(work) / (sum(work) / devices)


def test_how_evenly_chunks_share_the_work():
    rows = re.findall(r"(?m)^\| ([\d,]+) \| (\d+) \| (none|[\d,]+) \| ([\d,]+) \| (\d\.\d+) \| (\d\.\d+) \|$",
                      PARALLELISM)
    assert len(rows) == 4
    for length, devices, window, block, two, one in rows:
        count = int(devices)
        shape = number(length), count, None if window == "none" else number(window), number(block)
        zigzag = most_over_mean(*shape, [list(chunks_of(device, count)) for device in range(count)])
        natural = most_over_mean(*shape, [[device] for device in range(count)])
        assert (f"{zigzag:.2f}", f"{natural:.2f}") == (two, one), (length, window)


def test_the_share_of_the_weights_that_muon_updates():
    [said] = re.findall(r"Of OLMo 3 7B these are (\d+)% of the weights", PERFORMANCE)
    [share] = re.findall(r"Muon for ([\d.]+)% of", optimizer_row(load("olmo3_7b", ["optim.kind=muon"])))
    assert said == f"{float(share):.0f}"
