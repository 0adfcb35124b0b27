"""An option that does not exist is answered with the setting that it stands for, by every verb that takes settings."""

from __future__ import annotations

import pytest

from maxtext import cli

VERBS = {
    "train": ["train", "quickstart"], "sweep": ["sweep", "quickstart"], "plan": ["plan", "quickstart"],
    "local": ["launch", "local", "quickstart", "--workers", "2"],
    "ray": ["launch", "ray", "quickstart", "--workers", "2"],
    "slurm": ["launch", "slurm", "quickstart"],
    "gke": ["launch", "gke", "quickstart", "--topology", "v5p:2x2x1", "--image", "a"],
    "inspect": ["data", "inspect", "quickstart", "--step", "1"],
    "eval": ["eval", "runs/a"], "generate": ["generate", "runs/a", "--prompt", "a"],
}


def _said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_takes_settings(verb: str, capsys: pytest.CaptureFixture[str]):
    assert _said([*VERBS[verb], "--lr", "1e-3"], capsys).endswith(
        "unrecognized arguments: --lr 1e-3; a setting is written without dashes: optim.lr=1e-3\n")


@pytest.mark.parametrize(("words", "setting"), [
    (["--optim.lr=1e-3"], "optim.lr=1e-3"), (["--warmup_steps", "5"], "schedule.warmup_steps=5"),
    (["--lr"], "optim.lr=VALUE"), (["--lr", "--fsdp"], "optim.lr=VALUE"), (["--xyzzy=3"], "KEY=3"),
])
def test_the_setting_that_was_meant(words: list[str], setting: str, capsys: pytest.CaptureFixture[str]):
    assert _said(["train", "quickstart", *words], capsys).endswith(
        f"; a setting is written without dashes: {setting}\n")


def test_other_mistakes_stay_as_they_are(capsys: pytest.CaptureFixture[str]):
    assert "without dashes" not in _said(["sweep"], capsys)
