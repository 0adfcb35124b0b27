"""More replicas of a planned machine, and what the simulator says of runs that others published."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from maxtext.config.load import to_yaml
from maxtext.config.schema import Config, MeshConfig
from maxtext.model.cost import count_params, flops_per_token
from maxtext.model.prediction import predict
from maxtext.plan.command import run
from maxtext.plan.published import POINTS, accuracy
from maxtext.plan.simulate import Base, gradient_seconds, scales
from maxtext.plan.topology import read_target
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.one_pass  # arithmetic alone
V5P = read_target("v5p:2x2x2")
MESH = {"data": 1, "fsdp": 8, "tensor": 1}


def config() -> Config:
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("window", "full"), d_model=512, d_ff=4096), global_batch=32)
    data = dataclasses.replace(cfg.data, prepared="never-read")
    return dataclasses.replace(cfg, data=data, mesh=MeshConfig(data=1, fsdp=8, tensor=1))


def test_one_replica_is_the_plan_itself():
    cfg = config()
    row, = scales(cfg, V5P, MESH, Base(compute=2.0, hidden=1.0, exposed=0.5, source="compiled"), 1, strong=False)
    assert (row.devices, row.tokens, row.step, row.waiting) == (8, 512, 2.5, pytest.approx(0.2))
    flops = flops_per_token(cfg.model, 16) * 512 / 8
    assert row.mfu == pytest.approx(100 * flops / 2.5 / 459e12)
    assert row.days == pytest.approx(10 * 2.5 / 86400)
    assert row.device_hours == pytest.approx(1e12 / 512 * 2.5 * 8 / 3600)


def test_replicas_exchange_what_each_device_holds_over_the_network():
    """Two slices: half of it each way, twice, at 6.25 GB/s, and two steps of 50 us a call; more slices, up to twice."""
    cfg = config()
    held = 4 * count_params(cfg.model) / 8  # float32, of one device
    calls = 2 * 4  # arrays of two layers: projections in and out of attention and of the feed-forward
    all_of_them, last = gradient_seconds(cfg, V5P, MESH, 2)
    assert all_of_them == pytest.approx(held / 6.25e9 + calls * 102e-6)
    assert last == pytest.approx(all_of_them / calls)
    assert gradient_seconds(cfg, V5P, MESH, 1) == (0, 0)
    assert gradient_seconds(cfg, V5P, MESH, 4) > gradient_seconds(cfg, V5P, MESH, 2)


def test_gradients_hide_behind_the_backward_pass_as_far_as_it_lasts():
    cfg = config()
    between, last = gradient_seconds(cfg, V5P, MESH, 2)
    long = scales(cfg, V5P, MESH, Base(2 * between, 0.0, 0.0, "compiled"), 2, strong=False)[1]
    assert long.step == pytest.approx(2 * between + last)
    short = scales(cfg, V5P, MESH, Base(between, 0.0, 0.0, "compiled"), 2, strong=False)[1]
    assert short.step == pytest.approx(between + between / 3 + last)
    assert short.waiting == pytest.approx(1 - between / short.step)


def test_with_the_same_batch_computing_shrinks_until_sequences_run_out():
    rows = scales(config(), V5P, MESH, Base(8.0, 3.0, 0.8, "compiled", 0.4, 0.1), 64, strong=True)
    assert [row.replicas for row in rows] == [1, 2, 4]  # 32 sequences over 8 devices
    assert {row.tokens for row in rows} == {512}
    assert rows[0].step == pytest.approx(8.9)
    assert rows[1].step == pytest.approx(0.4 + 7.6 / 2 + 0.4 + 0.1, rel=1e-3)
    assert rows[2].step == pytest.approx(3.0 + 0.2 + 0.1, rel=1e-2)  # gathers of weights take as long as before
    assert rows[2].device_hours > rows[0].device_hours


def test_the_command_draws_and_writes_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file, out, plot = tmp_path / "tiny.yml", tmp_path / "scale.json", tmp_path / "scale.svg"
    file.write_text(to_yaml(config()))
    arguments = [str(file), "--topology", "h100:1x8", "--estimate", "--scale", "4"]
    assert run([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    tree, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert [row["devices"] for row in tree["scale"]["rows"]] == [8, 16, 32]
    assert f"{tree['scale']['rows'][2]['device_hours']:,.0f}" in shown
    assert "published runs" in shown
    assert tree["estimate"]["step_seconds"] == tree["scale"]["rows"][0]["step"]
    assert plot.read_text().count("<svg") == 1
    assert ">32<" in plot.read_text()
    assert run([*arguments, "--plot", str(tmp_path / "scale.txt")]) == 2
    assert "ends in .svg or .png" in capsys.readouterr().err


def test_published_runs_are_as_large_as_they_say():
    sizes = {"Llama 3.1 8B": 8.0, "Llama 3.1 70B": 70.6, "Llama 3.1 405B": 405.9, "Llama 2 70B": 69.0}
    for one in POINTS:
        if one.name in sizes:
            assert count_params(one.config.model) / 1e9 == pytest.approx(sizes[one.name], abs=0.1)
        assert one.config.train.global_batch == one.sequences * one.devices
    assert {one.devices for one in POINTS} == {128, 256, 8192, 16384}


def test_tokens_and_mfu_give_a_step():
    v6e = next(one for one in POINTS if one.tokens == 7207)
    assert v6e.published_step == 4 * 8192 / 7207
    h100 = next(one for one in POINTS if one.mfu == 43)
    cfg = h100.config
    assert h100.published_step == pytest.approx(
        flops_per_token(cfg.model, 8192) * cfg.batch_tokens / 8192 / (0.43 * 989.5e12))


def test_the_error_is_stated_and_not_fitted_away():
    """What the page says; a change of the model that moves it is a change of the page."""
    found = accuracy()
    assert found.mean_error == pytest.approx(0.19, abs=0.02)
    assert found.calibrated_error < found.mean_error
    assert all(0.9 < ratio < 1.6 for ratios in found.ratios.values() for ratio in ratios)


def test_twice_the_gpus_cost_as_much_more_as_was_published():
    """Llama 3 405B from 8,192 to 16,384 H100: 43% to 41%."""
    small, large = (one for one in POINTS if one.name == "Llama 3 405B")
    published = small.published_step / large.published_step / 2
    assert small.prediction.step / large.prediction.step / 2 == pytest.approx(published, abs=0.02)


def test_a_prediction_is_of_the_mesh_that_it_is_given():
    cfg = config()
    assert predict(cfg, MESH, V5P.network).step != predict(cfg, MESH | {"fsdp": 4, "tensor": 2}, V5P.network).step
