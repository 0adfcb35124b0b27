"""`maxtext data inspect`: the batch that training gets, with the texts it is made of and where they come from."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from maxtext.data.corpus import open_source
from maxtext.data.inspect import inspect, show
from maxtext.data.manifest import load_prepared
from maxtext.data.pipeline import make_batches
from maxtext.data.prepare import Options, prepare
from maxtext.data.tokens import resolve
from tests.data.record_files import TEXTS, jsonl
from tests.runs import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The 20 documents as bytes, the first 8 in one source."""
    root = tmp_path_factory.mktemp("inspect")
    (root / "a.jsonl").write_bytes(jsonl(TEXTS[:8]))
    (root / "b.jsonl").write_bytes(jsonl(TEXTS[8:]))
    sources = tuple(open_source(name, root / f"{name}.jsonl") for name in "ab")
    prepare(Options(root / "out", sources, {"a": 0.0, "b": 0.0}, tokenizer="bytes"))
    return root / "out"


def config(make_config, folder, **data):
    return make_config(batch=4, model_vocab=300, prepared=str(folder), vocab_size=None, eos_id=None, pad_id=None,
                       **{"sequence_length": 64} | data)


@pytest.mark.parametrize("data", [{}, {"document_masking": True}, {"packing": "best_fit", "document_masking": True,
                                                                   "sequence_length": 256}])
def test_it_is_the_batch_of_training_and_its_text(make_config, folder, data):
    cfg = config(make_config, folder, **data)
    T = cfg.data.sequence_length
    batches = make_batches(cfg, resolve(cfg))
    raw = {file.path: np.fromfile(file.path, "<u2") for files in load_prepared(folder).train.values() for file in files}
    seen = set()
    for step in (1, 2, 3):
        batch, found = next(batches), json.loads(json.dumps(inspect(cfg, step)))
        for i, row in enumerate(found["rows"]):
            for key in ("tokens", "targets", "weights"):
                assert row[key] == getattr(batch, f"{key}_BT")[i].tolist()
            assert row["segments"] == (batch.segments_BT[i].tolist() if data else None)
            assert row["documents"][0]["columns"][0] == 0
            for document in row["documents"]:
                (a, b), (start, end) = document["columns"], document["tokens"]
                assert raw[document["file"]][start:end].tolist() == row["tokens"][a:b]
                assert document["bytes"] == [2 * start, 2 * end]
                source, line = document["from"].split(":")
                number = int(line) - 1 + 8 * (source == "b.jsonl")
                text = TEXTS[number].encode()[slice(*document["text_bytes"])]
                assert document["text"] == text.decode(errors="replace")
                assert (document["source"], document["name"]) == (source[0], document["from"])
                assert row["positions"][a:b] == list(range(a, b) if not data else range(b - a))
                seen.add(number)
            assert row["padding"] == T - row["documents"][-1]["columns"][1]
    batches.close()
    assert len(seen) > 5
    assert found["rows"][2] == inspect(cfg, 3, 2)["rows"][0]
    printed = show(found)
    assert "update 3 (epoch" in printed
    assert f'{found["rows"][0]["documents"][0]["name"]} (' in printed


@pytest.mark.parametrize("verb", ["prepare", "inspect", "stats", "overlap", "audit"])
def test_help_imports_no_jax(verb):
    program = ("import atexit, sys; atexit.register(lambda: print('jax' in sys.modules))\n"
               "from maxtext.cli import main; main(['data', sys.argv[1], '--help'])")
    done = subprocess.run([sys.executable, "-c", program, verb], text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, timeout=60)
    assert done.stdout.startswith(f"usage: maxtext data {verb}")
    assert done.stdout.endswith("\nFalse\n")


def test_no_backend_is_started_and_mistakes_are_one_line(folder, tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(f"model: {{vocab_size: 300, d_model: 8, n_layers: 1, n_heads: 1, d_ff: 8}}\n"
                    f"data: {{prepared: {folder}, sequence_length: 64}}\noptim: {{lr: 0.001}}\n"
                    f"train: {{steps: 5, global_batch: 4}}\noutput_dir: {tmp_path}\n")
    program = ("import sys; from maxtext.cli import main; code = main(sys.argv[1:])\n"
               "from jax._src import xla_bridge; assert not xla_bridge._backends; sys.exit(code)")

    def call(*argv):
        return subprocess.run([sys.executable, "-c", program, "data", "inspect", str(path), *argv], text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)

    done = call("--step", "2", "--row", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["row"] for row in json.loads(done.stdout)["rows"]] == [1]
    for argv, message in ((("--step", "0"), "updates are counted from 1"),
                          (("--step", "1", "--row", "4"), "rows 0 to 3")):
        done = call(*argv)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
