"""Samples of a run: when they are taken, what is kept of them when it is resumed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.eval.completion import Completion
from maxtext.report.write import write_report
from maxtext.train.loop import Outcome, train
from maxtext.train.samples import SampleFile
from tests.runs import Runs, lines, some_devices

ONE = some_devices(1)
PROMPTS = ("generate.prompts=['The list', 'def ']", "generate.tokens=5", "train.steps=6", "checkpoint.every=2")


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_samples_go_with_evaluations_and_a_resumed_run_has_each_once(runs: Runs, capsys):
    """Cut off after the samples of update 4 and before its metrics: the continuation takes them again."""
    cfg = runs.config("run", *PROMPTS, "eval.every=4")
    assert train(cfg, devices=ONE) == Outcome(6)
    whole = read(Path(cfg.run_dir))
    assert [(one["step"], one["prompt"]) for one in whole] == [
        (step, prompt) for step in (0, 4, 6) for prompt in ("The list", "def ")]
    assert whole[0]["text"] != whole[4]["text"]
    out = capsys.readouterr().out
    assert f'sample 6 | "def " -> {json.dumps(whole[5]["text"], ensure_ascii=False)}\n' in out
    record = {line["step"]: line for line in lines(cfg)}
    assert [step for step in record if "time/samples (s)" in record[step]] == [0, 4, 6]
    assert "Samples" in Path(write_report(cfg.run_dir)[0]).read_text()
    # As it would be after a kill at that moment.
    shutil.rmtree(f"{cfg.run_dir}/checkpoints/step_00000006")
    metrics = Path(cfg.run_dir, "metrics.jsonl")
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(True) if json.loads(line)["step"] < 4))
    assert train(cfg, devices=ONE) == Outcome(6)
    assert read(Path(cfg.run_dir)) == whole


def test_a_sample_is_what_the_command_line_gives(runs: Runs, capsys):
    cfg = runs.config("run", *PROMPTS, "train.steps=3", "generate.every=1", "eval.every=null")
    assert train(cfg, devices=ONE) == Outcome(3)
    found = read(Path(cfg.run_dir))
    assert [one["step"] for one in found] == [1, 1, 2, 2, 3, 3]
    capsys.readouterr()
    words = ["--prompt", "The list", "--prompt", "def ", "--tokens", "5", "--json"]
    assert cli.main(["generate", cfg.run_dir, "--step", "2", *words]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["prompt"], one["text"]) for one in answers] == [(one["prompt"], one["text"]) for one in found[2:4]]


def test_a_file_keeps_whole_lines_up_to_a_step(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(str(path), -1)
    for step in (1, 2, 3):
        file.write(step, [Completion("a", [1], f"{step}\n\u2028", False), Completion("b", [2], "NaN", False)])
    before = read(tmp_path)
    assert [one["step"] for one in before] == [1, 1, 2, 2, 3, 3]
    assert before[5]["text"] == "NaN"
    file.write(3, [Completion("a", [1], "again", False)])
    assert [one["text"] for one in read(tmp_path)[4:]] == ["again"]
    for torn in ('{"step": 1, "prompt": "tor', '{"step": 1, "prompt": "its end is missing", "text": ""}'):
        with path.open("a") as end:
            end.write(torn)
        SampleFile(str(path), 2)
        assert read(tmp_path) == before[:4]
    SampleFile(str(path), -1)
    assert path.read_text() == ""


@pytest.mark.parametrize(("setting", "message"), [
    ("generate.prompts=['']", "prompt '' is empty"),
    ("generate.tokens=40", "prompt 'The list' has "),
    ("eval.tokenizer=absent.json", "absent.json: cannot read the tokenizer"),
])
def test_what_is_wrong_with_prompts_stops_a_run_before_its_first_update(runs: Runs, capsys, setting, message):
    assert cli.main(["train", *runs.arguments("run", *PROMPTS, setting)]) == 2
    assert message in capsys.readouterr().err
    assert not (runs.directory() / "metrics.jsonl").exists()
