"""Averages of checkpoints: the numbers, who may be averaged, and that others open the result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.checkpoint.manager import Checkpoints
from maxtext.cli import main
from maxtext.config.dump import to_yaml
from maxtext.config.schema import Config, DataConfig, InitFromConfig, SourceConfig
from maxtext.convert import ConvertError
from maxtext.convert.merge import merge
from maxtext.convert.saved import open_saved
from maxtext.train.state import TrainState, init_state
from maxtext.train.warm_start import warm_start
from tests.runs import contents
from tests.tiny import mesh_of, tiny_config, tiny_model

MESH = (1, 4, 2)


def config(**model: Any) -> Config:
    data = DataConfig(sequence_length=16, vocab_size=90, eos_id=88, pad_id=89, sources={"a": SourceConfig(("x.npy",))})
    cfg = dataclasses.replace(tiny_config(tiny_model(**model)), data=data, run_name="one")
    return dataclasses.replace(cfg, train=dataclasses.replace(
        cfg.train, init_from=InitFromConfig(path="elsewhere", optimizer=True), take_over_at=2))


def weights(cfg: Config, seed: int) -> TrainState:
    state = init_state(dataclasses.replace(cfg, seed=seed))
    # Numbers of every size, whose sum in float32 would lose the small ones.
    scale = np.float32(10.0 ** (3 * seed))
    return state.replace(params=jax.tree.map(lambda x: x * scale, state.params))


def save(folder: Path, cfg: Config, *seeds: int) -> Path:
    """A run whose step s holds the weights of seed s."""
    with jax.set_mesh(mesh_of(MESH)):
        checkpoints = Checkpoints(str(folder / "checkpoints"), cfg.checkpoint, config_text=to_yaml(cfg))
        for seed in seeds:
            checkpoints.save(seed, weights(cfg, seed), {"data": {}, "record": {}})
        checkpoints.wait()
        checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return save(folder / "a", config(), 1, 2), save(folder / "b", config(), 3)


def leaves(path: Path, step: int | None = None) -> dict[str, np.ndarray]:
    saved = open_saved(str(path), step)
    return {name: saved.leaf(name) for name in saved.manifest.leaves if name.startswith("params.")}


def test_the_mean_is_that_of_float64_and_the_runs_are_only_read(runs: tuple[Path, Path], tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]):
    a, b = runs
    before = contents(a), contents(b)
    out = tmp_path / "merged"
    assert main(["checkpoint", "merge", str(out), f"{a}@1", str(a), str(b / "checkpoints" / "step_00000003")]) == 0
    assert capsys.readouterr().out.count("1/3 of ") == 3
    assert (contents(a), contents(b)) == before
    parts, mean = [leaves(a, 1), leaves(a, 2), leaves(b)], leaves(out)
    assert mean.keys() == parts[0].keys()
    assert open_saved(str(out)).manifest.leaves.keys() == mean.keys()  # no optimizer
    float32_differs = 0
    for name, array in mean.items():
        exact = np.mean([part[name].astype(np.float64) for part in parts], axis=0).astype(np.float32)
        np.testing.assert_array_equal(array, exact, err_msg=name)
        float32_differs += (np.mean([part[name] for part in parts], axis=0, dtype=np.float32) != exact).sum()
        assert not np.array_equal(array, parts[0][name]), name
    assert float32_differs > 1000


def test_where_it_comes_from_is_written_into_it(runs: tuple[Path, Path], tmp_path: Path):
    a, b = runs
    merge(str(tmp_path / "m"), [f"{a}@1", str(b)])
    saved = open_saved(str(tmp_path / "m"))
    merged = saved.manifest.extra["merged"]
    assert [(source["run_name"], source["step"]) for source in merged["of"]] == [("one", 1), ("one", 3)]
    assert merged["of"][1]["checkpoint"] == str(b / "checkpoints" / "step_00000003")
    assert json.loads((b / "checkpoints" / "step_00000003" / "manifest.json").read_text())["body"]["saved_at"] == \
        merged["of"][1]["saved_at"]
    assert len({source["manifest_sha256"] for source in merged["of"]}) == 2
    assert (saved.cfg.run_name, saved.cfg.output_dir) == ("m", str(tmp_path))
    assert (saved.cfg.train.init_from, saved.cfg.train.take_over_at) == (InitFromConfig(), None)
    assert saved.cfg.model == config().model


def test_another_run_starts_from_it_and_it_is_exported(runs: tuple[Path, Path], tmp_path: Path):
    a, b = runs
    merge(str(tmp_path / "m"), [f"{a}@1", str(b)])
    cfg = config()
    with jax.set_mesh(mesh_of((1, 2, 1))):
        started = warm_start(init_state(cfg), InitFromConfig(path=str(tmp_path / "m")), print)
    np.testing.assert_array_equal(np.asarray(started.params.embed), leaves(tmp_path / "m")["params.embed"])
    assert main(["convert", "export", str(tmp_path / "m"), str(tmp_path / "hf")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "m")]) == 0


@pytest.mark.parametrize(("change", "line"), [
    ({"window": 5}, "  model.window: 6 and 5"),
    ({"d_ff": 64}, "  model.d_ff: 48 and 64"),
    ({"rope_theta": 1e4}, "  model.rope_theta: 500000.0 and 10000.0")])
def test_other_models_are_refused_by_name(runs: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], line: str):
    other = save(tmp_path / "other", config(**change), 1)
    with pytest.raises(ConvertError, match="are not of the same model") as error:
        merge(str(tmp_path / "m"), [str(runs[0]), str(other)])
    assert line in str(error.value).splitlines()
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_averaged_is_refused_before_anything_is_written(runs: tuple[Path, Path], tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]):
    a, b = map(str, runs)
    out = str(tmp_path / "m")
    for given, message in [
        ([a], "a mean of 1 checkpoint; give two or more"),
        ([a, f"{a}@2"], "step_00000002 is given twice"),
        ([a, f"{b}@4"], "no good checkpoint of step 4"),
        ([a, f"{b}c"], f"{b}c does not exist"),
        ([a, f"{b}c"], "; give a run, an imported model"),
    ]:
        assert main(["checkpoint", "merge", out, *given]) == 2
        assert message in capsys.readouterr().err
        assert not Path(out).exists()
    Path(out).mkdir()
    Path(out, "mine").write_text("")
    assert main(["checkpoint", "merge", out, "no run", "none either"]) == 2  # said before terabytes are read
    assert "exists and is not empty" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["checkpoint", "merge", str(tmp_path / "file" / "m"), a, b]) == 2
    assert capsys.readouterr().err == (f"{tmp_path}/file/m: cannot be made ({tmp_path}/file is no folder); give "
                                       "a place that you may write\n")


def test_a_damaged_or_spoilt_checkpoint_is_refused(runs: tuple[Path, Path], tmp_path: Path):
    bad = save(tmp_path / "bad", config(), 4)
    largest = max((path for path in bad.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(ConvertError, match=rf"step_00000004 is damaged: .*{largest.name}"):
        merge(str(tmp_path / "m"), [str(runs[0]), str(bad)])
    cfg = config()
    with jax.set_mesh(mesh_of(MESH)):
        state = weights(cfg, 1)
        spoilt = state.replace(params=state.params.replace(norm=state.params.norm.at[3].set(np.nan)))
        checkpoints = Checkpoints(str(tmp_path / "nan" / "checkpoints"), cfg.checkpoint, config_text=to_yaml(cfg))
        checkpoints.save(1, spoilt, {})
        checkpoints.wait()
        checkpoints.close()
    with pytest.raises(ConvertError, match=r"params.norm has 1 NaN or infinite values"):
        merge(str(tmp_path / "m"), [str(runs[0]), str(tmp_path / "nan")])
    assert not (tmp_path / "m").exists()
