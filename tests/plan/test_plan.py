"""From a config and a topology to a table, JSON and an exit code."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxtext.config.load import to_yaml
from maxtext.config.schema import Config, MeshConfig, RematConfig
from maxtext.model.cost import peak_flops
from maxtext.model.decoder import decoder_params
from maxtext.parallel.mesh import make_mesh
from maxtext.parallel.sharding import is_param
from maxtext.plan.collectives import Traffic
from maxtext.plan.command import cache_folder, cache_key, compiled, run
from maxtext.plan.estimate import estimate
from maxtext.plan.program import Memory, Program, Refusal, compile_program, read_program, read_refusal
from maxtext.plan.report import make_plan, to_json, to_rows
from maxtext.plan.topology import CHIPS, GIB, PlanError, Target, make_devices, read_target
from maxtext.plan.verdict import judge, suggestions
from maxtext.train.state import abstract_state
from tests.tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A plan sets variables for its process; here they go back after each test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(**train: Any) -> Config:
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("window", "full")), **train)
    data = dataclasses.replace(cfg.data, prepared="never-read")
    return dataclasses.replace(cfg, data=data, run_name="tiny", mesh=MeshConfig(data=1, fsdp=8, tensor=1))


@pytest.fixture(scope="module")
def program() -> Program:
    """The tiny train step, compiled for 8 virtual devices that share the weights."""
    return compile_program(config(), make_devices(read_target("cpu:8")))


def test_arguments_are_the_shards_of_state_and_batch(program: Program):
    cfg = config()
    mesh = make_mesh(cfg, jax.devices())
    state = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(abstract_state(cfg, mesh)))
    batch = 3 * 4 * cfg.train.global_batch * cfg.data.sequence_length // 8
    assert program.memory.arguments == pytest.approx(state + batch, rel=0.02)  # small arrays are padded
    assert program.memory.aliased > 0.95 * state
    assert program.memory.temporaries > 0


def matrices() -> tuple[int, int]:
    """Numbers in the matrices of all blocks, and in the embedding (the LM head has as many)."""
    declared = decoder_params(config().model)
    blocks = [p for p in jax.tree.leaves(declared.segments, is_leaf=is_param) if "embed" in p.dims]
    return sum(math.prod(p.shape) for p in blocks), math.prod(declared.embed.shape)


def test_each_weight_is_gathered_for_each_use(program: Program):
    """Blocks twice, as they are recomputed; 7 of 8 parts of each array come from other devices, in float32."""
    blocks, embedding = matrices()
    gathers = [row for row in program.traffic if row.kind == "all-gather"]
    assert [row.axes for row in gathers] == ["fsdp"]
    assert gathers[0].bytes_sent == 4 * (2 * blocks + 2 * embedding) * 7 // 8


def test_compiled_flops_equal_a_hand_count(program: Program):
    """Blocks run forward, again, and twice as much backward; the LM head is not recomputed.

    Attention of 16 positions is one block of queries, which sees 16 keys.
    """
    cfg = config()
    blocks, head = matrices()
    tokens, pairs = 16, cfg.model.n_layers * 16 * 16  # of one device
    attention = 4 * 2 * 2 * pairs * cfg.model.n_heads * cfg.model.head_width
    assert program.matmul_flops == tokens * (4 * 2 * blocks + 3 * 2 * head) + attention
    assert program.unknown_loops == ()
    model = estimate(cfg, read_target("cpu:8"), program).model_flops
    assert program.matmul_flops / model == pytest.approx(1.40, abs=0.01)


TEXT = """HloModule m

%inside (p: f32[4,8]) -> f32[4,16] {
  %p = f32[4,8] parameter(0)
  %w = f32[8,16] constant({...})
  ROOT %c = f32[4,16] convolution(%p, %w), dim_labels=bf_io->bf, CYCLES(50)
}

