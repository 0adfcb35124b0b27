"""The table that holds our train step against peers', and the processes it is made of."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.measured_page import write_page
from benchmarks.peers import CPU_SPEED, MAXTEXT, MEMORY, OLMO_CORE, OURS, SPEED, START, TORCH, Run, Workload


def figures(speed: float, cpu_speed: float, **more: float) -> dict[str, float]:
    return {SPEED: speed, CPU_SPEED: cpu_speed, START: 5.0, MEMORY: 1.0, "loss": 9, **more}


def test_the_best_round_of_each_trainer_counts():
    runs = [Run("8192", MAXTEXT, figures(1000, 500, **{START: 20.0})),
            Run("8192", OURS, figures(3000, 2000, **{MEMORY: 2.5})),
            Run("8192", MAXTEXT, figures(900, 800, **{START: 15.0})),
            Run("8192", OURS, figures(4000, 1000, **{MEMORY: 1.5})),
            Run("experts", OURS, {SPEED: 600, CPU_SPEED: 300}), Run("experts", MAXTEXT, figures(200, 200))]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in peers.table(runs)]
    assert len({len(row) for row in rows}) == 1
    assert rows[2:] == [
        ["vocabulary 8,192", OURS, "4,000", "2,000", "5.0", "1.5", "", ""],
        ["vocabulary 8,192", MAXTEXT, "1,000", "800", "15.0", "1.0", "4.00", "2.50"],
        ["8 experts, 2 a token", OURS, "600", "300", "", "", "", ""],
        ["8 experts, 2 a token", MAXTEXT, "200", "200", "5.0", "1.0", "3.00", "1.50"],
    ]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setitem(peers.WORKLOADS, "experts", Workload("", {OURS: 3, TORCH: 2}, vocab=77, experts=True))
    return tmp_path


def test_a_run_is_a_process_of_its_own(scripts: Path):
    (scripts / "train_step.py").write_text(
        "import json, sys; print('noise')\n"
        "print(json.dumps({'tokens/s': 1, 'experts: tokens/s': 2, 'experts: arguments': sys.argv[1:]}))")
    run = peers.measure("experts", OURS, sys.executable)
    assert run.figures == {SPEED: 2, "arguments": ["--vocab", "77", "--steps", "3", "--experts"]}


def test_two_trainers_share_a_script(scripts: Path):
    (scripts / "peer_torch.py").write_text("import json, sys; print(json.dumps({'arguments': sys.argv[1:]}))")
    of = {name: peers.measure("8192", name, sys.executable).figures["arguments"] for name in (TORCH, OLMO_CORE)}
    assert of == {TORCH: ["--vocab", "8192", "--steps", "20"],
                  OLMO_CORE: ["--olmo-core", "--vocab", "8192", "--steps", "20"]}


def test_a_peer_does_not_find_our_package(scripts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(scripts))
    program = "import json, os\nprint(json.dumps({'experts: path': os.environ.get('PYTHONPATH')}))"
    for name in ("train_step.py", "peer_torch.py"):
        (scripts / name).write_text(program)
    assert peers.measure("experts", OURS, sys.executable).figures == {"path": str(scripts)}
    assert peers.measure("experts", TORCH, sys.executable).figures == {"experts: path": None}


def test_a_trainer_that_fails_ends_the_comparison_with_what_it_wrote(scripts: Path):
    (scripts / "peer_torch.py").write_text("import sys; print('{}'); sys.exit('no module named torch')")
    with pytest.raises(SystemExit, match=r"(?s)peer_torch.py --vocab 77 --steps 2 failed.* code 1:\n.*no module"):
        peers.measure("experts", TORCH, sys.executable)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(peers.DOCS, tmp_path / "docs"))


def test_the_page_is_written_from_what_was_measured(docs: Path):
    peers.write(docs)
    written = (docs / "comparison.md").read_text()
    assert written == (peers.DOCS / "comparison.md").read_text(), "run python benchmarks/peers.py --page"


def test_new_runs_take_the_place_of_those_of_their_model(docs: Path):
    before = json.loads((docs / "peers.json").read_text())
    peers.keep(docs, [Run("8192", OURS, figures(3000, 2000)), Run("8192", MAXTEXT, figures(1500, 800))], 0.14)
    after = json.loads((docs / "peers.json").read_text())
    assert list(after["models"]) == list(before["models"]) == list(peers.WORKLOADS)
    assert [run["trainer"] for run in after["models"]["8192"]["runs"]] == [OURS, MAXTEXT]
    assert after["models"]["8192"]["load before"] == 0.1
    assert after["models"]["experts"] == before["models"]["experts"]
    assert after["compiled"] == before["compiled"]
    page = (docs / "comparison.md").read_text()
    assert "| vocabulary 8,192 | MaxText | 1,500 | 800 | 5.0 | 1.0 | 2.00 | 2.50 |" in page
    assert "| vocabulary 8,192 | torch.compile |" not in page


def test_a_speed_in_the_readme_is_the_measured_one():
    models = json.loads((peers.DOCS / "peers.json").read_text())["models"]
    ours = {name: model["runs"][0]["figures"][SPEED] for name, model in models.items()}
    [said] = re.findall(r"at ([\d.]+) of the speed of a dense model", (peers.DOCS.parent / "README.md").read_text())
    assert float(said) == round(ours["experts"] / ours["8192"], 2)


def test_a_page_without_the_marks_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- peers: by hand -->\n<!-- peers: end -->\n")
    with pytest.raises(ValueError, match="must each stand there once"):
        write_page(page, "peers: written", "x")
    write_page(page, "peers: by hand", "| a |")
    assert page.read_text() == "<!-- peers: by hand -->\n\n| a |\n\n<!-- peers: end -->\n"
