"""Which snapshot a job goes on from: a pure function of what all its processes can see."""

import itertools
import random

import pytest

from maxtext.checkpoint.tiers import SnapshotId
from maxtext.checkpoint.tiers_vote import Listed, newest_complete

SHAPES = {"w": (8, 4), "step": ()}
HALF = {0: ("w", ((0, 4), (0, 4))), 1: ("w", ((4, 8), (0, 4)))}
STEP = ("step", ())


def at(step, generation=0):
    return SnapshotId(generation, step, "run")


def slot(path, identity, *parts):
    return Listed(path, identity, frozenset({STEP, *parts}))


def test_nothing_is_complete_without_slots():
    assert newest_complete([], SHAPES) is None


def test_the_newest_that_all_parts_are_there_of():
    old = [slot("a0", at(10), HALF[0]), slot("b0", at(10), HALF[1])]
    assert newest_complete(old, SHAPES) == at(10)
    half = [*old, slot("a1", at(20), HALF[0])]
    assert newest_complete(half, SHAPES) == at(10), "the other half of 20 is missing"
    assert newest_complete([*half, slot("b1", at(20), HALF[1])], SHAPES) == at(20)


def test_parts_of_different_snapshots_are_never_mixed():
    assert newest_complete([slot("a", at(10), HALF[0]), slot("b", at(20), HALF[1])], SHAPES) is None
    assert newest_complete([slot("a", at(10), HALF[0]), slot("b", at(10, 1), HALF[1])], SHAPES) is None


def test_copies_count_once():
    assert newest_complete([slot(path, at(10), HALF[0]) for path in "abc"], SHAPES) is None
    whole = ("w", ((0, 8), (0, 4)))
    assert newest_complete([slot(path, at(10), whole) for path in "abc"], SHAPES) == at(10)


def test_a_missing_or_unknown_array_is_not_complete():
    whole = ("w", ((0, 8), (0, 4)))
    assert newest_complete([Listed("a", at(10), frozenset({whole}))], SHAPES) is None
    assert newest_complete([slot("a", at(10), whole, ("other", ((0, 1),)))], SHAPES) is None


def test_the_generation_that_lived_last_comes_first():
    whole = ("w", ((0, 8), (0, 4)))
    assert newest_complete([slot("a", at(50, 1), whole), slot("b", at(45, 2), whole)], SHAPES) == at(45, 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_slots_does_not_matter(seed):
    slots = [slot(f"{half}{step}", at(step), HALF[half]) for half, step in itertools.product((0, 1), (10, 20))]
    slots.append(slot("new", at(30), HALF[0]))
    random.Random(seed).shuffle(slots)
    assert newest_complete(slots, SHAPES) == at(20)
