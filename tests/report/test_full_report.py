"""Parts of the report that only a long run fills: events, environment, data shares, profile, other runs beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.report.against import smoothed_gap
from maxtext.report.run_files import read_run
from tests.report.full_run import write_full_run
from tests.report.test_report import Page, curves


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    found = [write_full_run(folder / "a"), write_full_run(folder / "b", "other", 0.25, 2e-3),
             write_full_run(folder / "c", shift=-0.1)]
    (folder / "c" / "profile.json").write_text('{"steps": [1')
    return found


@pytest.fixture(scope="module")
def page(folders: list[str]) -> Page:
    assert cli.main(["report", folders[0], "--compare", *folders[1:]]) == 0
    return Page(f"{folders[0]}/report.html")


def test_events_are_told_and_marked(page: Page):
    told = page.words.split("Events time (UTC) update what ")[1].split("Profile")[0]
    assert told == ("2023-11-14 22:13:20 0 an attempt begins on tpu-0, 16 devices 2023-11-14 22:24:15 250 "
                    "JaxRuntimeError: a peer has gone <away> 2023-11-14 22:25:00 250 an attempt begins on tpu-0, 16 "
                    "devices 2023-11-14 22:25:41 200 50 updates after this one are done again 2023-11-14 22:28:22 300 "
                    "skipped: an outlier, or not finite 2023-11-14 22:32:51 400 end: complete ")
    assert "saves 4 recoveries 1 failures 1" in page.words


def test_an_attempt_that_ended_without_a_word_is_a_failure(tmp_path: Path):
    folder = write_full_run(tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    silent = [line for line in lines if json.loads(line)["event"] != "failure"]
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(silent) + "\n")
    assert cli.main(["report", folder]) == 0
    assert "the attempt before had ended without a word" in Page(f"{folder}/report.html").words


def test_curves_of_device_memory_and_sources(page: Page):
    assert curves(page, "Model FLOPs utilisation")["MFU, %"][400] == pytest.approx(41, abs=1)
    assert curves(page, "Memory of the host")["GiB"][400] == pytest.approx(12.1 + 400 / 900, rel=1e-4)
    shares = curves(page, "Data shares")
    assert {name: shares[name][400] for name in shares} == pytest.approx({"code": 30, "prose": 50, "mathematics": 20})


def test_the_environment_says_what_changed(page: Page):
    assert "Environment of the last of 2 attempts host tpu-0 devices 16 device TPU v6e mesh fsdp 16" in page.words
    assert "python 3.12.1 before: 3.11.7" in page.words


def test_the_profile_shows_shares_and_operations(page: Page):
    assert "Profile updates 10 to 13; 16 devices; 8.9 s computing 81.0% communication 13.0% idle 6.0%" in page.words
    assert "fusion.0 30.0% 128 400.0 ms jit(train_step)/transpose" in page.words
    assert "fusion.12" not in page.words, "the longest alone"


def test_other_runs_lie_beside(page: Page, folders: list[str]):
    names = ["olmo3_190m (" + folders[0], "other", "olmo3_190m (" + folders[2]]
    assert [name.split(")")[0] for name in curves(page, "Training loss of all")] == names
    gaps = curves(page, "Gap")
    assert [values[400] for values in gaps.values()] == pytest.approx([0.25, -0.1])
    assert set(curves(page, "Held out: code")) == set(curves(page, "Training loss of all"))
    assert "Settings that differ key" in page.words
    assert "optim.lr 0.001 0.002 0.001" in page.words
    assert smoothed_gap(read_run(folders[0]), read_run(folders[0]))[1] == pytest.approx([0.0] * 400)


def test_a_damaged_profile_and_a_run_that_is_not_there(folders: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", folders[2]]) == 0
    assert "profile.json cannot be read." in Page(f"{folders[2]}/report.html").words
    assert cli.main(["report", folders[0], "--compare", "absent"]) == 2
    assert "absent does not exist; give the folder of a run" in capsys.readouterr().err
