"""Packed documents: the loss knows neither the padding id nor how much padding there is, nor its neighbours."""

import dataclasses

import jax
import numpy as np
import pytest

from maxtext.data.corpus import read_stdlib, read_topics
from maxtext.data.pipeline import reading
from maxtext.data.tokens import resolve
from tests.data.batches import loss_of, read
from tests.tiny import tiny_model

EOS = 0


@pytest.mark.parametrize("packing", ["best_fit", "padded"])
def test_padding_id_and_width_change_no_loss(write_tokens, make_config, packing):
    """Documents of 3 to 15 tokens in instances of 16 and of 24: with `padded`, the same targets among more padding."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 16, 24)
    path = write_tokens("a.npy", np.concatenate([[*rng.integers(2, 90, n - 1), EOS] for n in lengths]), np.uint8)
    losses = []
    for pad_id, width in ((1, 16), (EOS, 16), (95, 16), *([(1, 24)] if packing == "padded" else [])):
        cfg = make_config({"x": [path]}, batch=1, vocab_size=96, pad_id=pad_id, sequence_length=width, packing=packing,
                          document_masking=True)
        cfg = dataclasses.replace(cfg, model=tiny_model(n_layers=1, layer_pattern=("full",)),
                                  train=dataclasses.replace(cfg.train, compute_dtype="float32"))
        epoch = jax.tree.map(lambda *rows: np.concatenate(rows), *read(cfg, resolve(cfg).n_instances)[0])
        assert float(epoch.weights_BT.sum()) == reading(resolve(cfg))["trained"]
        losses.append(loss_of(cfg, epoch))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)  # rows come in another order, sums round differently
    assert losses[0] > 1


def test_a_million_tokens_of_real_chapters(write_tokens, make_config):
    """The manual's chapters and the library's modules as bytes: what each packing drops is counted, and how little."""
    chapters, size = [], 0
    for document in [*read_topics(), *read_stdlib()]:
        ids = [*(np.frombuffer(document.text.encode(), np.uint8).astype(np.uint16) + 1), EOS]
        chapters.append(np.array(ids, np.uint16))
        size += len(ids)
        if size >= 1_000_000:
            break
    assert size >= 1_000_000
    thirds = np.array_split(np.arange(len(chapters)), 3)
    files = [write_tokens(f"{i}.npy", np.concatenate([chapters[one] for one in third]))
             for i, third in enumerate(thirds)]
    T = 4096
    lengths = np.array([len(chapter) for chapter in chapters])
    for packing in ("chunk", "best_fit", "first_fit", "padded"):
        told = reading(resolve(make_config({"x": files}, batch=1, sequence_length=T, packing=packing)))
        assert told["tokens"] == size
        if packing == "chunk":
            rest = sum(int(lengths[third].sum()) % T for third in thirds)
            assert told["dropped"] == rest > 0, "what is left of each file, less than a sequence"
            assert told["padding"] == 0
        else:  # no document is longer than an instance after it is cut, and nothing else is lost
            assert told["dropped"] == int(np.maximum(lengths - T, 0).sum()) > 0
            assert 0 < told["padding"] < (0.06 if packing == "best_fit" else 0.8)