ENTRY %main (x: f32[4,8]) -> f32[4,16] {
  %x = f32[4,8] parameter(0)
  %f = f32[4,16] fusion(%x), kind=kOutput, calls=%inside, CYCLES(100)
  %splash_fwd.3 = f32[4,16] custom-call(%f), custom_call_target="tpu_custom_call"
  %s = f32[4,16] copy-start(%f), CYCLES(300)
  %r = f32[4,16] all-reduce(%splash_fwd.3), replica_groups={}, to_apply=%sum, CYCLES(1000)
  ROOT %a = f32[4,16] add(%r, %splash_fwd.3), CYCLES(7)
}
"""


def test_cycles_are_those_of_the_matrix_and_vector_units():
    """A fusion counts once, not again for what is inside it; collectives and what runs beside them do not."""
    text = re.sub(r"CYCLES\((\d+)\)", r'backend_config={"estimated_cycles":"\1"}', TEXT)
    stats = SimpleNamespace(**{f"{name}_size_in_bytes": size for size, name in enumerate(
        ("argument", "output", "alias", "temp", "generated_code"))})
    step = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: stats)
    read = read_program(step, make_mesh(config(), jax.devices()), 1.0, 2.0)
    assert (read.cycles, read.matmul_cycles, read.matmul_flops) == (107, 100, 2 * 4 * 8 * 16)
    assert (read.kernels, read.silent_kernels, read.kernel_flops) == (1, 1, 0)
    assert (read.kernel_names, read.attention_flops) == ({"splash_fwd": 1}, 0)
    assert read.memory == Memory(arguments=0, outputs=1, aliased=2, temporaries=3, code=4)
    assert read.torus_dims == {"fsdp": 0}


def test_a_program_survives_json(program: Program):
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


MEMORY = Memory(arguments=10 * GIB, outputs=8 * GIB, aliased=8 * GIB, temporaries=20 * GIB, code=GIB)
V5P = read_target("v5p:2x2x2")


def made_program(**changes: Any) -> Program:
    made = Program(mesh={"data": 1, "fsdp": 8, "expert": 1, "tensor": 1}, memory=MEMORY, matmul_flops=10**12,
                   kernel_flops=0, kernels=0, silent_kernels=0, kernel_names={}, attention_flops=0, cycles=0,
                   matmul_cycles=0, traffic=(),
                   torus_dims={}, unknown_loops=(), branches=0, trace_seconds=1.0, compile_seconds=2.0,
                   versions={"jax": "1"}, flags=(), date="2026-01-31")
    return dataclasses.replace(made, **changes)


def test_time_is_the_longer_of_computing_and_overlapped_collectives_and_then_what_blocks():
    busy, cfg = made_program(), config()
    assert estimate(cfg, V5P, busy).step_seconds == pytest.approx(1e12 / (0.83 * 459e12))
    slow = estimate(cfg, V5P, dataclasses.replace(busy, cycles=7 * 10**9))
    assert slow.step_seconds == pytest.approx(7e9 / (459e12 / 262_144))
    rows = (Traffic("all-gather", "fsdp", 8, True, 2, 6 * 10**10), Traffic("all-reduce", "data", 8, False, 2, 10**10))
    both = estimate(cfg, V5P, dataclasses.replace(busy, traffic=rows, torus_dims={"fsdp": 3, "data": 1}))
    assert (both.hidden_seconds, both.exposed_seconds) == pytest.approx((6e10 / 600e9, 1e10 / 200e9))
    assert both.step_seconds == pytest.approx(0.1 + 0.05)
    kernels = made_program(matmul_flops=0, kernel_flops=10**12, attention_flops=4 * 10**11, kernel_names={"splash": 1})
    slow = estimate(wide_heads(), V5P, kernels)
    assert slow.step_seconds == pytest.approx(6e11 / (0.83 * 459e12) + 4e11 / (0.36 * 459e12))
    assert "attention kernels with heads of 128 reach 36% of the peak" in slow.assumptions
    assert both.mfu == pytest.approx(100 * both.model_flops / 0.15 / 459e12)


def wide_heads() -> Config:
    cfg = config()
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, head_dim=128))


def test_devices_of_one_chip_share_its_links():
    rows = (Traffic("all-gather", "fsdp", 8, True, 1, 6 * 10**10),)
    guess = estimate(config(), read_target("tpu7x:2x2x1"), made_program(traffic=rows, torus_dims={"fsdp": 3}))
    assert guess.hidden_seconds == pytest.approx(6e10 / 300e9)


def test_an_unknown_peak_gives_no_time_and_no_mfu():
    plan = make_plan(config(), read_target("cpu:8"), made_program())
    assert (plan.estimate.step_seconds, plan.estimate.mfu, to_json(plan)["estimate"]["days"]) == (None, None, None)
    rows = dict(to_rows(plan, False))
    assert rows["MFU"] == "n/a"
    assert rows["target"].endswith("; --topology names another machine")


def test_verdicts_at_the_border():
    capacity = CHIPS["v5p"].memory_bytes
    assert MEMORY.total == 31 * GIB
    exact = dataclasses.replace(MEMORY, temporaries=capacity - 11 * GIB)
    assert judge(config(), V5P, made_program(memory=exact)).fits
    more = judge(config(), V5P, made_program(memory=dataclasses.replace(exact, temporaries=exact.temporaries + 1)))
    assert not more.fits
    assert more.needed - more.capacity == 1


def test_what_does_not_fit_names_three_settings_that_need_less():
    cfg = config(remat=RematConfig(mode="none"), global_batch=64)
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(data=2, fsdp=4, tensor=1))
    found = suggestions(cfg, 8)
    assert {one.overrides for one in found} <= {
        ("train.remat.mode=full",), ("mesh.data=1", "mesh.fsdp=8"), ("mesh.fsdp=2", "mesh.tensor=2"),
        ("train.gradient_accumulation_steps=2",), ("optim.moments_dtype=bfloat16",), ("optim.offload=host",)}
    assert len(found) == 3
    assert [one.saves for one in found] == sorted((one.saves for one in found), reverse=True)
    assert found[-1].saves > 0
    table = dict(to_rows(make_plan(cfg, V5P, made_program(memory=dataclasses.replace(MEMORY, code=99 * GIB))), False))
    assert table["verdict"].startswith("does not fit: 135.8% of a device's memory, 34.00 GiB too much")
    assert "  try" in table


def test_settings_that_cannot_help_are_not_named():
    """Full remat and small moments already, one sequence a device, and a vocabulary that two devices cannot share."""
    model = tiny_model(n_heads=3, n_kv_heads=1, d_ff=49, vocab_size=97)
    cfg = tiny_config(model, remat=RematConfig(mode="full"))
    small = dataclasses.replace(cfg.optim, moments_dtype="bfloat16")
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(data=1, fsdp=8, tensor=1), optim=small)
    assert named(cfg) == set()
    # Four ways to share the sequences instead of eight leave each device twice the tokens: a tensor axis costs memory.
    assert named(config()) == {"optim.moments_dtype=bfloat16"}


def named(cfg: Config) -> set[str]:
    return {override for one in suggestions(cfg, 8) for override in one.overrides} - {"optim.offload=host"}


@pytest.mark.parametrize(("text", "message"), [
    ("v5:4x4x4", "unknown chip 'v5'; did you mean 'v5[pe]'? Known are tpu7x, v6e, v5p, v5e, h100, "),
    ("tpu7:4x4x4", "did you mean 'tpu7x'?"),
    ("v5p:4x4", "form a 3D torus, so the shape has 3 numbers, not 2; write for instance v5p:4x4x4"),
    ("v6e:16x16x2", "form a 2D torus, so the shape has 2 numbers, not 3"),
    ("cpu:2x4", "virtual CPU devices are counted, so the shape has 1 number, not 2"),
    ("v5p", "write the chip and its shape, such as v5p:4x4x4"),
    ("cpu:0", "such as cpu:8"),
    ("h100:8", "h100 has nodes and GPUs in a node, so the shape has 2 numbers, not 1; write for instance h100:8x8"),
    ("h100:4x16", "one switch joins at most 8 GPUs of h100, not 16"),
])
def test_topologies_that_are_none(text: str, message: str):
    with pytest.raises(PlanError) as error:
        read_target(text)
    assert re.search(message.replace("?", "[?]").replace(".", "[.]"), str(error.value)), error.value


def test_devices_of_each_chip():
    assert read_target("tpu7x:4x4x4").n_devices == 128
    assert read_target("v5p:4x4x8").n_devices == 128
    assert read_target("v6e:16x16").n_devices == 256
    assert read_target("h100:4x8").n_devices == 32
    assert (read_target("v5p:4x4x4", 2).n_devices, read_target("v5p:4x4x4", 2).name) == (128, "2 x v5p:4x4x4")
    with pytest.raises(PlanError, match="already has 8 CPU devices; start a new one"):
        make_devices(read_target("cpu:9"))


# The command


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yml"
    path.write_text(to_yaml(config()))
    return str(path)


@pytest.fixture
def saved(config_file: str, program: Program, tmp_path: Path) -> Path:
    """A cache that holds the compiled tiny step."""
    from maxtext.config.load import load

    folder = tmp_path / "plans"
    folder.mkdir()
    path = folder / f"{cache_key(load(config_file), read_target('cpu:8'))}.json"
    path.write_text(json.dumps(program.to_json()))
    return folder


def test_the_command_prints_a_table_and_writes_the_same_numbers(
        config_file: str, saved: Path, program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.json"
    assert run([config_file, "--topology", "cpu:8", "--cache", str(saved), "--json", str(out)]) == 0
    shown, tree = capsys.readouterr().out, json.loads(out.read_text())
    assert tree["program"] == json.loads(json.dumps(program.to_json()))
    assert tree["memory"]["needed"] == program.memory.total
    assert (tree["config"], tree["overrides"]) == (config_file, [])
    assert f"{tree['parameters']:,}" in shown
    assert f"{tree['flops']['ratio']:.2f} times as much" in shown
    assert "all-gather over fsdp (8)" in shown
    assert re.search(r"flags +--xla_backend_optimization_level=0\n", shown)
    assert f"on {program.date} (cached)" in shown
    assert run([config_file, "--cache", str(saved), "--json", "-"]) == 0  # the config's own mesh is cpu:8 too
    assert json.loads(capsys.readouterr().out) == tree


def test_what_does_not_fit_exits_with_1(config_file: str, saved: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(Target, "memory_bytes", 1000)
    assert run([config_file, "--topology", "cpu:8", "--cache", str(saved)]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_step_that_the_compiler_refuses_is_a_verdict_and_not_a_failure(
        config_file: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.50G " \
           "of 15.75G hbm. Exceeded hbm capacity by 2.75G."
    refusal = read_refusal(text)
    newer = ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
             "HLO temporaries (18.50G) exceeds available HBM (15.75G). HLO module: jit_step.")
    assert refusal == read_refusal(newer) == Refusal(int(18.5 * GIB), int(15.75 * GIB))
    assert read_refusal("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 18M of 16M vmem") is None
    assert read_refusal("INTERNAL: Used 18.50G of 15.75G hbm") is None
    monkeypatch.setattr("maxtext.plan.program.compile_program", lambda cfg, devices: refusal)
    monkeypatch.setattr("maxtext.plan.command.make_devices", lambda target: ())
    monkeypatch.setattr("maxtext.plan.command.prepare_process", lambda target: None)
    for _ in range(2):  # compiled, then from the cache
        arguments = [config_file, "--topology", "v5e:4x2", "train.global_batch=16", "--cache", str(saved)]
        assert run([*arguments, "--json", str(saved / "out")]) == 1
        shown, tree = capsys.readouterr().out, json.loads((saved / "out").read_text())
        assert "needs 18.50 GiB a device and may use 15.75 GiB of 16.00 GiB" in shown
        assert "train.gradient_accumulation_steps=2" in shown
        assert (tree["fits"], tree["program"], tree["memory"]["needed"]) == (False, None, refusal.needed)
        monkeypatch.delattr("maxtext.plan.program.compile_program", raising=False)


def test_a_cached_result_that_is_cut_off_is_compiled_anew(config_file: str, saved: Path, program: Program,
                                                         monkeypatch: pytest.MonkeyPatch):
    from maxtext.config.load import load

    (path,) = saved.iterdir()
    path.write_text(path.read_text()[:100])
    monkeypatch.setattr("maxtext.plan.program.compile_program", lambda cfg, devices: program)
    assert compiled(load(config_file), read_target("cpu:8"), saved) == (program, False)
    assert [one.name for one in saved.iterdir()] == [path.name]
    assert compiled(load(config_file), read_target("cpu:8"), saved) == (program, True)


def test_the_cache_key_follows_what_decides_the_program(monkeypatch: pytest.MonkeyPatch):
    cfg, target = config(), read_target("cpu:8")
    key = cache_key(cfg, target)
    assert cache_key(dataclasses.replace(cfg, run_name="other", output_dir="elsewhere"), target) == key
    assert cache_key(config(global_batch=16), target) != key
    assert cache_key(cfg, read_target("cpu:4")) != key
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_something=true")
    assert cache_key(cfg, target) != key


def test_where_results_are_kept(tmp_path: Path):
    assert cache_folder("here") == Path("here")
    assert cache_folder("") is None
    assert cache_folder(None) == tmp_path / "cache/maxtext/plan"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs the tpu extra")
def test_a_tpu_program_computes_what_the_cpu_program_does(config_file: str, program: Program, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]):
    """Matmuls there are convolutions in fusions, and XLA estimates cycles."""
    arguments = [config_file, "--topology", "v5e:4x2", "--cache", str(tmp_path), "--json", "-"]
    assert run(arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["program"]["matmul_flops"] == program.matmul_flops
    assert made["program"]["cycles"] > made["program"]["matmul_cycles"] > 0
    assert {row["axes"] for row in made["program"]["traffic"]} == {"fsdp"}
    assert 0 < made["estimate"]["mfu"] < 100


def test_only_tpus_have_slices():
    for text in ("cpu:8", "h100:8x8"):
        with pytest.raises(PlanError, match="only TPUs have slices"):
            read_target(text, 2)


def test_collectives_between_slices_and_nodes_take_the_time_of_the_network():
    """Half of 8 GB that 8 members of a slice share goes to the other slice: 0.5 GB a device at 6.25 GB/s, twice."""
    mesh = {"data": 2, "fsdp": 8, "expert": 1, "tensor": 1}
    row = Traffic("all-reduce", "data", 2, False, 1, 10**9)
    target = read_target("v5p:2x2x2", 2)
    slow = estimate(config(), target, made_program(mesh=mesh, traffic=(row,), torus_dims={"data": 0}))
    assert slow.exposed_seconds == pytest.approx(1e9 / 6.25e9, rel=1e-3)
    assert any(line.startswith("between slices 6.25 GB/s") for line in slow.assumptions)
    wide = {"data": 16, "fsdp": 1, "expert": 1, "tensor": 1}
    inside = Traffic("all-reduce", "data in part", 8, False, 1, 10**9)
    quick = estimate(config(), target, made_program(mesh=wide, traffic=(inside,), torus_dims={"data in part": 3}))
    assert quick.exposed_seconds == pytest.approx(1e9 / 600e9)
    gathers = (Traffic("all-gather", "fsdp", 8, True, 2, 7 * 10**9),)
    fast = estimate(config(), read_target("h100:1x8"), made_program(traffic=gathers, torus_dims={"fsdp": 1}))
    assert fast.hidden_seconds == pytest.approx(7e9 / 370e9, rel=1e-2)
    assert any(line.startswith("NVLink 450 GB/s") for line in fast.assumptions)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the cuda extra")
def test_devices_of_gpus_that_are_not_here():
    devices = make_devices(read_target("h100:4x8"))
    assert len(devices) == 32
    assert {device.process_index for device in devices} == {0, 1, 2, 3}
    assert "H100" in devices[0].device_kind


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs the tpu extra")
def test_devices_of_several_slices():
    devices = make_devices(read_target("v5e:4x2", 2))
    assert [device.slice_index for device in devices] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(("arguments", "message"), [
    (["--topology", "v9:4x4x4"], "unknown chip 'v9'"),
    (["--topology", "cpu:6"], "mesh.fsdp 8"),
    (["mesh.fsdp=-1", "--topology", "cpu:3"], "not divisible by"),
    (["train.stps=3", "--topology", "cpu:8"], "train.steps"),
    (["--topology", "cpu:8", "--json", "no/such/folder/plan.json"], "its folder does not exist"),
    (["--topology", "cpu:8", "kernels.attention=splash"], "write kernels.attention=auto"),
])
def test_mistakes_exit_with_2_before_anything_is_compiled(config_file: str, arguments: list[str], message: str,
                                                          capsys: pytest.CaptureFixture[str]):
    assert run([config_file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_compiler_the_message_says_what_to_install(config_file: str, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run([config_file, "--topology", "v5p:2x2x2"]) == 2
    assert "pip install 'maxtext[tpu]'" in capsys.readouterr().err
    assert run([config_file, "--topology", "h100:1x8"]) == 2
    assert "pip install 'maxtext[cuda]'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "kind"), [("tpu7x", "TPU7x"), ("v6e", "TPU v6 lite"), ("v5p", "TPU v5"),
                                            ("v5e", "TPU v5 lite"), ("h100", "NVIDIA H100 80GB HBM3"),
                                            ("h200", "NVIDIA H200"), ("b200", "NVIDIA B200"),
                                            ("gb200", "NVIDIA GB200")])
def test_the_peaks_are_those_that_a_run_takes_for_its_mfu(name: str, kind: str):
    """By the names that libtpu 0.0.52 and CUDA give their devices."""
    assert CHIPS[name].peak_flops == peak_flops(kind)
