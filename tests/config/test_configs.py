"""The committed configurations: each loads, is short, says what it is, and has the published sizes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from maxtext.cli import train
from maxtext.config.architecture import MoeConfig
from maxtext.config.load import CONFIGS, list_configs, load, load_with_origins, to_yaml
from maxtext.config.schema import ModelConfig
from maxtext.config.validate import mesh_problems
from maxtext.train.schedule import learning_rate

RUNS = sorted(file.stem for file in CONFIGS.glob("*.yml"))
TINY = sorted(f"tiny/{file.stem}" for file in CONFIGS.glob("tiny/*.yml"))
PARTS = sorted({file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.glob("*/*.yml")} - set(TINY))
# A second part of a run has that run's name.
CONTINUED = {"olmo3_7b_stage1b": "olmo3_7b", "olmo3_tiny_stage1b": "olmo3_tiny_stage1"}
# Published parameter counts (OLMo-core, all parameters with vocabulary 100352) and FLOPs per token at sequence 8192.
SIZES = {"190m": 267_424_512, "370m": 474_022_912, "600m": 676_414_720, "760m": 912_360_960, "1b": 1_484_916_736,
         "3b": 3_503_508_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936}
# Without the input embedding, of the sizes that have a short run.
LADDER = {"190m": 190_354_176, "370m": 371_262_464, "600m": 547_964_160, "760m": 758_220_288, "1b": 1_279_395_840,
          "3b": 3_169_537_280, "13b": 13_202_396_160}
RATES = json.loads((Path(__file__).parents[1] / "oracles" / "lr_schedules.json").read_text())
DEVICES = {"v5p_128": 64, "v6e_256": 256, "tpu7x_128": 128, "h100_512": 512}


def parameters(model: ModelConfig) -> int:
    """Of an OLMo 3, dense or with experts in every layer."""
    queries, keys = model.n_heads * model.head_width, model.kv_heads * model.head_width
    feed = (3 * model.d_model * model.d_ff if model.d_ff else
            model.moe.experts * model.d_model * (3 * model.moe.d_expert + 1))
    block = 2 * model.d_model * (queries + keys) + queries + keys + feed + 2 * model.d_model
    return model.n_layers * block + 2 * model.vocab_size * model.d_model + model.d_model


@pytest.mark.parametrize("name", RUNS + TINY)
def test_a_run_loads_by_name_and_writes_back_equal(name, tmp_path):
    cfg, origins = load_with_origins(name)
    stem = name.rpartition("/")[2]
    assert cfg.run_name == CONTINUED.get(stem, stem)
    (tmp_path / "back.yml").write_text(to_yaml(cfg, origins))
    assert load(tmp_path / "back.yml") == cfg


def complete(tmp_path, part: str):
    """A small run of one part: a model by itself, or what else there is over the quickstart."""
    run = f"base: [quickstart, {part}]\n" if not part.startswith("models/") else (
        f"base: [{part}]\ndata: {{prepared: somewhere, sequence_length: 8192}}\noptim: {{lr: 1e-3}}\n"
        "train: {steps: 10, global_batch: 64}\n")
    (tmp_path / "run.yml").write_text(run)
    return load_with_origins(tmp_path / "run.yml")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_loads_as_the_base_of_a_run(part, tmp_path):
    # The OLMo mix needs a model with rows for its ids, and the quickstart's sources have no files beside it.
    if part.startswith("data/"):
        (tmp_path / "run.yml").write_text(
            f"base: [quickstart, models/olmo3_190m, {part}]\n"
            "data: {prepared: null, sources: {code: null, prose: null}}\n"
            "eval: {every: null}\ngenerate: {prompts: []}\n")
        cfg, origins = load_with_origins(tmp_path / "run.yml")
    else:
        cfg, origins = complete(tmp_path, part)
    assert any(origin.endswith(f"{part}.yml:{line}") for line in range(1, 60) for origin in origins.values())
    assert cfg.run_name == "run"


@pytest.mark.parametrize("name", RUNS + TINY + PARTS)
def test_a_file_is_short_commented_and_describes_itself(name):
    text = (CONFIGS / f"{name}.yml").read_text()
    assert len(text.splitlines()) <= (40 if name in RUNS else 60)
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120
    folder, _, stem = name.rpartition("/")
    assert dict(list_configs(CONFIGS / folder))[stem]


@pytest.mark.parametrize("size", SIZES)
def test_an_olmo3_model_has_its_published_parameter_count(size, tmp_path):
    cfg, _ = complete(tmp_path, f"models/olmo3_{size}")
    assert parameters(cfg.model) == SIZES[size]
    assert cfg.model.window == 4096
    full = [i for i, window in enumerate(cfg.model.layer_windows) if window is None]
    assert full == list(range(3, cfg.model.n_layers, 4))


def test_every_size_has_a_file_and_every_file_a_size():
    sizes = {part for part in PARTS if part.startswith("models/olmo3_")}
    assert sizes == {f"models/olmo3_{size}" for size in (*SIZES, "moe_1b_7b")}


def test_olmo3_7b_is_stage_1_of_the_public_run():
    cfg = load("olmo3_7b")
    assert parameters(cfg.model) == 7_298_617_344
    assert (cfg.train.steps, cfg.schedule.total_steps, cfg.schedule.warmup_steps) == (597_046, 1_192_093, 2000)
    assert cfg.schedule.total_steps == -(-5 * 10**12 // cfg.batch_tokens)
    assert cfg.batch_tokens == 4_194_304
    assert (cfg.optim.lr, cfg.optim.betas, cfg.optim.eps, cfg.optim.weight_decay) == (3e-4, (0.9, 0.95), 1e-8, 0.1)
    assert (cfg.optim.kind, cfg.optim.skip.window, cfg.optim.skip.sigma) == ("skip_step_adamw", 128, 6.0)
    assert (cfg.seed, cfg.data.seed) == (12536, 34521)
    assert (cfg.data.vocab_size, cfg.data.eos_id, cfg.data.pad_id) == (100278, 100257, 100277)
    assert (cfg.train.compute_dtype, cfg.train.z_loss) == ("bfloat16", 1e-5)
    assert (cfg.eval.every, cfg.checkpoint.every, cfg.checkpoint.keep_last) == (10_000, 1000, None)
    assert [source.mix for source in cfg.data.sources.values()] == ["OLMo-mix-0625-official.txt"]
    assert len(cfg.eval.sets) == 11


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("hardware/")])
@pytest.mark.parametrize("size", ["1b", "7b", "32b"])
def test_olmo3_fits_the_hardware_parts(part, size, tmp_path):
    (tmp_path / "run.yml").write_text(f"base: [olmo3_7b, models/olmo3_{size}, {part}]\n")
    n_devices = DEVICES[part.removeprefix("hardware/")]
    assert mesh_problems(load(tmp_path / "run.yml"), n_devices) == []
    assert mesh_problems(load(tmp_path / "run.yml"), n_devices // 2)


def test_the_quickstart_is_a_small_olmo3_with_the_same_keys():
    quick, olmo = load_with_origins("quickstart"), load_with_origins("olmo3_7b")
    assert (quick[0].model.layer_windows, quick[0].model.vocab_size) == ((64, 64, 64, None), 2048)
    assert list(quick[0].data.sources) == ["code", "prose"]

    def keys(origins):  # apart from what hangs on the names of sources and held-out sets
        return {key for key in origins if not key.startswith(("data.sources", "eval.sets"))}

    assert keys(quick[1]) == keys(olmo[1])


# Stage -> its table of rates, tokens an update, tokens of the schedule, updates, seed of the data order.
STAGES = {
    "olmo3_7b": ("7B_pretrain1_cos", 4_194_304, 5e12, 597_046, 34521),
    "olmo3_7b_stage1b": ("7B_pretrain2_halfcos", 4_194_304, 7e12, 1_413_814, 34521),
    "olmo3_7b_stage2": ("7B_midtrain_linear", 2_097_152, 1e11, 47_684, 1337),
    "olmo3_7b_long": ("7B_longctx_linear_50B", 4_194_304, 5e10, 11_921, 34521),
    "olmo3_32b": (None, 8_388_608, None, 656_000, 34521),
    "olmo3_32b_stage2": (None, 4_194_304, 1e11, 23_842, 42069),
    "olmo3_32b_long": ("32B_longctx_linear_100B", 8_388_608, 1e11, 11_921, 34521),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_the_reference_s_numbers(name):
    table, batch, tokens, steps, seed = STAGES[name]
    cfg = load(name)
    assert (cfg.batch_tokens, cfg.train.steps, cfg.data.seed) == (batch, steps, seed)
    if tokens is not None:
        assert cfg.schedule.total_steps == -(-int(tokens) // batch)
    assert (cfg.optim.betas, cfg.optim.eps, cfg.optim.weight_decay, cfg.optim.max_grad_norm, cfg.train.z_loss,
            cfg.optim.kind, cfg.optim.no_decay) == ((0.9, 0.95), 1e-8, 0.1, 1.0, 1e-5, "skip_step_adamw", ("embed",))
    assert (cfg.data.vocab_size, cfg.data.eos_id, cfg.data.pad_id) == (100278, 100257, 100277)
    assert (cfg.checkpoint.every, cfg.checkpoint.keep_last) == (1000, None)
    assert cfg.data.instance_filter.enabled == name.startswith("olmo3_32b")
    assert parameters(cfg.model) == SIZES["32b" if "32b" in name else "7b"]
    if table is not None:
        reference = RATES[table]
        assert (cfg.schedule.kind, cfg.schedule.total_steps) == (reference["kind"], reference["total_steps"])
        assert len(reference["table"]) > 5
        for t, rate in reference["table"]:
            assert learning_rate(cfg, t) == pytest.approx(rate, rel=1e-9, abs=1e-20), t


def test_a_stage_starts_where_the_one_before_ends():
    second, middle, long = load("olmo3_7b_stage1b"), load("olmo3_7b_stage2"), load("olmo3_7b_long")
    first = load("olmo3_7b")
    assert (second.run_dir, second.train.init_from.path) == (first.run_dir, None)
    assert second.train.take_over_at == 596_047 == first.train.steps - 999
    assert learning_rate(second, 597_046) == pytest.approx(learning_rate(first, 597_046), rel=1e-4)
    for cfg, before in ((middle, second), (long, middle)):
        start = cfg.train.init_from
        assert (start.path, start.step, start.optimizer) == (before.run_dir, before.train.steps, True)
    assert learning_rate(middle, 1) / learning_rate(second, second.train.steps) == pytest.approx(5.267, rel=1e-3)
    assert [load(name).train.init_from.path for name in ("olmo3_32b_stage2", "olmo3_32b_long")] == [
        "runs/olmo3_32b", "runs/olmo3_32b_merged"]
    assert load("olmo3_32b_stage2").train.init_from.step == load("olmo3_32b").train.steps


@pytest.mark.parametrize("name", ["olmo3_7b_long", "olmo3_32b_long"])
def test_the_long_stages_pack_documents_and_stretch_full_layers(name):
    cfg = load(name)
    assert (cfg.data.sequence_length, cfg.data.packing, cfg.data.packing_group, cfg.data.packing_seed,
            cfg.data.document_masking) == (65_536, "best_fit", 8, 123, True)
    rope = cfg.model.rope_scaling
    assert (rope.kind, rope.factor, rope.original_length, rope.beta_fast, rope.beta_slow) == ("yarn", 8, 8192, 32, 1)
    for other in set(STAGES) - {"olmo3_7b_long", "olmo3_32b_long"}:
        cfg = load(other)
        assert (cfg.data.sequence_length, cfg.data.packing, cfg.data.document_masking, cfg.model.rope_scaling.kind) == (
            8192, "chunk", False, "none")


@pytest.mark.parametrize("size", LADDER)
def test_a_short_run_has_20_tokens_a_parameter_and_a_rate_by_its_size(size):
    cfg = load(f"olmo3_{size}")
    assert cfg.train.steps == cfg.schedule.total_steps == -(-20 * LADDER[size] // cfg.batch_tokens)
    assert LADDER[size] == SIZES[size] - cfg.model.vocab_size * cfg.model.d_model
    assert cfg.optim.lr == pytest.approx(3e-4 * (6_887_575_552 / LADDER[size]) ** (1 / 3), rel=0.05)
    assert cfg.schedule.warmup_steps == min(2000, cfg.train.steps // 10)


def test_the_mixture_is_an_olmo3_with_experts_and_its_recipe():
    mixture, dense = load("olmo3_moe_1b_7b"), load("olmo3_1b")
    moe = mixture.model.moe
    assert (moe.experts, moe.top_k, moe.d_expert, moe.dense_layers) == (64, 8, 1024, 0)
    assert (moe.load_balance_loss, moe.z_loss, moe.capacity_factor) == (0.01, 0.001, None)  # nothing is dropped
    assert moe.top_k * moe.d_expert == dense.model.d_ff
    assert dataclasses.replace(mixture.model, moe=MoeConfig(), d_ff=dense.model.d_ff) == dense.model
    rest = {"model": dense.model, "run_name": "", "description": "", "train": dense.train, "schedule": dense.schedule}
    assert dataclasses.replace(mixture, **rest) == dataclasses.replace(dense, **rest)
    used = 1_281_492_992  # of a token, without the embedding
    assert mixture.train.steps == mixture.schedule.total_steps == -(-20 * used // mixture.batch_tokens)
    assert mixture.optim.lr == pytest.approx(3e-4 * (6_887_575_552 / used) ** (1 / 3), rel=0.05)


@pytest.mark.parametrize(("twin", "dense"), [("quickstart_moe", "quickstart"),
                                             ("tiny/olmo3_moe_tiny", "tiny/olmo3_tiny_stage1")])
def test_a_small_twin_has_experts_in_the_place_of_a_feed_forward(twin, dense, capsys):
    ours, theirs = load(twin), load(dense)
    moe = ours.model.moe
    assert moe.top_k * moe.d_expert == theirs.model.d_ff
    assert (moe.load_balance_loss, moe.z_loss) == (0.01, 0.001)
    assert dataclasses.replace(ours.model, moe=MoeConfig(), d_ff=theirs.model.d_ff) == theirs.model
    assert train([twin, "--dry-run", "--devices", "1"]) == 0
    assert f"parameters {parameters(ours.model):,} (" in " ".join(capsys.readouterr().out.split())
    assert mesh_problems(load(twin, ["mesh.expert=4", "mesh.fsdp=2"]), 8) == []


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("quickstart")])
def test_a_dry_run_on_64_devices_says_what_the_run_would_be(name, capsys):
    assert train([name, "--dry-run", "--devices", "64"]) == 0
    out, cfg = " ".join(capsys.readouterr().out.split()), load(name)
    assert f"parameters {parameters(cfg.model):,} (" in out
    assert f"updates {cfg.train.steps:,} updates, {cfg.train.steps * cfg.batch_tokens:,} tokens" in out
    assert re.search(rf"schedule {cfg.schedule.kind}, .*ends at {cfg.schedule_steps:,}; lr ", out)
    assert "mesh data 1, fsdp 64, tensor 1 (planned)" in out
