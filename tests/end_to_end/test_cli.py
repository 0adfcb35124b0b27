"""The command line as a person meets it: mistakes, the dry run, a whole run, a rerun, and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maxtext.cli import main, train
from maxtext.config.load import CONFIGS, list_configs, load
from maxtext.train import loop
from tests import pace
from tests.runs import ROOT, Runs, contents, environment, lines, run_child, saved_bits, saved_steps, some_devices
from tests.train.test_metrics import events

# Runs the command line of each JSON list of arguments; says what it returned and whether it imported jax.
PROBE = """\
import json, sys
from maxtext.cli import train
for arguments in json.loads(sys.argv[1]):
    print("jax" in sys.modules, train(arguments))
"""


def test_a_mistake_in_the_config_is_named_before_jax_is_imported(runs: Runs):
    wrong = runs.folder / "wrong.yml"
    wrong.write_text(runs.yaml.read_text().replace("optim: {lr: 1e-2}", "optim: {leaning_rate: 1e-2}"))
    good = str(runs.yaml)
    mean = "unknown key; did you mean"
    cases = [
        ([str(wrong)], f"{wrong}:4: optim.leaning_rate: {mean} optim.lr (also known as learning_rate)?"),
        ([good, "train.gradient_acumulation_steps=2"],
         f"command line: train.gradient_acumulation_steps: {mean} train.gradient_accumulation_steps?"),
        ([good, "gradient_acumulation_steps=2"],
         f"command line: gradient_acumulation_steps: {mean} train.gradient_accumulation_steps?"),
        ([good, "optim.warmup_steps=5"], f"command line: optim.warmup_steps: {mean} schedule.warmup_steps?"),
        ([good, "model.d_model=65"],
         "command line: model.d_model 65 is not divisible by model.n_heads 4 (65 = 4 x 16 + 1); set model.d_model to "
         "64 or 68, or give model.head_dim"),
    ]
    child = subprocess.run([sys.executable, "-c", PROBE, json.dumps([case for case, _ in cases])], env=environment(),
                           text=True, capture_output=True, timeout=60)
    assert child.stdout.splitlines() == ["False 2"] * len(cases)
    assert child.stderr.splitlines() == [message for _, message in cases]
    assert not (runs.folder / "runs").exists()


def test_without_arguments_it_lists_the_configs_and_imports_no_jax(tmp_path: Path):
    child = subprocess.run([sys.executable, "-X", "importtime", str(ROOT / "train.py")], cwd=tmp_path, text=True,
                           capture_output=True, timeout=60)
    assert child.returncode == 0
    shown = [line.split(maxsplit=1) for line in child.stdout.splitlines() if line.startswith("  ")]
    assert [tuple(row) for row in shown] == list_configs(CONFIGS)
    assert {"quickstart", "olmo3_7b"} <= {name for name, _ in shown}
    imported = {line.rsplit("|", 1)[1].strip() for line in child.stderr.splitlines() if line.startswith("import time:")}
    assert "maxtext.config.load" in imported
    assert not {name for name in imported if name.split(".")[0] in ("jax", "jaxlib", "numpy", "flax", "orbax")}


@pytest.mark.parametrize(("arguments", "code"), [
    *((f"{verb} --help".strip(), 0) for verb in (
        "", "train", "launch", "launch local", "launch ray", "launch gke", "launch slurm", "plan", "compare", "config",
        "checkpoint", "checkpoint merge", "convert", "convert import", "eval", "generate", "report")),
    ("config list", 0), ("config show quickstart", 0), ("config show olmo3_7b train.steps=5000", 0),
    ("config show quickstart optim.leaning_rate=1", 2), ("train quickstart optim.lr=fast model.d_model=65", 2),
    ("train absent", 2), ("launch local quickstart train.stpes=1 --workers 2", 2), ("trian", 2),
    ("launch gke quickstart --topology v6e:4x4 --image i --dry-run optim.lr=fast", 2),
    ("launch ray quickstart --workers 2 --cpu train.stpes=1", 2), ("launch slurm absent", 2),
])
def test_what_computes_nothing_answers_in_0_3_seconds(arguments: str, code: int):
    """Start included, in seconds of CPU: the clock on a busy wall measures others."""
    def seconds() -> float:
        spent, child = pace.run([sys.executable, "-m", "maxtext.cli", *arguments.split()], cwd=ROOT)
        assert child.returncode == code, child.stderr
        assert child.stdout if code == 0 else child.stderr
        return spent

    assert pace.least(seconds, limit=0.3) < 0.3


def test_a_dry_run_of_the_7b_prints_its_size_and_allocates_nothing(tmp_path: Path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "XDG"))}
    # VmHWM and not ru_maxrss, which counts what the parent held before the child was another program.
    script = f"import sys\nsys.argv = ['train.py', 'olmo3_7b', '--dry-run', '--devices', '8']\n" \
             f"sys.path.insert(0, {str(ROOT)!r})\nfrom maxtext.cli import train\ncode = train()\n" \
             "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n" \
             "sys.exit(code)"
    child = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ | {"HOME": str(tmp_path)},
                           text=True, capture_output=True, timeout=60)
    assert (child.returncode, child.stderr) == (0, "")
    *table, peak_kib = child.stdout.splitlines()
    out, cfg = " ".join(" ".join(table).split()), load("olmo3_7b")
    tokens = cfg.train.steps * cfg.batch_tokens
    assert "parameters 7,298,617,344 (" in out
    assert "FLOPs 46.559 GFLOP/token at sequence 8,192;" in out
    assert f"updates {cfg.train.steps:,} updates, {tokens:,} tokens" in out
    assert f"schedule cosine, warm-up {cfg.schedule.warmup_steps:,}, ends at {cfg.schedule_steps:,}; lr " in out
    assert "mesh data 1, fsdp 8, tensor 1 (planned)" in out
    assert re.search(r"memory about [\d.]+ GiB a device: weights 3\.4 GiB, moments 6\.8 GiB, gradients 3\.4 GiB, ", out)
    assert "checkpoint 81.6 GiB each" in out  # 12 bytes a parameter
    assert "outputs runs/olmo3_7b" in out
    assert list(tmp_path.iterdir()) == []
    assert int(peak_kib) < 600 * 1024, "the weights alone would be 27 GiB"


@pytest.mark.parametrize(("overrides", "message"), [
    (["model.n_heads=6", "model.d_model=48", "mesh.tensor=4"],
     "mesh.tensor: model.n_heads 6 is not divisible by mesh.tensor 4 (6 = 4 x 1 + 2); set mesh.tensor to 1, 2 or 3, or "
     "change model.n_heads"),
    (["train.global_batch=6"],
     "train.global_batch 6 / train.gradient_accumulation_steps 1 = 6 sequences a micro-batch, "
     "which mesh.data 1 x mesh.fsdp 4 = 4 does not divide (6 = 4 x 1 + 2); set train.global_batch to 4 or 8, or other "
     "mesh sizes"),
])
def test_sizes_that_do_not_fit_the_devices_are_refused_in_one_line(runs: Runs, overrides: list[str], message: str,
                                                                  capsys: pytest.CaptureFixture[str]):
    assert train([*runs.arguments("run", *overrides), "--dry-run", "--devices", "4"]) == 2
    assert capsys.readouterr().err.splitlines() == [message]
    with pytest.raises(ValueError) as error:
        loop.train(runs.config("run", *overrides), devices=some_devices(4))
    assert str(error.value) == message


def test_a_run_that_does_not_fit_exits_2(runs: Runs, capsys: pytest.CaptureFixture[str]):
    assert train(runs.arguments("run", "train.global_batch=12")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "train.global_batch 12 / train.gradient_accumulation_steps 1 = 12 sequences a micro-batch, "
        "which mesh.data 1 x mesh.fsdp 8 = 8 does not divide (12 = 8 x 1 + 4); set train.global_batch to 8 or 16, or "
        "other mesh sizes"]


def test_token_files_are_checked_before_anything_compiles(runs: Runs, capsys: pytest.CaptureFixture[str]):
    tokens = np.full(4000, 7, np.uint16)
    tokens[1234] = 384
    path = runs.folder / "tokens.npy"
    tokens.tofile(path)
    ids = ("data.prepared=null", "data.vocab_size=384", "data.eos_id=1", "data.pad_id=2", "eval.every=null")
    assert train(runs.arguments("run", *ids, f"data.sources.all.paths=[{path}]")) == 2
    assert capsys.readouterr().err.startswith(f"{path}: id 384 at byte offset 2468 is not below vocab_size 384")
    assert not (runs.directory() / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path):
    """A run of 4 updates by `train.py` on one device: its configs, and the ended process."""
    runs = Runs(tmp_path_factory.mktemp("done"), prepared_text)
    child = run_child(*runs.arguments("run", "train.steps=4", "checkpoint.every=2"), devices=1)
    assert (child.returncode, child.stderr) == (0, "")
    return runs, child


def test_what_a_person_sees(done):
    runs, child = done
    shown = child.stdout.splitlines()
    assert shown[0] == "Run run"
    labels = [line.split()[0] for line in shown if re.match(r"  \w", line)]
    assert {"model", "parameters", "data", "batch", "updates", "schedule", "mesh", "memory", "checkpoint",
            "outputs"} <= set(labels)
    assert ["outputs", str(runs.directory())] in [line.split() for line in shown]
    assert [line.split()[1] for line in shown if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert [line.split()[1] for line in shown if line.startswith("eval ")] == ["0", "4"]
    assert shown[-2:] == [f"{runs.directory()} is complete: update 4 of 4",
                          f"report: {runs.directory()}/report.html {runs.directory()}/loss.png"]
    assert not any("\x1b" in line for line in shown), "no bar and no colour in a file"


def test_the_run_directory_is_a_contract(done):
    runs, _ = done
    folder = runs.directory()
    assert {path.name for path in folder.iterdir()} == {
        ".lock", ".lease", "events.jsonl", "config.yml", "metrics.jsonl", "metrics.csv", "tensorboard", "checkpoints",
        "report.html", "loss.png"}
    assert load(folder / "config.yml") == runs.config("run", "train.steps=4", "checkpoint.every=2")
    assert re.search(r"  steps: 4 +# command line", (folder / "config.yml").read_text())
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000002", "step_00000004"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (folder / "report.html").read_text()
    (recorded,) = (folder / "tensorboard").iterdir()
    assert recorded.name.startswith("events.out.tfevents.")
    assert [event.step for event in events(recorded)[1:]] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in lines(runs.config())] == [0, 1, 2, 3, 4]


def test_a_complete_run_says_so_and_changes_nothing(done, capsys: pytest.CaptureFixture[str]):
    """But for the claims of its lease."""
    runs, _ = done

    def others() -> dict[str, tuple[str, int]]:
        return {name: found for name, found in contents(runs.directory()).items() if not name.startswith(".lease")}

    before = others()
    for overrides in ([], ["mesh.data=2"], ["log.every=3", "eval.every=2", "checkpoint.every=null"]):
        assert train(runs.arguments("run", "train.steps=4", "checkpoint.every=2", *overrides)) == 0
        assert capsys.readouterr() == (
            f"{runs.directory()} is complete: it stands at update 4 of 4. To go on, raise train.steps; to start anew, "
            "choose another run_name.\n", "")
    for overrides, key in ((["model.d_ff=96"], "model.d_ff: 64"), (["train.global_batch=16"], "train.global_batch: 8"),
                           (["data.sequence_length=16"], "data.sequence_length: 32")):
        for steps in (4, 8):
            assert train(runs.arguments("run", f"train.steps={steps}", *overrides)) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert f"\n  {key} when update 4 was saved, " in err
    assert others() == before


def test_a_complete_run_gets_the_report_that_it_lacks(done, capsys: pytest.CaptureFixture[str]):
    """Killed after the last update, and before its report was written."""
    runs, _ = done
    shutil.copytree(runs.directory(), runs.directory("cut"))
    (runs.directory("cut") / "report.html").unlink()
    assert train(runs.arguments("cut", "train.steps=4", "checkpoint.every=2")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("report: ")
    assert (runs.directory("cut") / "report.html").stat().st_size > 1000


def test_a_loss_that_is_not_finite_exits_3(done):
    """Rate 1e30 from update 5 on: its weights are absurd, and no loss after it is a number; going back is no help."""
    runs, _ = done
    shutil.copytree(runs.directory(), runs.directory("spoilt"))
    cfg = runs.config("spoilt")
    bits = saved_bits(cfg, 4)
    child = run_child(*runs.arguments("spoilt", "optim.lr=1e30", "checkpoint.every=null"), devices=1)
    assert child.returncode == 3
    stopped = child.stderr[child.stderr.index("training stopped: "):]
    assert stopped.startswith("training stopped: update 11 is not finite: loss nan, grad norm ")
    assert "It was not saved and the newest checkpoint is of update 4. 6 updates in a row were skipped" in stopped
    assert "the run has gone back to update 4 before" in stopped
    assert "Lower optim.lr" in stopped
    assert "going back to update 4 and past batches 6 to 11 of the data" in child.stdout
    assert "optim.lr changes from 0.01 to 1e+30 after update 4" in child.stdout
    assert saved_steps(cfg) == [2, 4]
    assert saved_bits(cfg, 4) == bits
    assert [(record["step"], record.get("optim/step skipped", 0)) for record in lines(cfg)] == [
        *((step, 0) for step in range(6)), *((step, 1) for step in range(6, 11))]


@pytest.mark.parametrize(("arguments", "message"), [
    (["trian"], "maxtext: unknown verb 'trian'; did you mean 'train'? The verbs are train, sweep, launch, plan, "),
    (["xyz"], "maxtext: unknown verb 'xyz'. The verbs are train, sweep, launch, plan, "),
    (["train", "quikstart"], "quikstart: no such config (looked for quikstart, "),
])
def test_a_wrong_command_names_the_near_one(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("arguments", [["--devices", "4"], ["--dry-run", "--devices", "0"], ["--dyr-run"]])
def test_a_wrong_option_exits_2(runs: Runs, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        train([*runs.arguments(), *arguments])
    assert ended.value.code == 2
    assert arguments[-2 if arguments[-1].isdigit() else -1] in capsys.readouterr().err


def test_a_dry_run_says_for_which_devices_it_is(runs: Runs, capsys: pytest.CaptureFixture[str]):
    assert train([*runs.arguments(), "mesh.fsdp=-1", "--dry-run"]) == 0
    assert "cpu; --devices N for another number)" in " ".join(capsys.readouterr().out.split())
    assert train([*runs.arguments(), "mesh.fsdp=-1", "--dry-run", "--devices", "4"]) == 0
    assert "fsdp 4, tensor 1 (planned)" in capsys.readouterr().out


def test_without_arguments_maxtext_prints_its_verbs(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    out = capsys.readouterr().out
    for verb in ("train", "config", "data", "checkpoint", "report"):
        assert f"\n  {verb} " in out
