"""Configs, token files and a prepared data set for the tests of maxtext.data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext.config import schema
from maxtext.data.corpus import open_source
from maxtext.data.prepare import Options, prepare

TEXT = Path(__file__).resolve().parents[1] / "fixtures" / "text"


@pytest.fixture
def make_config(tmp_path):
    """Returns f(sources, **changes of the data section) -> Config; `batch`, `steps` and `eval_sets` are known too."""

    def make(sources=None, batch=8, steps=100, eval_sets=None, model_vocab=None, **changes) -> schema.Config:
        data: dict[str, Any] = {"sequence_length": 16, "vocab_size": 1000, "eos_id": 0, "pad_id": 1} | changes
        sources = {name: source if isinstance(source, schema.SourceConfig) else schema.SourceConfig(paths=tuple(source))
                   for name, source in (sources or {}).items()}
        return schema.Config(
            model=schema.ModelConfig(vocab_size=model_vocab or data["vocab_size"] or 100352, d_model=8, n_layers=1,
                                     n_heads=1, d_ff=8),
            data=schema.DataConfig(sources=sources, **data), optim=schema.OptimConfig(lr=1e-3),
            train=schema.TrainConfig(steps=steps, global_batch=batch), output_dir=str(tmp_path / "runs"),
            eval=schema.EvalConfig(sets={name: schema.EvalSetConfig(paths=tuple(paths))
                                         for name, paths in (eval_sets or {}).items()}))

    return make


@pytest.fixture
def write_tokens(tmp_path):
    """Returns f(name, tokens or count, dtype) -> path of a headerless token file; a count draws ids 2..999."""

    def write(name, tokens, dtype=np.uint16) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(tokens, int):
            tokens = np.random.default_rng(len(name) * 1000 + tokens).integers(2, 1000, tokens)
        np.asarray(tokens).astype(dtype).tofile(path)
        return str(path)

    return write


@pytest.fixture(scope="session")
def text_options():
    """Returns f(out, **changes) -> Options that prepare the committed excerpt with a vocabulary of 512."""

    def make(out, **changes) -> Options:
        sources = tuple(open_source(name, TEXT / name) for name in ("code", "prose"))
        return dataclasses.replace(Options(Path(out), sources, {"code": 0.2, "prose": 0.2}, vocab_size=512), **changes)

    return make


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, text_options) -> Path:
    """A folder with the prepared excerpt."""
    out = tmp_path_factory.mktemp("prepared") / "excerpt"
    prepare(text_options(out))
    return out


INSTANCES = Path(__file__).resolve().parents[1] / "oracles" / "instances"


@pytest.fixture
def reference_run(make_config, write_tokens):
    """Returns f(case, **changes of the data section) -> (its record, Config that reads the same instances)."""

    def make(case: str, **changes) -> tuple[dict[str, Any], schema.Config]:
        record = json.loads((INSTANCES / f"{case}.json").read_text())
        with np.load(INSTANCES / "tokens.npz") as arrays:
            paths = [write_tokens(f"{case}/{name}", arrays[f"{case}/{name}"], record["dtype"])
                     for name in record["files"]]
        data = {key: record[key] for key in ("sequence_length", "seed", "vocab_size", "eos_id", "pad_id", "dtype")}
        if record["filter"]:
            limits = {key.removeprefix("repetition_"): value for key, value in record["filter"].items()}
            data["instance_filter"] = schema.InstanceFilterConfig(enabled=True, **limits)
        if record["packed"]:
            data |= {"packing": "best_fit", "packing_group": record["packed"]["source_group_size"],
                     "packing_seed": record["packing_seed"]}
        return record, make_config({"x": paths}, batch=record["global_batch"], steps=len(record["steps"]),
                                   **data | changes)

    return make
