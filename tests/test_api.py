"""`import maxtext as mt`: the verbs as functions, on a tiny run; they give what the command line gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import maxtext as mt
from maxtext.cli import main
from maxtext.config.load import ConfigError, load
from maxtext.eval.opened import NoModelError
from tests.runs import ROOT, Runs, lines

SHORT = ("train.steps=4", "eval.every=2", "checkpoint.every=4", "log.tensorboard=false", "log.report=false",
         "mesh.fsdp=8", "schedule.warmup_steps=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path):
    """A run that the API has trained, and the updates that its listener heard of."""
    folder = tmp_path_factory.mktemp("api")
    heard: list[tuple[int, dict[str, float]]] = []
    cfg = mt.load(Runs(folder, prepared_text).yaml, "run_name=api", *SHORT)
    return mt.train(cfg, listener=lambda step, metrics: heard.append((step, dict(metrics)))), cfg, heard


def test_importing_the_package_imports_no_part_of_it():
    code = ("import sys, maxtext as mt; assert {'train', 'load', 'evaluate', 'generate', 'weights'} <= set(dir(mt)); "
            "print(*(name for name in sys.modules if name.split('.')[0] in ('jax', 'numpy', 'yaml') or "
            "name.startswith('maxtext.'))); mt.load('quickstart'); print('jax' in sys.modules, 'numpy' in sys.modules)")
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True,
                           timeout=60)
    assert child.stdout == "\nFalse False\n"


def test_a_config_is_loaded_over_texts_and_mappings():
    cfg = mt.load("quickstart", "optim.lr=2e-3", {"train.steps": 70, "generate.prompts": ["def ", "a: b"],
                                                  "data.sources.code.repeat": 2.0, "train.max_seconds": None})
    assert cfg == load("quickstart", ["optim.lr=2e-3", "train.steps=70", 'generate.prompts=["def ", "a: b"]',
                                      "data.sources.code.repeat=2.0", "train.max_seconds=null"])
    # What loops over grids and paths give.
    other = mt.load("quickstart", {"optim.lr": np.logspace(-3, -1, 3)[1], "train.steps": np.int64(70),
                                   "optim.eps": np.float32(0.5), "output_dir": Path("a b"),
                                   "data.sources": {"code": {"repeat": 2}}})
    assert other == load("quickstart", ["optim.lr=0.01", "train.steps=70", "optim.eps=0.5", "output_dir=a b",
                                        "data.sources.code.repeat=2"])
    with pytest.raises(ConfigError, match=r"optim.betas: array\(\[0.9, 0.9\]\) is of type ndarray; give text"):
        mt.load("quickstart", {"optim.betas": np.asarray([0.9, 0.9])})
    with pytest.raises(ConfigError, match="did you mean"):
        mt.load("quickstart", {"optim.leaning_rate": 1})
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mt.trian


def test_a_config_prints_what_is_not_the_default(tmp_path: Path):
    cfg = mt.load("quickstart", "optim.lr=2e-3", "data.sources.code.repeat=2.0")
    text = repr(cfg)
    assert "\noptim:\n  lr: 0.002\n" in text
    assert "    code:\n      repeat: 2.0\n" in text
    assert "weight_decay" not in text
    assert "weight_decay" in str(cfg)
    for whole in (text, str(cfg)):  # both say all: the rest are defaults
        (tmp_path / "again.yml").write_text(whole)
        assert load(tmp_path / "again.yml") == cfg


def test_training_gives_a_plain_result(run):
    trained, cfg, heard = run
    assert (trained.run_dir, trained.step, trained.stopped_by, trained.trained) == (cfg.run_dir, 4, None, True)
    written = lines(cfg)
    assert [line["step"] for line in trained.metrics] == [0, 1, 2, 3, 4]
    assert trained.metrics == written
    assert [step for step, _ in heard] == [line["step"] for line in written]
    assert [metrics.get("train/CE loss") for _, metrics in heard] == [line.get("train/CE loss") for line in written]
    assert mt.train(cfg).trained is False, "a complete run is left as it is"


def test_an_evaluation_is_that_of_the_run_and_prints_as_a_table(run):
    trained, cfg, _ = run
    found = mt.evaluate(trained.run_dir, sets=["code"])
    last = lines(cfg)[-1]
    assert (found.step, found.cfg.run_name) == (4, "api")
    assert found.metrics["eval/lm/code/CE loss"] == pytest.approx(last["eval/lm/code/CE loss"], rel=1e-5)
    assert "eval/lm/prose/CE loss" not in found.metrics
    assert repr(found).splitlines()[1].split()[:3] == ["held-out", "set", "CE"]


def test_a_completion_is_that_of_the_command_line(run, capsys: pytest.CaptureFixture[str]):
    trained, _, _ = run
    (found,) = mt.generate(trained.run_dir, "def ", tokens=6, temperature=0.7, seed=3)
    words = ["--prompt", "def ", "--tokens", "6", "--temperature", "0.7", "--seed", "3", "--json"]
    assert main(["generate", trained.run_dir, *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (found.prompt, found.text, found.ids, found.stopped) == tuple(said.values())
    with pytest.raises(NoModelError, match="absent does not exist; give a run"):
        mt.generate("absent", "def ")


def test_weights_print_as_a_table_of_types(run):
    trained, _, _ = run
    params = mt.weights(trained.run_dir)
    first, *rows = repr(params).splitlines()
    assert first == f"Decoder: {sum(x.size for x in leaves(params)):,} values in {len(rows)} arrays, " \
                    f"{sum(x.nbytes for x in leaves(params)) / 1024:.1f} KiB"
    cells = [row.split() for row in rows]
    assert ["embed", "float32[384,32@fsdp]", "48.0", "KiB"] in cells
    assert np.isfinite(np.asarray(params.embed)).all()


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_the_page_runs_as_it_stands(run, capsys: pytest.CaptureFixture[str]):
    """On the run of this file, which is complete, in place of the quickstart."""
    trained, cfg, _ = run
    page = (ROOT / "docs" / "python.md").read_text()
    code = "\n".join(line[4:] for line in page.splitlines() if line.startswith("    "))
    asked = 'mt.load("quickstart", "optim.lr=1e-3", {"train.steps": 200})'
    assert code.count(asked) == 1
    exec(code.replace(asked, "cfg"), {"cfg": cfg})
    said = capsys.readouterr().out
    assert f"4 {trained.metrics[-1]['train/CE loss']}" in said
    assert "held-out set" in said
    assert "Decoder: " in said
    table = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(table) == sorted(set(mt.__all__) - {"__version__"})
