"""Whole completions: the tokens that the full forward pass would choose, whatever the batches and the mesh."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from maxtext.generate.engine import generate
from maxtext.generate.sampler import Sampling, sample_rows
from maxtext.model.loss import logits
from tests.generate.families import FAMILIES, random_weights
from tests.tiny import mesh_of, tiny_config

MODEL = FAMILIES["olmo3"]
PROMPTS = [[5], [7, 1, 8, 2, 8, 1, 8], [3, 1, 4]]
TOKENS, VOCABULARY = 12, 90
DRAWN = Sampling(temperature=0.7, top_k=20, top_p=0.9)


@functools.cache
def weights(shape):
    return random_weights(MODEL, mesh_of(shape))


def drawn(shape=(1, 1, 1), **changes):
    with jax.set_mesh(mesh_of(shape)):
        return generate(weights(shape), MODEL, PROMPTS, TOKENS,
                        **{"sampling": DRAWN, "seed": 3, "vocabulary": VOCABULARY, "batch": 2} | changes)


def test_tokens_are_drawn_from_the_logits_of_the_full_forward_pass():
    new = drawn()
    assert [len(ids) for ids in new] == [TOKENS] * 3
    whole = np.zeros((3, 24), np.int32)
    for row, prompt, ids in zip(whole, PROMPTS, new, strict=True):
        row[: len(prompt) + TOKENS] = prompt + ids
    with jax.set_mesh(mesh_of((1, 1, 1))):
        full_BTV = np.array(jax.jit(lambda p, t: logits(p, t, tiny_config(MODEL)))(weights((1, 1, 1)), whole))
    full_BTV[..., VOCABULARY:] = -np.inf
    choose = jax.jit(functools.partial(sample_rows, sampling=DRAWN))
    for step in range(TOKENS):
        at = np.stack([full_BTV[b, len(prompt) - 1 + step] for b, prompt in enumerate(PROMPTS)])
        assert choose(at, np.arange(3), step, 3).tolist() == [ids[step] for ids in new]


def test_a_sample_depends_neither_on_the_batch_nor_on_the_mesh():
    alone = drawn()
    assert drawn(batch=1) == alone
    assert drawn((1, 2, 2)) == alone
    assert drawn(seed=4) != alone


def test_a_stop_id_ends_its_row():
    whole = drawn()
    stop = whole[1][4]
    cut = drawn(stop_ids=[stop])
    for ids, full in zip(cut, whole, strict=True):
        assert ids == (full[: full.index(stop) + 1] if stop in full else full)
    assert len(cut[1]) < TOKENS


@pytest.mark.parametrize(("change", "message"), [
    ({"prompts": [[1], []]}, "prompt 1 is empty; give at least one token"),
    ({"prompts": [[1, 96]]}, "prompt 0 has the id 96, but the model's vocabulary ends at 95; encode it with"),
    ({"stop_ids": [96]}, "the stop id 96 is not in the model's vocabulary, which ends at 95"),
    ({"max_new_tokens": 0}, "max_new_tokens 0 adds nothing; give 1 or more"),
])
def test_what_cannot_be_generated(change, message):
    with pytest.raises(ValueError, match=message):
        generate(**{"params": None, "cfg": MODEL, "prompts": PROMPTS, "max_new_tokens": 3} | change)
