"""The commands of docs/launch.md: all that name this project run as they stand, as dry runs or on this machine."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from maxtext import cli
from maxtext.config.load import load
from maxtext.config.validate import mesh_problems
from tests.runs import ROOT

PAGE = (ROOT / "docs" / "launch.md").read_text()
COMMANDS = [shlex.split(line) for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("    ")]
DRY = [words[1:] for words in COMMANDS if words[0] == "maxtext" and "--dry-run" in words]
# They need a cluster, a package index, or Docker; `launch local` runs until it is done.
ELSEWHERE = ("gcloud", "xpk", "docker", "pip")


@pytest.mark.parametrize("words", DRY, ids=lambda words: " ".join(words[1:4]))
def test_each_launch_is_what_the_page_says(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    if words[1] == "gke":
        _, workload = yaml.safe_load_all(out)
        assert workload["kind"] == ("PathwaysJob" if "--pathways" in words else "JobSet")
    elif words[1] == "ray":
        assert json.loads(out)["scaling_config"]["num_workers"] == int(words[words.index("--workers") + 1])
    else:
        assert out.startswith("#!/bin/bash\n#SBATCH --job-name=olmo3_190m\n#SBATCH --nodes=4\n")


def test_no_command_is_left_out():
    assert len(DRY) == 7
    others = [words for words in COMMANDS if words[1:] not in DRY and words[0] not in ELSEWHERE]
    (local,) = others
    assert local[:4] == ["maxtext", "launch", "local", "configs/quickstart.yml"]
    assert mesh_problems(load("quickstart", [word for word in local if "=" in word]), 4 * 2) == []
    for words in COMMANDS:
        if words[0] in ("gcloud", "xpk") and "--command" in words:
            inner = shlex.split(words[words.index("--command") + 1].split("&& ")[1])
            assert inner[:2] in (["maxtext", "train"], [".venv/bin/maxtext", "train"])
            assert load(inner[2], inner[3:]).run_name == "olmo3_7b"
