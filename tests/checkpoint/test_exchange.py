"""What processes tell each other, through whatever it goes."""

import jax
import numpy as np
import pytest

from maxtext.checkpoint.processes import all_agree, from_process_0
from maxtext.parallel import exchange


@pytest.fixture
def three(monkeypatch):
    """This process as rank 1 of three, which say what a test tells them."""
    others = {}
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    exchange.tell_through(lambda mine: [others.get(0, mine), mine, others.get(2, mine)])
    yield others
    exchange.tell_through(None)


def test_one_process_hears_itself():
    np.testing.assert_array_equal(exchange.all_values(np.arange(3)), [[0, 1, 2]])


def test_values_come_by_rank(three):
    three[0], three[2] = np.float32([7]).tobytes(), np.float32([9]).tobytes()
    np.testing.assert_array_equal(exchange.all_values(np.float32([8])), [[7], [8], [9]])


def test_the_word_of_process_0_counts(three):
    three[0] = np.int32([41]).tobytes()
    assert from_process_0(lambda: pytest.fail("asked in rank 1")) == 41


def test_all_must_agree(three):
    assert all_agree(True)
    three[2] = np.array([False]).tobytes()
    assert not all_agree(True)
