"""Downstream tasks as rows of tokens, and their metrics from the likelihoods of those rows.

The rules are those of ai2-olmo-eval 0.8.5 (`olmo_eval/tasks.py`, `metrics.py`) under OLMo-core's metric names
(`train/callbacks/evaluator_callback.py`). Context and continuation are tokenised apart; the query is both without the
last token, cut on the left to the context length.

Dims: T position, C choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxtext.data.tokenizer import Tokenizer
from maxtext.eval.catalogue import Metric, TaskError, find_task
from maxtext.eval.requests import Question, read_questions


class Answer(NamedTuple):
    """One scored answer: lengths in characters and UTF-8 bytes, whole and (`_v1`) without the first character."""

    document: int
    choice: int
    right: int
    characters: int
    bytes: int
    characters_v1: int
    bytes_v1: int


class Row(NamedTuple):
    """One forward pass.

    query_T: int32 ids. first: position whose prediction is the first scored one. targets: int32 ids that are scored:
    the tokens of the one answer, at first, first + 1, ...; or, when `fast`, the choices' single tokens, all at first.
    """

    query_T: np.ndarray
    first: int
    targets: np.ndarray
    fast: bool
    answers: tuple[Answer, ...]


class Task(NamedTuple):
    name: str
    metric: Metric
    rows: tuple[Row, ...]


def load_task(name: str, folder: Path, tokenizer: Tokenizer, context_length: int) -> Task:
    """Reads and tokenises a task. Raises TaskError when it is unknown, its files are bad, or it does not fit."""
    found = find_task(name)
    questions = read_questions(name, found, folder)
    ids = _encode(tokenizer, [text for q in questions for text in (q.context, q.continuation)])
    if found.fast:
        return Task(name, found.metric, tuple(_fast_rows(name, questions, ids, context_length)))
    rows = []
    for question in questions:
        continuation = ids[question.continuation]
        query, first = _query(name, question, ids[question.context], continuation, context_length)
        rows.append(Row(query, first, np.array(continuation, np.int32), False, (_answer(question),)))
    return Task(name, found.metric, tuple(rows))


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, list[int]]:
    """Ids of each text; a context that several answers share is tokenised once."""
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, tokenizer.encode_batch(unique), strict=True))


def _query(name: str, question: Question, context: list[int], continuation: list[int],
           context_length: int) -> tuple[np.ndarray, int]:
    query = (context + continuation[:-1])[-context_length:]
    first = len(query) - len(continuation)
    if not continuation or first < 0:
        place = f"task {name}: question {question.document}"
        if not context or not continuation:
            raise TaskError(f"{place} has an empty context or an empty answer")
        raise TaskError(f"{place}: its answer has {len(continuation)} tokens, all but the last of which must stand "
                        f"after one of context in data.sequence_length {context_length}; set that to "
                        f"{len(continuation)} or more")
    return np.array(query, np.int32), first


def _answer(question: Question) -> Answer:
    text = question.continuation
    return Answer(question.document, question.choice, question.answer, len(text), len(text.encode()), len(text) - 1,
                  len(text[1:].encode()))


def _fast_rows(name: str, questions: Iterable[Question], ids: Mapping[str, list[int]],
               context_length: int) -> Iterable[Row]:
    """One row a question. The first answer's lengths stand for all, as in the package: a letter is like another."""
    documents: dict[int, list[Question]] = {}
    for question in questions:
        documents.setdefault(question.document, []).append(question)
    for choices in documents.values():
        choices.sort(key=lambda q: q.choice)
        tokens = [ids[q.continuation] for q in choices]
        if long := [q.continuation for q, t in zip(choices, tokens, strict=True) if len(t) != 1]:
            raise TaskError(f"task {name}: the answer {long[0]!r} is {len(ids[long[0]])} tokens with this tokenizer, "
                            f"but a fast task needs one; use {name.removesuffix('_fast')}")
        query, first = _query(name, choices[0], ids[choices[0].context], tokens[0], context_length)
        answer = _answer(choices[0])
        answers = tuple(answer._replace(choice=q.choice) for q in choices)
        yield Row(query, first, np.array([t[0] for t in tokens], np.int32), True, answers)


def task_metrics(task: Task, nats: Sequence[np.ndarray]) -> dict[str, float]:
    """The metrics of a task under OLMo-core's names.

    Args:
      task: the task.
      nats: for each of its rows, the summed negative log-likelihood of each of its answers, in nats.

    Returns:
      Names such as `eval/downstream/arc_easy_test_bpb_5shot (BPB v2)`. v2 counts all characters (or bytes) of an
      answer, the older v1 leaves out the first, usually a space.
    """
    documents: dict[int, list[tuple[Answer, float]]] = {}
    for row, row_nats in zip(task.rows, nats, strict=True):
        for answer, value in zip(row.answers, row_nats, strict=True):
            documents.setdefault(answer.document, []).append((answer, float(value)))
    sums: dict[str, list[float]] = {}
    for scored in documents.values():
        scored.sort(key=lambda pair: pair[0].choice)
        for key, value in _document_metrics(task.metric, [a for a, _ in scored], np.array([v for _, v in scored])):
            sums.setdefault(key, []).append(value)
    return {f"eval/downstream/{task.name} ({key})": math.fsum(values) / len(values) for key, values in sums.items()}


def _document_metrics(metric: Metric, answers: list[Answer], nats_C: np.ndarray) -> Iterable[tuple[str, float]]:
    """(name, value) of one question."""
    right = answers[0].right
    one = answers[right]
    for version, characters, size in (("", one.characters_v1, one.bytes_v1), (" v2", one.characters, one.bytes)):
        yield f"BPB{version}", _ratio(nats_C[right] / math.log(2), size)
        if metric == "bpb":
            continue
        scores_C = -nats_C
        if metric == "len_norm":
            lengths = [a.characters if version else a.characters_v1 for a in answers]
            scores_C = np.array([_ratio(score, length) for score, length in zip(scores_C, lengths, strict=True)])
        log_soft = float(scores_C[right] - np.logaddexp.reduce(scores_C))
        yield f"CE loss{version}", _ratio(nats_C[right], characters)
        yield f"soft loss{version}", math.exp(log_soft)
        yield f"log soft loss{version}", log_soft
    if metric != "bpb":
        # Both versions are decided by whole lengths.
        name = "accuracy" if metric == "acc" else "length-normalized accuracy"
        whole = -nats_C / (1 if metric == "acc" else np.array([a.characters for a in answers]))
        yield from ((f"{name}{version}", float(int(np.argmax(whole)) == right)) for version in ("", " v2"))


def _ratio(value: float, length: int) -> float:
    """An answer of one character has no length without it: infinite, as dividing by 0 is elsewhere."""
    return float(value) / length if length else math.copysign(math.inf, value)
