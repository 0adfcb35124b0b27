"""`maxtext launch slurm`: the script is whole, and queues the job again exactly when another attempt helps.

SLURM's own commands stand in as small programs; the shell that runs the script is real.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext.cli import main
from tests.materials import program

WORDS = ["launch", "slurm", "quickstart", "--nodes", "2", "--gpus-per-node", "4", "mesh.fsdp=8"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Renders the script for options."""
    monkeypatch.chdir(tmp_path)

    def render(*options: str) -> str:
        assert main([*WORDS, *options, "--dry-run"]) == 0
        return capsys.readouterr().out

    return render


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_the_machines_and_trains(script, tmp_path: Path):
    text = script("--time", "24:00:00", "--account", "me", "--sbatch=--exclusive", "description=it's a \"test\"")
    assert options_of(text) == [
        "--job-name=quickstart", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--time=24:00:00",
        "--account=me", f"--output={tmp_path}/runs/quickstart/slurm-%j.log", "--open-mode=append",
        "--signal=B:USR1@300", "--requeue", "--exclusive"]
    (step,) = (line for line in text.splitlines() if line.startswith("srun "))
    assert shlex.split(step)[2:] == [sys.executable, "-m", "maxtext.cli", "train", "quickstart", "mesh.fsdp=8",
                                     "description=it's a \"test\"", "&"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_shellcheck_finds_no_fault(script, tmp_path: Path):
    (tmp_path / "job.sh").write_text(script())
    found = subprocess.run([program("shellcheck"), tmp_path / "job.sh"], text=True, capture_output=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def start(text: str, folder: Path, step: str, **variables: str) -> subprocess.Popen:
    """The script in bash, beside commands of SLURM that write down how they were called; `srun` runs `step`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "called").write_text("")
    for name, what in {"srun": step, "scontrol": "", "scancel": f"kill -TERM $(cat {folder}/pid)"}.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/bash\necho {name} "${{@:1:2}}" >> {folder}/called\n{what}\n')
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | variables
    return subprocess.Popen(["bash", "-c", text], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def called(folder: Path) -> list[str]:
    return [line for line in (folder / "called").read_text().splitlines() if not line.startswith("srun")]


@pytest.mark.parametrize(("code", "restarts", "again", "status"), [
    (0, "0", False, 0), (2, "0", False, 2), (3, "0", False, 3), (75, "0", True, 0), (75, "2", True, 0),
    (75, "3", False, 75)])
def test_only_a_run_that_asks_for_it_is_queued_again(script, tmp_path: Path, code: int, restarts: str, again: bool,
                                                   status: int):
    process = start(script("--retries", "3"), tmp_path, f"exit {code}", SLURM_RESTART_COUNT=restarts)
    _, told = process.communicate(timeout=20)
    assert process.returncode == status
    assert called(tmp_path) == ["scontrol requeue 7"] * again
    assert ("all 4 attempts are spent" in told) == (restarts == "3")


@pytest.mark.parametrize(("at_term", "again", "status"), [("exit 0", True, 0), ("exit 2", False, 2)])
def test_before_its_time_is_over_the_run_is_told_to_save_and_queued_again(script, tmp_path: Path, at_term: str,
                                                                       again: bool, status: int):
    step = f"trap 'touch {tmp_path}/saved; {at_term}' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"
    process = start(script(), tmp_path, step)
    for _ in range(200):
        if (tmp_path / "pid").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert (tmp_path / "saved").exists()
    assert process.returncode == status
    assert called(tmp_path) == ["scancel --signal=TERM 7", *["scontrol requeue 7"] * again]


def test_without_slurm_it_says_where_to_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PATH", "")
    assert main(WORDS) == 2
    told = capsys.readouterr().err
    assert told.startswith("sbatch is not on this machine's PATH: run this where SLURM's commands are")


def test_the_script_goes_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]):
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/bash\ncat > {tmp_path}/given\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(WORDS) == 0
    assert (tmp_path / "given").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=quickstart\n")
    assert (tmp_path / "runs" / "quickstart").is_dir(), "for the log"
    program.write_text("#!/bin/bash\nexit 1\n")
    assert main(WORDS) == 2
    capsys.readouterr()
    (tmp_path / "file").touch()
    assert main([*WORDS, "output_dir=file"]) == 2
    assert capsys.readouterr().err == "file/quickstart: Not a directory\n"
