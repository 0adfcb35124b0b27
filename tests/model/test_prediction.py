"""What is predicted from shapes, against sums by hand and against a compiled step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest

from maxtext.config.load import find_config, load
from maxtext.config.schema import Config, RematConfig
from maxtext.model.cost import count_params, flops_per_token
from maxtext.model.prediction import Exchange, attention_efficiency, exchanges, predict
from maxtext.parallel.chips import CHIPS
from maxtext.parallel.network import Network
from tests.tiny import tiny_config, tiny_model

V5P = Network(CHIPS["v5p"], 8, (2, 2, 2))
pytestmark = pytest.mark.one_pass  # arithmetic alone


def config(**train: object) -> Config:
    return tiny_config(tiny_model(n_layers=2, layer_pattern=("window", "full")), **train)


def sent(found: Iterator[Exchange], kind: str, axis: str) -> float:
    return sum(one.array * one.calls for one in found if one.kind == kind and axis in one.axes)


def test_weights_are_gathered_twice_and_gradients_scattered_once():
    cfg = config()
    bytes_ = 4 * count_params(cfg.model)
    found = list(exchanges(cfg, {"fsdp": 8}))
    assert sent(iter(found), "all-gather", "fsdp") == pytest.approx(2 * bytes_)
    assert sent(iter(found), "reduce-scatter", "fsdp") == pytest.approx(bytes_)
    assert all(one.hidden for one in found)
    twice = list(exchanges(config(gradient_accumulation_steps=2), {"fsdp": 4}))
    assert sent(iter(twice), "all-gather", "fsdp") == pytest.approx(4 * bytes_)


def test_copies_of_the_model_exchange_what_they_hold():
    cfg = config()
    found = list(exchanges(cfg, {"data": 2, "fsdp": 4}))
    assert sent(iter(found), "all-reduce", "data") == pytest.approx(4 * count_params(cfg.model) / 4)


def test_a_tensor_group_exchanges_the_activations_around_attention_and_feed_forward():
    """Twice a layer each way, forward, recomputed and backward: 3 x 2 arrays of tokens x width."""
    cfg = config()
    tokens = cfg.batch_tokens / 2
    found = list(exchanges(cfg, {"data": 2, "tensor": 4}))
    assert sent(iter(found), "all-gather", "tensor") == 2 * 3 * 2 * tokens * cfg.model.d_model * 4
    assert not any(one.hidden for one in found if one.axes == ("tensor",))


def test_experts_receive_the_tokens_that_chose_them():
    moe = dataclasses.replace(tiny_model().moe, experts=8, top_k=2, d_expert=16)
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("full",), d_ff=None, moe=moe))
    found = list(exchanges(cfg, {"fsdp": 2, "expert": 4}))
    tokens = cfg.batch_tokens / 8
    assert sent(iter(found), "all-to-all", "expert") == 2 * 3 * 2 * tokens * 2 * cfg.model.d_model * 4
    shared, routed = (one for one in found if one.kind == "all-gather")
    assert {"fsdp", "expert"} <= set(shared.axes)
    assert "expert" not in routed.axes
    experts = 2 * 8 * 3 * 32 * 16
    assert routed.array * routed.calls == pytest.approx(2 * 4 * experts / 4)
    assert shared.array * shared.calls == pytest.approx(2 * 4 * (count_params(cfg.model) - experts))


def test_the_parts_of_a_step_add_up():
    cfg = config()
    made = predict(cfg, {"fsdp": 8}, V5P)
    assert made.step == max(made.compute, made.hidden) + made.exposed + made.ends
    assert made.ends == pytest.approx(sum(seconds / one.calls for one, seconds in made.parts))
    assert made.mfu == pytest.approx(
        100 * flops_per_token(cfg.model, 16) * cfg.batch_tokens / 8 / made.step / 459e12)
    assert sum(seconds for one, seconds in made.parts if one.hidden) == made.hidden


def test_recomputation_costs_matmuls_and_saves_memory():
    full, none = (predict(config(remat=RematConfig(mode=mode)), {"fsdp": 8}, V5P) for mode in ("full", "none"))
    some = predict(config(remat=RematConfig(mode="names", save=("qkv", "gate_up"))), {"fsdp": 8}, V5P)
    assert full.matmul > some.matmul > none.matmul
    assert full.attention > none.attention
    away = predict(config(remat=RematConfig(mode="names", offload=("qkv", "gate_up"))), {"fsdp": 8}, V5P)
    assert (away.matmul, away.memory.total) == (some.matmul, full.memory.total)  # kept by the host
    assert full.memory.total < some.memory.total < none.memory.total


def test_a_pipeline_waits_in_its_ends():
    """Four stages and eight micro-batches: 3 of 11 slots are empty; with two rounds of a circular schedule 3 of 19."""
    cfg = config(gradient_accumulation_steps=8, global_batch=16)
    sizes = {"pipeline": 4, "fsdp": 2}
    assert predict(cfg, sizes, V5P).bubble == pytest.approx(3 / 11)
    assert predict(cfg, sizes, V5P, repeats=2).bubble == pytest.approx(3 / 19)
    assert predict(cfg, {"fsdp": 8}, V5P).bubble == 0


def test_a_stage_keeps_its_layers_of_all_micro_batches():
    """Eight micro-batches of half of the layers, against one of all: four times as much, beside one block's own."""
    train = {"gradient_accumulation_steps": 8, "global_batch": 16, "remat": RematConfig(mode="none")}
    whole, staged = (predict(config(**train), sizes, V5P).memory.activations
                     for sizes in ({"fsdp": 2}, {"pipeline": 2, "fsdp": 2}))
    once = predict(config(**train | {"remat": RematConfig(mode="full")}), {"fsdp": 2}, V5P).memory.activations
    inputs = 16 * 4 * 2 * 32  # of both layers, of one sequence's 16 tokens in float32
    assert staged - (once - inputs) == 4 * (whole - (once - inputs))


def test_attention_is_slower_with_narrow_heads():
    chip = CHIPS["tpu7x"]
    widths = [attention_efficiency(chip, width) for width in (64, 128, 192, 256, 512)]
    assert widths == pytest.approx([0.15, 0.30, 0.40, 0.50, 0.50])
    assert attention_efficiency(CHIPS["h100"], 64) == pytest.approx(0.75 * attention_efficiency(CHIPS["h100"], 128))


def test_compiled_steps_take_more_memory_than_shapes_say():
    """By at least what the recorded plans took: OLMo 3 7B on 64 H100, 53.54 GiB."""
    cfg = load(find_config("olmo3_7b"))
    made = predict(cfg, {"fsdp": 64}, Network(CHIPS["h100"], 8))
    assert made.memory_on(CHIPS["h100"]) == pytest.approx(53.54 * 2**30, rel=0.02)
    assert made.memory_on(None) == made.memory.total


def test_nothing_is_claimed_of_unknown_devices():
    made = predict(config(), {"fsdp": 8}, Network(None, 8))
    assert made.mfu is None
    assert math.isfinite(made.step)
