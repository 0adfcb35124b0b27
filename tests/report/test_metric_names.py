"""docs/metrics.md: the one table of metrics is the code's, and says each name once."""

import numpy as np
import pytest

from maxtext.config.architecture import MoeConfig
from maxtext.eval.tasks import Answer, _document_metrics
from maxtext.report.metric_names import METRICS, PAGE, matching, rewritten
from maxtext.train.records import router_record
from tests.end_to_end.test_metrics import EVALUATION, EVERY_UPDATE, START
from tests.tiny import tiny_config, tiny_model

RARE = {"model/parameters", "optim/LR (Muon)", "throughput/device/MFU", "time/snapshot (s)", "time/samples (s)",
        "time/comparison (s)", "data/tokens/code", "time/checkpoint (s)", "time/profile (s)", "time/gradient log (s)"}


def recorded():
    moe = MoeConfig(experts=4, top_k=2, d_expert=8, capacity_factor=1.5)
    cfg = tiny_config(tiny_model(moe=moe))
    router = dict.fromkeys(("imbalance", "entropy", "dropped", "load_balance", "z_loss"), np.ones(5))
    names = {*EVERY_UPDATE, *EVALUATION, *START, *RARE, *router_record(cfg, router)}
    for metric in ("bpb", "acc", "len_norm"):
        answers = [Answer(0, choice, 0, 3, 3, 2, 2) for choice in range(2)]
        names |= {f"eval/downstream/arc_easy ({key})" for key, _ in _document_metrics(metric, answers, np.ones(2))}
    return names


def test_every_name_has_one_row_and_every_row_a_name():
    names = recorded()
    assert {name: matching(name) for name in names if len(matching(name)) != 1} == {}
    assert {row for row, *_ in METRICS} - {matching(name)[0] for name in names} == set()


@pytest.mark.parametrize("name", ["train/CE", "train/block 1/load imbalance", "eval/lm/x/loss", "time/step (s) "])
def test_other_names_have_none(name):
    assert matching(name) == []


def test_the_page_shows_the_table():
    """`python -m maxtext.report.metric_names` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page
