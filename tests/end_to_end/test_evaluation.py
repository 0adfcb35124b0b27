"""Held-out numbers of a run: the same for every batch and mesh, in true bytes, and without a trace in training."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece

from maxtext.data.tokens import resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.train.loop import Outcome, train
from maxtext.train.state import init_state
from tests.runs import HELD_OUT, TEXT, Runs, lines, reproducible, saved_bits, some_devices
from tests.tiny import mesh_of

EOS = 1
TARGETS = [1, 3, 31, 32, 10, 20, 5, 2, 17, 29, 8]  # scored tokens of 11 documents, each one row of 32


@pytest.fixture(scope="module")
def eleven_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [np.append(rng.integers(3, 384, count), EOS) for count in TARGETS]
    path = tmp_path_factory.mktemp("held_out") / "eleven.npy"
    np.concatenate(documents).astype(np.uint16).tofile(path)
    return path


def test_eleven_rows_score_the_same_in_every_batch_and_mesh(tmp_path: Path, prepared_text: Path, eleven_rows: Path):
    runs, scores = Runs(tmp_path, prepared_text), {}
    for shape in ((1, 1, 1), (1, 8, 1)):
        for batch in (1, 4, 8, 16):
            cfg = runs.config("run", f"eval.batch={batch}", f"eval.sets.eleven.paths=[{eleven_rows}]")
            with jax.set_mesh(mesh_of(shape)):
                evaluate = Evaluations(cfg, resolve(cfg), mesh_of(shape))
                scores[shape, batch] = evaluate(init_state(cfg).params)
    exact = scores[(1, 1, 1), 1]
    assert exact["eval/lm/eleven/tokens"] == sum(TARGETS)
    assert exact["eval/lm/eleven/CE loss"] == pytest.approx(math.log(384), rel=0.05)
    for key, score in scores.items():
        assert score["eval/lm/eleven/tokens"] == sum(TARGETS), key
        assert score["eval/lm/eleven/CE loss"] == pytest.approx(exact["eval/lm/eleven/CE loss"], abs=1e-5), key
        assert score["eval/lm/eleven/PPL"] == pytest.approx(math.exp(score["eval/lm/eleven/CE loss"]), rel=1e-12), key


@pytest.fixture(scope="module")
def with_evaluations(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path):
    """A run of 12 updates that evaluates every 5."""
    cfg = Runs(tmp_path_factory.mktemp("with"), prepared_text).config("run", "train.steps=12", "eval.every=5")
    assert train(cfg, devices=some_devices(1)) == Outcome(12)
    return cfg


def test_a_run_evaluates_before_the_first_update_every_n_and_at_the_end(with_evaluations):
    records = lines(with_evaluations)
    assert [record["step"] for record in records] == list(range(13))
    evaluated = [record for record in records if "eval/lm/code/CE loss" in record]
    assert [record["step"] for record in evaluated] == [0, 5, 10, 12]
    losses = [record["eval/lm/micro/CE loss"] for record in evaluated]
    assert sorted(losses, reverse=True) == losses
    assert losses[-1] < 0.8 * losses[0]


def test_bits_per_byte_are_those_of_the_text(with_evaluations, prepared_text: Path):
    """All UTF-8 bytes of the held-out files but those of each document's first token, counted from the files."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(prepared_text / "tokenizer.model"))
    for record in (record for record in lines(with_evaluations) if "eval/lm/code/CE loss" in record):
        nats, counts, sizes = {}, {}, {}
        for name, files in HELD_OUT.items():
            texts = [(TEXT / name / file).read_bytes() for file in files]
            ids = [model.encode(text.decode()) for text in texts]
            first = [model.id_to_piece(document[0]).replace("\u2581", " ").encode() for document in ids]
            for text, piece in zip(texts, first, strict=True):
                assert text.startswith(piece)
            sizes[name] = sum(map(len, texts)) - sum(map(len, first))
            counts[name] = sum(map(len, ids))  # the first token is not scored, the end of document is
            nats[name] = record[f"eval/lm/{name}/CE loss"] * counts[name]
            assert record[f"eval/lm/{name}/tokens"] == counts[name]
            assert record[f"eval/lm/{name}/PPL"] == pytest.approx(math.exp(record[f"eval/lm/{name}/CE loss"]))
            assert record[f"eval/lm/{name}/BPB"] == pytest.approx(nats[name] / math.log(2) / sizes[name], rel=1e-9)
        micro = sum(nats.values()) / sum(counts.values())
        assert record["eval/lm/micro/CE loss"] == pytest.approx(micro, rel=1e-9)
        assert record["eval/lm/micro/PPL"] == pytest.approx(math.exp(micro), rel=1e-9)
        assert record["eval/lm/micro/BPB"] == pytest.approx(
            sum(nats.values()) / math.log(2) / sum(sizes.values()), rel=1e-9)
        macro = (record["eval/lm/code/CE loss"] + record["eval/lm/prose/CE loss"]) / 2
        assert record["eval/lm/macro/CE loss"] == pytest.approx(macro, rel=1e-9)
        assert abs(macro - micro) > 1e-4


def test_evaluation_leaves_no_trace_in_training(runs: Runs, with_evaluations):
    without = runs.config("run", "train.steps=12", "eval.every=null")
    assert train(without, devices=some_devices(1)) == Outcome(12)
    trained = [{name: value for name, value in record.items() if not name.startswith("eval/")}
               for record in reproducible(lines(with_evaluations))]
    assert reproducible(lines(without)) == trained
    assert len({record["data/fingerprint"] for record in trained[1:]}) == 12
    assert saved_bits(without, 12) == saved_bits(with_evaluations, 12)
