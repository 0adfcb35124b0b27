"""Tasks and the reference's rows inside a run: in its metrics, on its console, and the same offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.cli import main
from maxtext.train.loop import Outcome, train
from tests.eval.test_downstream import FILES
from tests.runs import Runs, lines, some_devices

TASKS = ("eval.tasks=[arc_easy_test_rc_5shot, codex_humaneval_gold_bpb_3shot]", f"eval.tasks_path={FILES}",
         "data.sequence_length=64")


def scores(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def test_a_run_scores_tasks_beside_its_held_out_sets(runs: Runs, tmp_path: Path, capsys,
                                                     monkeypatch: pytest.MonkeyPatch):
    cfg = runs.config("run", "train.steps=2", "eval.every=2", "eval.rows=truncated", "eval.batch=2", *TASKS)
    assert train(cfg, devices=some_devices(1)) == Outcome(2)
    recorded = {line["step"]: scores(line) for line in lines(cfg)}
    assert recorded[0].keys() == recorded[2].keys()
    assert recorded[1] == {}
    assert "eval/downstream/arc_easy_test_rc_5shot (length-normalized accuracy v2)" in recorded[0]
    assert "eval/downstream/codex_humaneval_gold_bpb_3shot (BPB v2)" in recorded[0]
    assert "eval/lm/prose/CE loss" in recorded[0]
    assert all(recorded[0][name] != recorded[2][name] for name in recorded[0] if name.endswith(("BPB v2)", "CE loss")))
    out = capsys.readouterr().out
    assert " | 2 tasks bpb " in out
    assert "arc_easy_test_rc_5shot, codex_humaneval_gold_bpb_3shot" in out
    # The same checkpoint offline, on 8 devices and in other batches of tasks: the same numbers.
    monkeypatch.chdir(tmp_path)
    assert main(["eval", cfg.run_dir, "--output", "offline.json"]) == 0
    offline = json.loads((tmp_path / "offline.json").read_text())["metrics"]
    assert offline == pytest.approx(recorded[2], rel=1e-5)


@pytest.mark.parametrize(("setting", "message"), [
    ("eval.tasks=[arc_easy_test_rc_5shot, piqa]", "'piqa' is no task name"),
    ("eval.tasks=[copa_rc_0shot]", "requests.jsonl does not exist"),
    ("eval.tasks_path=absent", "absent is no folder"),
])
def test_what_is_wrong_with_tasks_stops_a_run_before_its_first_update(runs: Runs, capsys, setting: str, message: str):
    assert cli.main(["train", *runs.arguments("run", *TASKS, setting)]) == 2
    assert message in capsys.readouterr().err
    assert not (runs.directory() / "metrics.jsonl").exists()
