"""`maxtext eval`: the numbers of the loop on a saved checkpoint or a transformers folder, which it only reads."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.cli import main
from maxtext.config.load import to_yaml
from maxtext.config.schema import CheckpointConfig, EvalConfig, EvalSetConfig, MeshConfig, SourceConfig
from maxtext.data.tokens import resolve
from maxtext.eval.evaluations import Evaluations
from tests.convert.folders import edited
from tests.eval.models import random_decoder
from tests.eval.test_downstream import FILES, ORACLE
from tests.oracles.downstream import make
from tests.tiny import mesh_of, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]


def run(words: list[str]) -> int:
    return main(["eval", *words])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run with two checkpoints of different weights, and what the loop would have recorded at each."""
    root = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        np.concatenate([np.append(rng.integers(1, 90, n), 0) for n in (20, 9, 31)]).astype("<u2").tofile(
            root / f"{name}.bin")
    sets = {name: EvalSetConfig((str(root / f"{name}.bin"),)) for name in ("a", "b")}
    cfg = tiny_config(tiny_model(vocab_size=make.VOCAB, d_model=make.WIDTH))
    cfg = dataclasses.replace(
        cfg, run_name="tiny", output_dir=str(root), mesh=MeshConfig(fsdp=64),  # more devices than there are here
        data=dataclasses.replace(cfg.data, sequence_length=64, vocab_size=512, eos_id=0, pad_id=1,
                                              sources={"elsewhere": SourceConfig(("absent.bin",))}),
        eval=EvalConfig(every=5, batch=3, sets=sets, tasks=("gsm8k_gold_bpb_5shot", "copycolors_10way_fast"),
                        tasks_path=str(FILES), tokenizer=str(ORACLE / "tokenizer.json")))
    mesh, expected = mesh_of((1, 1, 1)), {}
    checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", CheckpointConfig(asynchronous=False),
                              config_text=to_yaml(cfg))
    evaluate = Evaluations(cfg, resolve(cfg, training=False), mesh)
    for step in (5, 10):
        params = random_decoder(cfg.model, mesh, seed=step)
        checkpoints.save(step, {"params": params, "moments": jax.tree.map(lambda x: x * 0, params)}, {})
        expected[step] = evaluate(params)
    checkpoints.close()
    return Path(cfg.run_dir), expected


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in sorted(folder.rglob("*"))}


