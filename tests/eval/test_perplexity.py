"""Held-out perplexity against its definition in plain numpy, in both styles, on several meshes and batches."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.config.schema import EvalConfig, EvalSetConfig, SourceConfig
from maxtext.data import DataError
from maxtext.data.order import instance_order
from maxtext.data.tokens import ResolvedData, resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.eval.perplexity import Perplexity, kept_documents
from maxtext.model.loss import logits
from tests.eval.models import random_decoder
from tests.tiny import mesh_of, tiny_config

EOS, LENGTH = 94, 16
# Tokens in each document, its end included: shorter and longer than the sequence, exactly as long, and only an end.
SIZES = {"a": [5, 16, 40, 1, 17], "b": [33, 2, 15, 16, 9, 64]}


def documents() -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return {name: [np.append(rng.integers(0, EOS, n - 1), EOS).astype(np.uint8) for n in sizes]
            for name, sizes in SIZES.items()}


@pytest.fixture
def data(tmp_path: Path) -> ResolvedData:
    """Set b has two files, one of which ends in text without an end of document."""
    sets = documents()
    paths = {"a": [tmp_path / "a.bin"], "b": [tmp_path / "b0.bin", tmp_path / "b1.bin"]}
    np.concatenate(sets["a"]).tofile(paths["a"][0])
    np.concatenate([*sets["b"][:2], np.arange(7, dtype=np.uint8)]).tofile(paths["b"][0])
    np.concatenate(sets["b"][2:]).tofile(paths["b"][1])
    bytes_of = (np.arange(96) % 5).astype(np.uint8)
    return ResolvedData(96, EOS, 95, np.dtype(np.uint8), (), {k: tuple(map(str, v)) for k, v in paths.items()},
                        bytes_of, LENGTH, "")


def config(rows: str, batch: int):
    return dataclasses.replace(tiny_config(), eval=EvalConfig(every=1, batch=batch, rows=rows))


@pytest.fixture(scope="module")
def losses():
    """(document, start, stop) -> nats of the tokens after start up to stop, each row of tokens run by itself."""
    cfg, mesh = tiny_config(), mesh_of((1, 1, 1))
    params = random_decoder(cfg.model, mesh)
    run = jax.jit(lambda p, tokens: logits(p, tokens, cfg))

    def of(tokens: np.ndarray) -> np.ndarray:
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens) - 1] = tokens[:-1]
        with jax.set_mesh(mesh):
            logits_TV = np.asarray(run(params, padded[None]))[0, : len(tokens) - 1].astype(np.float64)
        return np.logaddexp.reduce(logits_TV, axis=-1) - logits_TV[np.arange(len(tokens) - 1), tokens[1:]]

    return of


@pytest.mark.parametrize(("shape", "batch"), [((1, 1, 1), 1), ((2, 2, 2), 3), ((1, 8, 1), 4)])
def test_whole_scores_every_token_but_the_first_once(shape, batch: int, data: ResolvedData, losses):
    cfg, mesh = config("whole", batch), mesh_of(shape)
    metrics = Perplexity(cfg, data, mesh)(random_decoder(cfg.model, mesh))
    for name, docs in documents().items():
        nats = [losses(d[i : i + LENGTH + 1]) for d in docs for i in range(0, len(d) - 1, LENGTH)]
        count = sum(len(d) - 1 for d in docs)
        assert metrics[f"eval/lm/{name}/tokens"] == count == sum(map(len, nats))
        loss = math.fsum(np.concatenate(nats)) / count
        assert metrics[f"eval/lm/{name}/CE loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics[f"eval/lm/{name}/PPL"] == pytest.approx(math.exp(loss), rel=1e-6)
        size = sum(int(data.token_bytes[d[1:]].sum()) for d in docs)
        assert metrics[f"eval/lm/{name}/BPB"] == pytest.approx(loss * count / math.log(2) / size, rel=1e-6)


@pytest.mark.parametrize(("shape", "batch"), [((1, 1, 1), 4), ((2, 2, 2), 4), ((1, 8, 1), 3)])
def test_truncated_follows_the_reference(shape, batch: int, data: ResolvedData, losses):
    """One row a document, n entries of which one is 0, and only what a complete batch of all sets' shuffle holds."""
    cfg, mesh = config("truncated", batch), mesh_of(shape)
    metrics = Perplexity(cfg, data, mesh)(random_decoder(cfg.model, mesh))
    pairs = [(name, d[:LENGTH]) for name, docs in documents().items() for d in docs]
    order = np.arange(len(pairs), dtype=np.uint32)
    np.random.Generator(np.random.PCG64(1)).shuffle(order)
    kept = sorted(order[: len(pairs) // batch * batch])
    assert 0 < len(kept) < len(pairs)
    for name in SIZES:
        chosen = [pairs[i][1] for i in kept if pairs[i][0] == name]
        entries = sum(map(len, chosen))
        loss = math.fsum(float(losses(d).sum()) for d in chosen if len(d) > 1) / entries
        assert metrics[f"eval/lm/{name}/tokens"] == entries
        assert metrics[f"eval/lm/{name}/CE loss"] == pytest.approx(loss, abs=1e-6)


def test_styles_and_batches_differ_where_they_should(data: ResolvedData):
    mesh = mesh_of((1, 1, 1))
    params = random_decoder(tiny_config().model, mesh)
    results = {(rows, batch): Perplexity(config(rows, batch), data, mesh)(params)["eval/lm/a/CE loss"]
               for rows in ("whole", "truncated") for batch in (1, 2)}
    assert results["whole", 1] == pytest.approx(results["whole", 2], abs=1e-6)
    assert abs(results["truncated", 1] - results["truncated", 2]) > 1e-4  # of 11 documents, one of a is left out
    assert results["truncated", 1] < results["whole", 1]  # the zeros


def test_kept_documents_are_those_of_the_pooled_shuffle():
    kept = kept_documents({"a": 9, "b": 9}, 4)
    left_out = instance_order(18, seed=0, epoch=1)[16:]
    assert sorted(np.flatnonzero(~np.concatenate([kept["a"], kept["b"]]))) == sorted(left_out)
    assert kept_documents({"a": 3}, 3)["a"].all()


def test_too_few_documents_are_refused(data: ResolvedData):
    with pytest.raises(DataError, match=r"have 11 documents and eval.batch is 12; lower eval.batch"):
        Perplexity(config("truncated", 12), data, mesh_of((1, 1, 1)))
    last = int(instance_order(9, seed=0, epoch=1)[-1])
    counts = {name: size for name, size in (("before", last), ("tiny", 1), ("after", 8 - last)) if size}
    with pytest.raises(DataError, match="no document of tiny is in a complete batch"):
        kept_documents(counts, 8)


def test_evaluation_needs_no_training_files(data: ResolvedData, tmp_path: Path):
    """As on a machine that only evaluates."""
    cfg = tiny_config()
    cfg = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, dtype="uint8", sources={"gone": SourceConfig(paths=("gone.bin",))}),
        eval=EvalConfig(sets={name: EvalSetConfig(paths) for name, paths in data.eval_sets.items()}))
    with pytest.raises(DataError, match=r"gone.bin"):
        resolve(cfg)
    resolved = resolve(cfg, training=False)
    assert resolved.eval_sets == data.eval_sets
    assert resolved.parts == ()
    assert Evaluations(cfg, resolved, mesh_of((1, 1, 1)))
    assert not Evaluations(cfg, dataclasses.replace(resolved, eval_sets={}), mesh_of((1, 1, 1)))
