"""`mesh: auto`: what is chosen, why, and how it is written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from maxtext.cli import main
from maxtext.config.load import ConfigError, find_config, load, to_yaml
from maxtext.config.schema import Config, MeshConfig, RematConfig
from maxtext.config.validate import mesh_problems, resolve_mesh
from maxtext.model.choose_mesh import settled
from maxtext.parallel.chips import CHIPS
from maxtext.parallel.mesh import MeshError
from maxtext.parallel.network import Network
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.one_pass  # arithmetic alone
IRONWOOD = Network(CHIPS["tpu7x"], 128, (4, 4, 4))


def used(cfg: Config, n_devices: int, network: Network) -> dict[str, int]:
    chosen, why = settled(dataclasses.replace(cfg, mesh=MeshConfig(auto=True)), n_devices, network)
    assert why
    assert mesh_problems(chosen, n_devices) == []
    return {axis: size for axis, size in resolve_mesh(chosen.mesh, n_devices).items() if size > 1}


def model(name: str, *overrides: str) -> Config:
    return load(find_config(f"models/{name}"), ["optim.lr=1e-4", "train.steps=1", "data.prepared=none", *overrides])


def large(name: str, length: int, batch: int, *overrides: str) -> Config:
    return model(name, f"data.sequence_length={length}", f"train.global_batch={batch}", *overrides)


def test_weights_are_shared_by_all_where_their_gathers_hide():
    assert used(large("olmo3_7b", 8192, 512), 128, IRONWOOD) == {"fsdp": 128}


def test_data_spans_the_slices():
    assert used(large("olmo3_7b", 8192, 512), 256, IRONWOOD) == {"data": 2, "fsdp": 128}


def test_nodes_of_gpus_need_no_copies_when_gathers_between_them_hide():
    cfg = large("olmo3_7b", 8192, 512, "train.remat.mode=full")
    assert used(cfg, 512, Network(CHIPS["h100"], 8)) == {"fsdp": 512}


def test_few_tokens_a_device_make_copies_of_the_model_worth_while():
    """2,048 tokens a GPU cannot hide gathers between nodes, and a small model fits into each."""
    cfg = large("olmo3_190m", 2048, 512, "train.remat.mode=full")
    assert used(cfg, 512, Network(CHIPS["h100"], 8)) == {"data": 512}


def test_experts_get_their_axis_where_gathering_all_of_them_is_slower():
    cfg = large("deepseek_v3", 4096, 1024, "train.remat.mode=full")
    chosen = used(cfg, 1024, Network(CHIPS["tpu7x"], 1024, (8, 8, 8)))
    assert chosen["expert"] > 1


def test_fewer_sequences_than_devices_are_split_in_heads_or_positions():
    chosen = used(large("olmo3_7b", 8192, 32), 128, IRONWOOD)
    assert chosen.get("tensor", 1) * chosen.get("context", 1) == 4


def test_heads_are_not_split_between_nodes():
    """With one sequence of an odd length, eight GPUs could only split the heads; in nodes of four they cannot."""
    cfg = large("llama31_8b", 8191, 1)
    assert used(cfg, 8, Network(CHIPS["h100"], 8)) == {"tensor": 8}
    with pytest.raises(MeshError, match="finds no mesh that divides model and batch over 8 devices; with fsdp alone"):
        used(cfg, 8, Network(CHIPS["h100"], 4))


def test_what_does_not_fit_says_so_and_takes_the_least_memory():
    cfg = dataclasses.replace(large("llama3_70b", 8192, 8, "train.remat.mode=none"), mesh=MeshConfig(auto=True))
    why = settled(cfg, 8, Network(CHIPS["h100"], 8))[1]
    assert "of which none fits (about " in why[0]


def test_unknown_devices_share_weights():
    """Virtual devices: the simplest valid mesh counts, and the choice says that it knows nothing of them."""
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("window", "full")), remat=RematConfig(mode="full"))
    auto = dataclasses.replace(cfg, mesh=MeshConfig(auto=True))
    chosen, why = settled(auto, 8, Network(None, 8))
    assert resolve_mesh(chosen.mesh, 8)["fsdp"] == 8
    assert "nothing is published of these devices" in why[-1]
    assert settled(auto, 8, Network(None, 8)) == (chosen, why)


def test_sizes_that_were_written_stay():
    cfg = tiny_config()
    assert settled(cfg, 8, Network(None, 8)) == (cfg, ())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yml"
    cfg = tiny_config()
    data = dataclasses.replace(cfg.data, prepared="never-read")
    path.write_text(to_yaml(dataclasses.replace(cfg, data=data, mesh=MeshConfig(data=2, fsdp=4))))
    return path


def test_it_is_one_word_in_a_file_and_on_the_command_line(file: Path, tmp_path: Path):
    """It forgets sizes that a base has set, and survives being written out."""
    over = tmp_path / "over.yml"
    over.write_text(f"base: {file}\nmesh: auto\n")
    for cfg in (load(over), load(file, ["mesh=auto"])):
        assert cfg.mesh == MeshConfig(auto=True)
    again = tmp_path / "again.yml"
    again.write_text(to_yaml(load(over)))
    assert load(again) == load(over)


def test_sizes_beside_it_are_refused(file: Path):
    with pytest.raises(ConfigError, match=r"mesh\.auto chooses the sizes, but mesh\.fsdp 4 is set"):
        load(file, ["mesh.auto=true"])
    with pytest.raises(ConfigError, match="automatic where a section is expected; give auto, or a mapping"):
        load(file, ["mesh=automatic"])


def test_show_and_a_dry_run_say_what_is_chosen_and_why(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "show", str(file), "mesh=auto"]) == 0
    assert "# mesh: auto on 8 x cpu: fsdp 8: about" in capsys.readouterr().out
    assert main(["train", str(file), "mesh=auto", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"mesh +data 1,.* fsdp 8,.* tensor 1 \(cpu; --devices N for another number\)", shown)
    assert re.search(r"mesh: auto +fsdp 8: about", shown)


def test_a_plan_says_what_is_chosen_and_why(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(file), "mesh=auto", "--topology", "v5e:4x2", "--estimate"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mesh: auto data 8: about" in shown  # a tiny model waits for its gathers
    assert "should fit" in shown