def numbers(folder: Path, name: str = "eval_tiny_10.json") -> dict[str, float]:
    return json.loads((folder / name).read_text())["metrics"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_step_gives_the_loop_s_numbers_and_the_run_is_only_read(saved, here, capsys):
    folder, expected = saved
    (folder / "checkpoints/step_00000003.deleted.tmp").mkdir()  # what a killed deletion left: a writer would remove it
    before = snapshot(folder)
    assert run([str(folder)]) == 0
    assert snapshot(folder) == before
    result = json.loads((here / "eval_tiny_10.json").read_text())
    assert (result["step"], result["run_name"], result["rows"], result["batch"]) == (10, "tiny", "whole", 3)
    assert result["metrics"] == pytest.approx(expected[10], rel=1e-5)  # here on 8 devices
    out = capsys.readouterr().out
    assert "the run's mesh does not fit 8 devices" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert float(lines["a"][1]) == pytest.approx(expected[10]["eval/lm/a/CE loss"], abs=1e-5)
    bits = expected[10]["eval/downstream/gsm8k_gold_bpb_5shot (BPB v2)"]
    assert lines["gsm8k_gold_bpb_5shot"][1:] == [f"{bits:.6f}", "-", "-", "-"]


def test_another_step_other_sets_and_settings(saved, here):
    folder, expected = saved
    assert run([str(folder), "mesh.fsdp=2", "mesh.data=4", "--sets", "b", "--step", "5", "--output", "o/x.json"]) == 0
    assert numbers(here, "o/x.json") == pytest.approx(
        {k: v for k, v in expected[5].items() if k.startswith("eval/lm/b/")}, rel=1e-5)
    step = str(folder / "checkpoints" / "step_00000005")
    assert run([step, "--tasks", "gsm8k_gold_bpb_5shot", "mesh.tensor=2", "mesh.fsdp=-1"]) == 0
    assert numbers(here, "eval_tiny_5.json") == pytest.approx(
        {k: v for k, v in expected[5].items() if k.startswith("eval/downstream/gsm8k")}, rel=1e-5)
    assert run([str(folder), "--sets", "a", "eval.rows=truncated"]) == 0
    assert numbers(here)["eval/lm/a/CE loss"] < expected[10]["eval/lm/a/CE loss"]


def test_a_config_is_laid_over_the_run_s_own(saved, here):
    folder, _ = saved
    (here / "more.yml").write_text("eval: {tasks: [hellaswag_bpb_5shot]}\n")
    assert run([str(folder), "--config", "more.yml", "--sets", "a", "--tasks", "hellaswag_bpb_5shot"]) == 0
    assert {name.split("/")[2].split(" ")[0] for name in numbers(here)} == {"a", "hellaswag_bpb_5shot"}
    assert run([str(folder), "--config", "more.yml"]) == 0
    assert {name.split("/")[2].split(" ")[0] for name in numbers(here)} == {"a", "b", "macro", "micro",
                                                                             "hellaswag_bpb_5shot"}


@pytest.mark.parametrize(("words", "message"), [
    (["--sets", "c"], "--sets: c is no held-out set of this run; it has a, b"),
    (["--tasks", "piqa"], "'piqa' is no task name"),
    (["--step", "7"], "good steps are [5, 10]"),
    (["eval.batch=none"], "command line: eval.batch: none is not an integer"),
    (["mesh.fsdp=3"], "mesh.data 1 x mesh.fsdp 3 x mesh.tensor 1 = 3 devices, but there are 8"),
    (["--config", "absent.yml"], "absent.yml: no such config"),
    (["--output", "."], ".: cannot be written (Is a directory); give --output another file"),
    (["--output", f"{__file__}/o/x.json"], "cannot be written (Not a directory)"),
    (["model.d_model=64"], "does not fit this model"),
])
def test_mistakes_are_one_message_and_exit_code_2(saved, here, capsys, words: list[str], message: str):
    assert run([str(saved[0]), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(here.glob("*.json")) == []


def test_folders_that_hold_no_checkpoint(here, capsys, caplog):
    (here / "empty").mkdir()
    (here / "other").mkdir()
    for number in range(9):
        (here / "other" / f"{number}.txt").touch()
    for path, fault in (("absent", "absent does not exist"), ("empty", "empty holds no checkpoint"),
                        ("other", "other holds no checkpoint")):
        assert run([path]) == 2
        assert capsys.readouterr().err == f"{fault}; give a run, <output_dir>/<run_name>, one of its checkpoints, an " \
                                          "imported model or a transformers folder\n"
    assert caplog.text == ""  # and no line for each name in it


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed folder with as many rows in its vocabulary as the tasks' tokenizer has, which lies in it."""
    def widen(tensors):
        tensors["model.embed_tokens.weight"] = np.random.default_rng(0).normal(
            0, 0.02, (make.VOCAB, tensors["model.embed_tokens.weight"].shape[1])).astype(np.float32)

    folder = edited("llama_tied", tmp_path_factory.mktemp("hf") / "Some-1B", widen, vocab_size=make.VOCAB)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    shutil.copy(ORACLE / "tokenizer.json", folder)
    return folder


def test_a_transformers_folder_gives_the_numbers_of_its_import(saved, transformers_folder: Path, here, capsys):
    assert main(["convert", "import", str(transformers_folder), "imported"]) == 0
    words = ["--tasks", "gsm8k_gold_bpb_5shot", "copycolors_10way_fast", "--sets", "a", f"eval.tasks_path={FILES}",
             f"eval.sets.a.paths=[{saved[0].parent / 'a.bin'}]", "data.sequence_length=64"]
    assert run(["imported", *words]) == 0
    before = snapshot(transformers_folder)
    assert run([str(transformers_folder), *words]) == 0
    assert snapshot(transformers_folder) == before
    result = json.loads((here / "eval_Some-1B.json").read_text())
    imported = json.loads((here / "eval_imported_0.json").read_text())
    assert (result["checkpoint"], result["step"], result["run_name"]) == (str(transformers_folder), None, "Some-1B")
    assert result["metrics"] == imported["metrics"]
    assert {name.split("/")[2].split(" ")[0] for name in result["metrics"]} == {"a", "gsm8k_gold_bpb_5shot",
                                                                                "copycolors_10way_fast"}
    assert f"{transformers_folder}\nheld-out set" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["--step", "3"], "is a transformers folder, which has no steps; leave --step away"),
    (["model.d_ff=64", "eval.sets.a.paths=[a.bin]"], "does not fit this model, as params."),
    ([], "nothing to evaluate: this model has no held-out sets"),
])
def test_mistakes_with_a_transformers_folder(transformers_folder: Path, here, capsys, words: list[str], message: str):
    np.zeros(9, "<u2").tofile(here / "a.bin")
    assert run([str(transformers_folder), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(here.glob("*.json")) == []


def test_a_transformers_folder_that_misses_a_tensor_is_not_evaluated(here, capsys):
    folder = edited("llama_tied", here / "hf", lambda tensors: tensors.pop("model.norm.weight"))
    assert run([str(folder), "--tasks", "gsm8k_gold_bpb_5shot"]) == 2
    assert "missing: model.norm.weight" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_evaluated(saved, here, capsys, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    victim = max((folder / "checkpoints/step_00000010").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert run([str(folder)]) == 2
    assert "step 10 in" in (err := capsys.readouterr().err)
    assert "is bad" in err
    assert (folder / "checkpoints/step_00000010").is_dir()  # a reader renames nothing
    assert run([str(folder), "--step", "5"]) == 0


def test_the_script_and_the_verb_are_the_same():
    environment = os.environ | {"PYTHONPATH": ""}
    script = subprocess.run([sys.executable, str(ROOT / "scripts/evaluate.py"), "--help"], env=environment,
                            capture_output=True, text=True, check=True)
    verb = subprocess.run([sys.executable, "-c", "from maxtext.cli import main; main(['eval', '--help'])"], cwd=ROOT,
                          env=environment, capture_output=True, text=True)
    assert script.stdout == verb.stdout
    assert "--tasks" in script.stdout
