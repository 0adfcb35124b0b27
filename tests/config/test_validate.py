"""Rules between fields: each names both keys and both numbers; a configuration just inside each rule passes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from maxtext.config.schema import (
    Config,
    DataConfig,
    EvalSetConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    SkipConfig,
    SourceConfig,
    StreamConfig,
    TrainConfig,
)
from maxtext.config.validate import ConfigError, mesh_problems, problems, resolve_mesh

GOOD = Config(
    model=ModelConfig(vocab_size=128, d_model=64, n_layers=4, n_heads=4, d_ff=96),
    data=DataConfig(sequence_length=8, sources={"a": SourceConfig(paths=("a.npy",))}, vocab_size=100, eos_id=1,
                    pad_id=2),
    optim=OptimConfig(lr=0.1), train=TrainConfig(steps=100, global_batch=8), run_name="x")


def changed(**values: Any) -> Config:
    """GOOD with `section__field=value` or `field=value`."""
    cfg = GOOD
    for key, value in values.items():
        cfg = replaced(cfg, key.split("__"), value)
    return cfg


def replaced(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else replaced(getattr(section, path[0]), path[1:], value)
    return dataclasses.replace(section, **{path[0]: inner})


def test_the_base_of_these_tests_is_valid():
    assert problems(GOOD) == []


WINDOWS = {"model__layer_pattern": ("window", "full"), "model__window": 4}
STREAM = StreamConfig("hf", ("p.jsonl",), tokenizer="t.json")
WSD = {"schedule__kind": "wsd", "schedule__decay_steps": 10}
MOE = {"model__d_ff": None, "model__moe__experts": 8, "model__moe__d_expert": 16}
GROUPS = {**MOE, "model__moe__groups": 4, "model__moe__group_top_k": 2}
LATENT = {"model__latent__kv_rank": 16, "model__qk_norm": "none"}
YARN = {"model__rope_scaling__kind": "yarn"}
TWO_STAGES = {"mesh__pipeline": 2, "train__gradient_accumulation_steps": 2}
ANY_MESH = {"train__determinism": "any_mesh"}
PREPARED = {"data__prepared": "p", "data__vocab_size": None, "data__eos_id": None, "data__pad_id": None}


@pytest.mark.parametrize(("change", "key", "message"), [
    ({"model__d_model": 65}, "model.d_model",
     "model.d_model 65 is not divisible by model.n_heads 4 (65 = 4 x 16 + 1); set model.d_model to 64 or 68, or give "
     "model.head_dim"),
    ({"model__d_model": 3}, "model.d_model", "(3 = 4 x 0 + 3); set model.d_model to 4, or"),
    ({"model__n_heads": 6, "model__n_kv_heads": 4, "model__head_dim": 8}, "model.n_kv_heads",
     "model.n_heads 6 is not divisible by model.n_kv_heads 4 (6 = 4 x 1 + 2)"),
    ({"model__n_kv_heads": 8}, "model.n_kv_heads",
     "model.n_heads 4 is not divisible by model.n_kv_heads 8 (4 = 8 x 0 + 4)"),
    ({"model__head_dim": 5}, "model.head_dim", "model.head_dim 5 is odd"),
    ({"model__d_model": 60}, "model.head_dim", "model.head_dim 15 (model.d_model 60 / model.n_heads 4) is odd"),
    ({"model__layer_pattern": ()}, "model.layer_pattern", "an empty list"),
    ({"model__layer_pattern": ("window", "full")}, "model.window", "has window layers, but model.window is null"),
    ({"model__window": 4}, "model.window",
     "model.window 4 is set, but none of the 4 layers of model.layer_pattern is a window layer; add one or remove"),
    ({**WINDOWS, "model__layer_pattern": ("full", "full", "full", "window")}, "model.window",
     "none of the 4 layers of model.layer_pattern is a window layer (model.last_layer_full makes the only one full)"),
    ({**WINDOWS, "model__n_layers": 1}, "model.window", "(model.last_layer_full makes the only one full)"),
    ({"train__virtual_shards": 4}, "train.virtual_shards",
     "train.virtual_shards 4 is set, but train.determinism none cuts no batch; remove one of them"),
    ({**ANY_MESH, "train__virtual_shards": 3}, "train.virtual_shards",
     "train.virtual_shards 3 must be a power of two that divides train.global_batch 8; write 1, 2, 4 or 8"),
    ({**ANY_MESH, "train__virtual_shards": 16}, "train.virtual_shards", "divides train.global_batch 8; write 1, 2, 4"),
    ({**ANY_MESH, "optim__kind": "skip_step_muon"}, "optim.kind",
     "optim.kind skip_step_muon multiplies matrices in groups that depend on the mesh, which train.determinism "
     "any_mesh cannot allow; write optim.kind: skip_step_adamw, or"),
    ({**ANY_MESH, **MOE}, "model.moe.experts",
     "model.moe.experts 8: train.determinism any_mesh is not proven for routers; write train.determinism: same_mesh"),
    ({"model__d_ff": None}, "model.d_ff",
     "model.d_ff is null, but every layer is dense; give the hidden width of their feed-forward"),
    ({**MOE, "model__moe__dense_layers": 2}, "model.d_ff",
     "model.d_ff is null, but the first 2 layers are dense; give the hidden width"),
    ({**MOE, "model__d_ff": 96}, "model.d_ff",
     "model.d_ff 96 is set, but all 4 layers are mixtures of experts (model.moe.d_expert is their width); remove it, "
     "or set model.moe.dense_layers"),
    ({"model__moe__top_k": 3}, "model.moe.top_k",
     "model.moe.top_k 3 is set, but model.moe.experts is 0, so that every layer is dense; remove it, or "
     "write model.moe: null for the defaults of the whole section"),
    ({"model__moe__z_loss": 0.1}, "model.moe.z_loss", "model.moe.z_loss 0.1 is set, but model.moe.experts is 0"),
    ({**MOE, "model__moe__d_expert": None}, "model.moe.d_expert",
     "model.moe.experts is 8, but model.moe.d_expert is null; give the width of one"),
    ({**MOE, "model__d_ff": 96, "model__moe__dense_layers": 4}, "model.moe.dense_layers",
     "model.moe.dense_layers 4 leaves no routed layer of model.n_layers 4; lower it, or remove model.moe.experts"),
    ({**MOE, "model__moe__top_k": 9}, "model.moe.top_k",
     "model.moe.top_k 9 is more than model.moe.experts 8; lower it, or add experts"),
    ({**MOE, "model__moe__groups": 3}, "model.moe.groups",
     "model.moe.experts 8 is not divisible by model.moe.groups 3 (8 = 3 x 2 + 2); set model.moe.experts to 6 or 9, or "
     "change model.moe.groups"),
    ({**GROUPS, "model__moe__group_top_k": 5}, "model.moe.group_top_k",
     "model.moe.group_top_k 5 is more than model.moe.groups 4; write at most 4"),
    ({**GROUPS, "model__moe__top_k": 5}, "model.moe.top_k",
     "model.moe.top_k 5 is more than model.moe.group_top_k 2 groups of 2 experts hold; lower it, or raise "
     "model.moe.group_top_k"),
    ({**GROUPS, "model__moe__groups": 8}, "model.moe.group_score",
     "model.moe.group_score top2_sum needs two experts a group, but model.moe.groups 8 are as many as "
     "model.moe.experts; write model.moe.group_score: max"),
    ({**MOE, "model__moe__bias_update_rate": 0.001}, "model.moe.bias_update_rate",
     "model.moe.bias_update_rate 0.001 moves a bias that is not there; set model.moe.selection_bias: true"),
    ({"model__latent__nope_dim": 32}, "model.latent.nope_dim",
     "model.latent.nope_dim 32 is set, but model.latent.kv_rank is null, so that attention is ordinary; remove it"),
    ({**LATENT, "model__head_dim": 16}, "model.head_dim",
     "model.head_dim is 16, which latent attention does not have; write model.head_dim: null"),
    ({"model__latent__kv_rank": 16}, "model.qk_norm",
     "model.qk_norm is projection, which latent attention does not have; write model.qk_norm: none"),
    ({**LATENT, "model__attention_bias": "qkv"}, "model.attention_bias", "write model.attention_bias: none"),
    ({**LATENT, "model__attention_sinks": True}, "model.attention_sinks", "write model.attention_sinks: false"),
    ({**LATENT, "model__n_kv_heads": 2}, "model.n_kv_heads",
     "model.n_kv_heads 2 differs from model.n_heads 4, but in latent attention each head has its own key; remove it"),
    ({**LATENT, "model__latent__rope_dim": 7}, "model.latent.rope_dim",
     "model.latent.rope_dim 7 is odd; rotary position embedding turns pairs of dimensions, so it must be even"),
    ({"model__rope_scaling__factor": 4.0}, "model.rope_scaling.factor",
     "model.rope_scaling.factor 4.0 is set, but model.rope_scaling.kind is none; remove it, or write "
     "model.rope_scaling: null for the defaults of the whole section"),
    ({"model__rope_scaling__kind": "llama3", "model__rope_scaling__mscale": 0.7}, "model.rope_scaling.mscale",
     "model.rope_scaling.mscale is read by kind yarn only, but the kind is llama3; remove it"),
    ({"model__rope_scaling__kind": "linear", "model__rope_scaling__original_length": 64},
     "model.rope_scaling.original_length",
     "model.rope_scaling.original_length is read by kind yarn or llama3 only, but the kind is linear; remove it"),
    ({**YARN, "model__rope_scaling__beta_fast": 1.0}, "model.rope_scaling.beta_fast",
     "model.rope_scaling.beta_fast 1.0 must be above model.rope_scaling.beta_slow 1.0; raise it, or lower"),
    ({**YARN, "model__rope_scaling__window_layers": True}, "model.rope_scaling.window_layers",
     "model.rope_scaling.window_layers is set, but no layer has a window; remove it"),
    ({"model__window_rope_theta": 1e4}, "model.window_rope_theta", "is set, but no layer has a window; remove it"),
    ({"train__gradient_accumulation_steps": 3}, "train.global_batch",
     "train.global_batch 8 is not divisible by train.gradient_accumulation_steps 3 (8 = 3 x 2 + 2); set "
     "train.global_batch to 6 or 9"),
    ({"train__remat__mode": "names"}, "train.remat.save", "but both are empty; list some"),
    ({"train__remat__save": ("qkv",)}, "train.remat.save", "train.remat.save is set, but train.remat.mode is full"),
    ({"train__remat__offload": ("qkv",)}, "train.remat.offload", "train.remat.offload is set, but train.remat.mode is"),
    ({"train__remat__mode": "names", "train__remat__offload": ("qkv",), "train__remat__save": ("qkv",)},
     "train.remat.save", "qkv is listed twice in train.remat.save and train.remat.offload"),
    ({"train__remat__mode": "names", "train__remat__save": ("block",)}, "train.remat.save", "is always kept"),
    ({"train__remat__mode": "none", "train__remat__save": ("qkv",)}, "train.remat.save", "train.remat.mode is none"),
    ({"train__remat__mode": "names", "train__remat__save": ("qkv", "qkv")}, "train.remat.save", "qkv is listed twice"),
    ({"schedule__kind": "wsd"}, "schedule.decay_steps",
     "schedule.kind wsd ends in a decay, but schedule.decay_steps is null"),
    ({"schedule__decay_steps": 5}, "schedule.decay_steps",
     "schedule.decay_steps 5 is read by schedule.kind wsd only, but the kind is cosine"),
    ({**WSD, "schedule__warmup_steps": 91}, "schedule.decay_steps",
     "schedule.warmup_steps 91 + schedule.decay_steps 10 = 101 is longer than the schedule, which ends at train.steps "
     "100; shorten"),
    ({"schedule__warmup_steps": 101}, "schedule.warmup_steps",
     "schedule.warmup_steps 101 is longer than the schedule, which ends at train.steps 100; the peak rate would never "
     "be reached; set schedule.warmup_steps to 100 or less"),
    ({"schedule__warmup_steps": 51, "schedule__total_steps": 50}, "schedule.warmup_steps",
     "which ends at schedule.total_steps 50"),
    ({"schedule__kind": "constant", "schedule__min_ratio": 0.5}, "schedule.min_ratio",
     "schedule.min_ratio 0.5 is set, but schedule.kind constant never falls"),
    ({"optim__kind": "adamw", "optim__skip": SkipConfig(sigma=3.0)}, "optim.skip", "optim.kind adamw skips no step"),
    ({"optim__kind": "muon", "optim__skip": SkipConfig(sigma=3.0)}, "optim.skip",
     "optim.kind muon skips no step; write optim.kind: skip_step_muon"),
    ({"optim__muon__ns_steps": 3}, "optim.muon",
     "optim.muon is set, but optim.kind is skip_step_adamw; write optim.kind: skip_step_muon"),
    ({"optim__kind": "muon", "optim__muon__momentum": 1.0}, "optim.muon.momentum", "which never takes in a new"),
    ({"optim__kind": "muon", "optim__muon__matrix_lr": 0.02, "optim__lr": 0.0}, "optim.muon.matrix_lr",
     "but optim.lr is 0"),
    ({"optim__betas": (0.9, 1.0)}, "optim.betas", "optim.betas[1] is 1"),
    ({"data__sources": {}}, "data.sources", "no training data: give data.prepared"),
    ({"data__sources": {"b": SourceConfig()}}, "data.sources.b",
     "no token files: give data.sources.b.paths or data.sources.b.mix, or data.prepared"),
    ({"data__sources": {"b": SourceConfig(paths=("p",), mix="m")}}, "data.sources.b.mix",
     "data.sources.b.paths and data.sources.b.mix are both set"),
    ({**PREPARED, "data__sources": {"b": SourceConfig(root="r")}}, "data.sources.b.root",
     "data.sources.b.root is set, but the files of this source come from data.prepared"),
    ({"data__sources": {"b": SourceConfig(paths=("p",), tokenizer_placeholder="t")}},
     "data.sources.b.tokenizer_placeholder", "only a mix file has a placeholder, but data.sources.b.mix is null"),
    ({"data__vocab_size": None}, "data.vocab_size", "data.vocab_size is null; only data.prepared can supply it"),
    ({"data__eos_id": None}, "data.eos_id", "data.eos_id is null"),
    ({"data__pad_id": None}, "data.pad_id", "data.pad_id is null"),
    ({"data__vocab_size": 129}, "model.vocab_size",
     "model.vocab_size 128 has no row for the last ids of data.vocab_size 129; set model.vocab_size to at least 129"),
    ({"data__eos_id": 100}, "data.eos_id", "data.eos_id 100 is not below data.vocab_size 100"),
    ({"data__pad_id": 300}, "data.pad_id", "data.pad_id 300 is not below data.vocab_size 100"),
    ({"data__dtype": "uint8", "data__vocab_size": 257, "model__vocab_size": 257}, "data.dtype",
     "data.dtype uint8 holds ids 0 to 255, but data.vocab_size 257 needs 256"),
    ({"data__dtype": "uint16", "data__vocab_size": 65537, "model__vocab_size": 65537}, "data.dtype",
     "data.dtype uint16 holds ids 0 to 65535, but data.vocab_size 65537 needs 65536"),
    ({"data__sources": {"a": SourceConfig(("p",), ratio=0.5), "b": SourceConfig(("q",))}, "data__mixture_tokens": 9},
     "data.sources.b.ratio", "data.sources.b.ratio is null, but a give one"),
    ({"data__sources": {"a": SourceConfig(("p",), ratio=0.5), "b": SourceConfig(("q",), ratio=0.4)},
      "data__mixture_tokens": 9}, "data.sources", "the ratios 0.5 + 0.4 = 0.9 are not 1"),
    ({"data__sources": {"a": SourceConfig(("p",), ratio=1.0)}}, "data.mixture_tokens", "set data.mixture_tokens"),
    ({"data__mixture_tokens": 9}, "data.mixture_tokens", "data.mixture_tokens 9 is divided by the sources' ratios"),
    ({"data__sources": {"a": SourceConfig(("p",), ratio=1.0, repeat=2)}, "data__mixture_tokens": 9},
     "data.sources.a.repeat", "data.sources.a.repeat 2 and data.sources.a.ratio 1.0 both say"),
    ({"data__sources": {"a": SourceConfig(("p",), max_repetition=2.0)}}, "data.sources.a.max_repetition",
     "data.sources.a.max_repetition 2.0 bounds a ratio, but data.sources.a.ratio is null"),
    ({"data__sources": {"a": SourceConfig(("p",), ratio=1.0)}, "data__mixture_tokens": 9, "data__packing": "best_fit"},
     "data.packing", "data.packing best_fit packs whole files, but a ratio"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(0.5,)), "b": SourceConfig(("q",))}},
     "data.sources.b.weights", "data.sources.b.weights has 0 values, but data.mixture_steps has 1 stages"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0, 0.5)), "b": SourceConfig(("q",), weights=(0.0, 0.4))},
      "data__mixture_steps": (1, 5)}, "data.sources", "the weights from update 5 on, 0.5 + 0.4 = 0.9, are not 1"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0, 1.0))}, "data__mixture_steps": (1, 1)},
     "data.mixture_steps", "data.mixture_steps [1, 1] must begin with 1 and ascend"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0,))}, "data__mixture_steps": (2,)},
     "data.mixture_steps", "data.mixture_steps [2] must begin with 1 and ascend"),
    ({"data__mixture_steps": (1, 5)}, "data.mixture_steps", "begin stages of weights, but no source gives weights"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0,), repeat=2.0)}}, "data.sources.a.repeat",
     "data.sources.a.repeat 2.0 and data.sources.a.weights both say"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0,), max_source_fraction=0.5)}},
     "data.sources.a.max_source_fraction", "max_source_fraction 0.5 bounds a ratio"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0,))}, "data__packing": "padded"}, "data.packing",
     "data.packing padded packs documents of several files, but weights take instances of one source"),
    ({"data__sources": {"a": SourceConfig(("p",), weights=(1.0,))}, "data__max_target_sequence_length": 16},
     "data.max_target_sequence_length", "keeps blocks of instances together, but weights take single ones"),
    ({"data__stream": StreamConfig(tail="pad")}, "data.stream.tail",
     "data.stream.tail is set, but data.stream.kind is none"),
    ({"data__sources": {}, "data__stream": StreamConfig("hf", tokenizer="t")}, "data.stream.paths",
     "data.stream.kind hf reads no file"),
    ({"data__sources": {}, "data__stream": StreamConfig("ray", ("p",))}, "data.stream.tokenizer",
     "no tokenizer: give data.stream.tokenizer"),
    ({"data__stream": STREAM}, "data.sources", "data.sources and data.stream.kind hf both say what is trained on"),
    ({"data__sources": {}, "data__stream": STREAM, "data__packing": "best_fit"}, "data.packing",
     "data.packing best_fit must know all documents, but a stream is read once, in order; write chunk or padded"),
    ({"data__sources": {}, "data__stream": STREAM, "data__workers": 2}, "data.workers",
     "data.workers 2: these are of token files, but data.stream.kind is hf"),
    ({"data__sources": {}, "data__stream": STREAM, "data__bad_instances": 0.1}, "data.bad_instances",
     "data.bad_instances 0.1: these are of token files, but data.stream.kind is hf"),
    ({"data__packing_seed": 123}, "data.packing_seed", "123 is read by data.packing best_fit, first_fit or padded"),
    ({"data__packing_group": 2}, "data.packing_group", "2 is read by data.packing best_fit or first_fit only"),
    ({"data__packing_ties": "stable"}, "data.packing_ties", "is read by data.packing best_fit only"),
    ({"data__document_boundaries": "csv"}, "data.document_boundaries", "best_fit, first_fit or padded only"),
    ({"data__packing": "best_fit", "data__max_target_sequence_length": 16}, "data.max_target_sequence_length",
     "data.max_target_sequence_length 16 cuts files into blocks, but data.packing best_fit"),
    ({"data__packing": "best_fit", "data__sources": {"a": SourceConfig(("p",), repeat=2.5)}}, "data.sources.a.repeat",
     "repeat 2.5 asks for a part of each file, but data.packing best_fit packs whole files; write 2 or 3"),
    ({"data__packing": "best_fit", "data__sources": {"a": SourceConfig(("p",), repeat=0.5)}}, "data.sources.a.repeat",
     "write 1"),
    ({"data__max_target_sequence_length": 20}, "data.max_target_sequence_length",
     "20 is not a multiple of data.sequence_length 8 (20 = 8 x 2 + 4); set it to 16 or 24"),
    ({"data__max_target_sequence_length": 4}, "data.max_target_sequence_length", "set it to 8"),
    ({"data__instance_filter__min_period": 14}, "data.instance_filter.min_period",
     "data.instance_filter.min_period 14 is above data.instance_filter.max_period 13"),
    ({"mesh__fsdp": 1, "mesh__expert": -1, "mesh__tensor": -1}, "mesh.tensor",
     "only one axis may be -1, but mesh.expert and mesh.tensor are; set all but one to 1 or more"),
    ({"mesh__data": -1}, "mesh.fsdp", "only one axis may be -1, but mesh.data and mesh.fsdp are"),
    ({"mesh__tensor": 0}, "mesh.tensor", "0 is not a size; write 1 or more, or -1"),
    ({"mesh__tensor": -2}, "mesh.tensor", "-2 is not a size"),
    ({"checkpoint__keep_every": 1500}, "checkpoint.keep_every",
     "checkpoint.keep_every 1500 is not a multiple of checkpoint.every 1000 (1500 = 1000 x 1 + 500)"),
    ({"checkpoint__keep_every": 100, "checkpoint__every": None}, "checkpoint.keep_every",
     "checkpoint.keep_every 100 keeps checkpoints that checkpoint.every null never makes"),
    ({"eval__every": 10}, "eval.every", "eval.every 10 is set, but there is nothing to evaluate"),
    ({"eval__sets": {"macro": EvalSetConfig(("p",))}}, "eval.sets.macro", "macro is the name of an average"),
    ({"eval__sets": {"micro": EvalSetConfig(("p",))}}, "eval.sets.micro", "micro is the name of an average"),
    ({"eval__sets": {"s": EvalSetConfig(())}}, "eval.sets.s.paths", "an empty list"),
    ({"eval__tasks": ("copa_rc_0shot",)}, "eval.tokenizer", "set eval.tokenizer to the file that the token"),
    ({"eval__tasks": ("a", "b", "a"), "eval__tokenizer": "t.json"}, "eval.tasks", "a is listed twice"),
    ({"generate__prompts": ("a",), "generate__every": 1}, "generate.prompts", "set eval.tokenizer to the file that"),
    ({"generate__every": 5}, "generate.every", "generate.every 5 is set, but there is nothing to go on from; give gen"),
    ({"generate__top_k": 5}, "generate.top_k", "generate.top_k 5 chooses among samples, but generate.temperature 0"),
    ({"generate__top_p": 0.9}, "generate.top_p", "generate.top_p 0.9 chooses among samples, but"),
    ({"generate__prompts": ("a",), "eval__tokenizer": "t.json"}, "generate.prompts",
     "generate.prompts are completed with each evaluation, and eval.every is null; set generate.every"),
    ({"run_name": ""}, "run_name", "run_name '' is not the name of one folder"),
    ({"run_name": "../x"}, "run_name", "is not the name of one folder"),
    ({"run_name": "a/b"}, "run_name", "is not the name of one folder"),
    ({"run_name": ".."}, "run_name", "is not the name of one folder"),
    ({"run_name": "a\nb"}, "run_name", "is not the name of one folder"),
    ({"output_dir": ""}, "output_dir", "output_dir is empty"),
    ({"data__prepared": ""}, "data.prepared", "data.prepared is empty"),
])
def test_a_broken_rule_is_one_problem_that_names_keys_and_numbers(change, key, message):
    [(found_key, found)] = problems(changed(**change))
    assert found_key == key
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize("change", [
    {"model__d_model": 65, "model__head_dim": 16},
    {"model__n_kv_heads": 1}, {"model__n_kv_heads": 4},
    WINDOWS,
    {**WINDOWS, "model__n_layers": 1, "model__last_layer_full": False},
    {**WINDOWS, "model__layer_pattern": ("full", "full", "full", "window"), "model__last_layer_full": False},
    MOE, {**MOE, "model__moe__top_k": 8}, {**MOE, "model__d_ff": 96, "model__moe__dense_layers": 3}, GROUPS,
    {**GROUPS, "model__moe__top_k": 4}, {**GROUPS, "model__moe__groups": 8, "model__moe__group_score": "max"},
    {**MOE, "model__moe__bias_update_rate": 0.001, "model__moe__selection_bias": True},
    LATENT, {**LATENT, "model__n_kv_heads": 4},
    {**LATENT, "model__d_model": 65, "model__latent__nope_dim": 15},  # heads have widths of their own
    {"model__rope_scaling__kind": "linear", "model__rope_scaling__factor": 4.0},
    {"model__rope_scaling__kind": "llama3", "model__rope_scaling__beta_fast": 4.0,
     "model__rope_scaling__original_length": 64},
    {**YARN, "model__rope_scaling__mscale": 0.7, "model__rope_scaling__truncate": False},
    {**WINDOWS, **YARN, "model__rope_scaling__window_layers": True, "model__window_rope_theta": 1e4},
    {"train__gradient_accumulation_steps": 8},
    {"train__remat__mode": "names", "train__remat__save": ("qkv", "mlp_out")}, {"train__remat__mode": "none"},
    {"train__remat__mode": "names", "train__remat__save": ("qkv",), "train__remat__offload": ("block", "mlp_out")},
    {"train__remat__mode": "offload"}, {"train__remat__mode": "minimal"},
    {**WSD, "schedule__warmup_steps": 90}, {"schedule__warmup_steps": 100},
    {"schedule__total_steps": 50, "schedule__warmup_steps": 50},  # train.steps 100 past the end is allowed
    {"schedule__total_steps": 1000, "schedule__warmup_steps": 500},
    {"schedule__kind": "constant"}, {"schedule__kind": "linear", "schedule__min_ratio": 0.0},
    {"optim__kind": "adamw"}, {"optim__kind": "skip_step_muon", "optim__skip": SkipConfig(sigma=3.0)},
    {"optim__kind": "muon", "optim__muon__matrix_lr": 0.02, "optim__moments_dtype": "bfloat16"},
    {"optim__skip": SkipConfig(sigma=3.0)}, {"optim__betas": (0.0, 0.999)},
    {**PREPARED, "data__sources": {}}, {**PREPARED, "data__sources": {"b": SourceConfig(repeat=2.0)}},
    {**PREPARED, "eval__every": 5},
    {"data__sources": {"b": SourceConfig(mix="m", root="r", tokenizer_placeholder="t")}},
    {"data__sources": {"b": SourceConfig(paths=("p",), root="r")}},
    {"data__sources": {"a": SourceConfig(("p",), ratio=0.7), "b": SourceConfig(("q",), ratio=0.1 + 0.2)},
     "data__mixture_tokens": 9, "data__max_target_sequence_length": 16},
    {"data__sources": {"a": SourceConfig(("p",), weights=(0.7, 0.0), max_repetition=3.0),
                       "b": SourceConfig(("q",), weights=(0.1 + 0.2, 1.0))}, "data__mixture_steps": (1, 50)},
    {"data__sources": {}, "data__stream": STREAM},
    {"data__sources": {}, "data__stream": STREAM, "data__packing": "padded"},
    {"data__packing": "best_fit", "data__packing_seed": 123, "data__document_boundaries": "csv",
     "data__sources": {"a": SourceConfig(("p",), repeat=2)}, "data__document_masking": True},
    {"data__instance_filter__max_period": 1, "data__instance_filter__enabled": True},
    {"data__max_target_sequence_length": 8},
    {"data__vocab_size": 128}, {"data__eos_id": 99, "data__pad_id": 99},
    {"data__dtype": "uint8", "data__vocab_size": 256, "model__vocab_size": 256},
    {"data__dtype": "uint16", "data__vocab_size": 65536, "model__vocab_size": 65536},
    {"data__dtype": "uint32"},
    {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": -1}, {"mesh__fsdp": 4},
    {"checkpoint__keep_every": 2000}, {"checkpoint__every": None},
    {"eval__every": 10, "eval__sets": {"s": EvalSetConfig(("p",))}},
    {"eval__every": 10, "eval__tasks": ("copa_rc_0shot",), "eval__tokenizer": "t.json"},
    {"generate__prompts": ("a",), "generate__every": 1, "eval__tokenizer": "t.json"},
    {"generate__prompts": ("a",), **PREPARED, "eval__every": 5},
    {"generate__top_k": 5, "generate__top_p": 0.9, "generate__temperature": 0.1},
    {"run_name": "a b.1-x"},
])
def test_a_configuration_just_inside_the_rules_has_no_problem(change):
    assert problems(changed(**change)) == []


def test_independent_rules_are_all_reported_and_nothing_is_changed():
    cfg = changed(model__d_model=65, data__eos_id=100, mesh__data=-1, train__gradient_accumulation_steps=3)
    before = copy.deepcopy(cfg)
    assert [key for key, _ in problems(cfg)] == ["model.d_model", "train.global_batch", "data.eos_id", "mesh.fsdp"]
    assert cfg == before


# The mesh


@pytest.mark.parametrize(("mesh", "n_devices", "shape"), [
    (MeshConfig(), 1, (1, 1, 1, 1)), (MeshConfig(), 8, (1, 8, 1, 1)), (MeshConfig(fsdp=2, tensor=-1), 8, (1, 2, 1, 4)),
    (MeshConfig(data=-1, fsdp=2, tensor=2), 8, (2, 2, 1, 2)), (MeshConfig(data=2, fsdp=2, tensor=1), 4, (2, 2, 1, 1)),
    (MeshConfig(data=-1, fsdp=8), 8, (1, 8, 1, 1)), (MeshConfig(fsdp=2, expert=-1), 8, (1, 2, 4, 1)),
])
def test_a_mesh_is_resolved_over_the_devices(mesh, n_devices, shape):
    sizes = resolve_mesh(mesh, n_devices)
    assert tuple(sizes[axis] for axis in ("data", "fsdp", "expert", "tensor")) == shape


@pytest.mark.parametrize(("mesh", "n_devices", "message"), [
    (MeshConfig(data=3), 8, "mesh.fsdp: mesh.fsdp -1 takes the devices that are left, but 8 devices are not divisible "
                            "by mesh.data 3 x mesh.tensor 1 = 3 (8 = 3 x 2 + 2)"),
    (MeshConfig(data=16), 8, "(8 = 16 x 0 + 8)"),
    (MeshConfig(fsdp=2, expert=2), 8, "mesh: mesh.data 1 x mesh.fsdp 2 x mesh.expert 2 x mesh.tensor 1 = 4 devices, "
                                      "but there are 8; set one axis to -1 to use them all"),
    (MeshConfig(expert=3), 8, "by mesh.data 1 x mesh.expert 3 x mesh.tensor 1 = 3 (8 = 3 x 2 + 2); change those sizes"),
    (MeshConfig(expert=0), 8, "mesh.expert: 0 is not a size; write 1 or more, or -1 for the devices that are left"),
    (MeshConfig(data=2, fsdp=2), 8, "mesh: mesh.data 2 x mesh.fsdp 2 x mesh.tensor 1 = 4 devices, but there are 8"),
    (MeshConfig(data=2, fsdp=8), 8, "= 16 devices, but there are 8; set one axis to -1"),
    (MeshConfig(data=-1), 8, "mesh.fsdp: only one axis may be -1"),
    (MeshConfig(fsdp=0), 8, "mesh.fsdp: 0 is not a size"),
])
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_the_arithmetic(mesh, n_devices, message):
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(mesh, n_devices)
    [problem] = caught.value.problems
    assert message in problem
    [(key, text)] = mesh_problems(dataclasses.replace(GOOD, mesh=mesh), n_devices)
    assert f"{key}: {text}" == problem


@pytest.mark.parametrize(("change", "n_devices", "key", "message"), [
    ({"model__n_heads": 6, "model__head_dim": 8, "mesh__tensor": 4}, 4, "mesh.tensor",
     "model.n_heads 6 is not divisible by mesh.tensor 4 (6 = 4 x 1 + 2); set mesh.tensor to 1, 2 or 3, or change "
     "model.n_heads"),
    ({"model__n_kv_heads": 2, "mesh__tensor": 4}, 4, "mesh.tensor",
     "model.n_kv_heads 2 is not divisible by mesh.tensor 4 (2 = 4 x 0 + 2); set mesh.tensor to 1 or 2, or change"),
    ({"model__d_ff": 98, "mesh__tensor": 4}, 4, "mesh.tensor",
     "model.d_ff 98 is not divisible by mesh.tensor 4 (98 = 4 x 24"),
    ({"model__vocab_size": 130, "mesh__tensor": 4}, 4, "mesh.tensor",
     "model.vocab_size 130 is not divisible by mesh.tensor 4"),
    ({"model__d_model": 66, "model__head_dim": 8}, 8, "mesh.fsdp",
     "model.d_model 66 is not divisible by mesh.fsdp 8 (-1 on 8 devices) (66 = 8 x 8 + 2); set mesh.fsdp to 1, 2, 3 or "
     "6, or change model.d_model"),
    ({"train__global_batch": 6}, 4, "train.global_batch",
     "train.global_batch 6 / train.gradient_accumulation_steps 1 = 6 sequences a micro-batch, which mesh.data 1 x "
     "mesh.fsdp 4 = 4 does not divide (6 = 4 x 1 + 2); set train.global_batch to 4 or 8, or other mesh sizes"),
    ({"train__gradient_accumulation_steps": 4}, 4, "train.global_batch",
     "train.global_batch 8 / train.gradient_accumulation_steps 4 = 2 sequences a micro-batch, which mesh.data 1 x "
     "mesh.fsdp 4 = 4 does not divide (2 = 4 x 0 + 2); set train.global_batch to 16, or other mesh sizes"),
    ({**MOE, "mesh__fsdp": 1, "mesh__expert": 3, "model__d_model": 96, "train__global_batch": 9}, 3, "mesh.expert",
     "model.moe.experts 8 is not divisible by mesh.expert 3 (8 = 3 x 2 + 2); set mesh.expert to 1 or 2, or change "
     "model.moe.experts"),
    ({**MOE, "mesh__expert": -1, "model__moe__experts": 6}, 4, "mesh.expert",
     "model.moe.experts 6 is not divisible by mesh.expert 4 (-1 on 4 devices) (6 = 4 x 1 + 2); set mesh.expert to 1, 2 "
     "or 3, or change model.moe.experts"),
    ({**MOE, "model__moe__d_expert": 18, "mesh__tensor": 4}, 4, "mesh.tensor",
     "model.moe.d_expert 18 is not divisible by mesh.tensor 4 (18 = 4 x 4 + 2); set mesh.tensor to 1, 2 or 3, or"),
    ({**MOE, "model__d_model": 68, "mesh__fsdp": 4, "mesh__expert": 2}, 8, "mesh.expert",
     "model.d_model 68 is not divisible by mesh.fsdp 4 x mesh.expert 2 = 8 (68 = 8 x 8 + 4); change those sizes"),
    ({**MOE, "train__global_batch": 6, "mesh__expert": 2, "mesh__fsdp": 2}, 4, "train.global_batch",
     "which mesh.data 1 x mesh.fsdp 2 x mesh.expert 2 = 4 does not divide (6 = 4 x 1 + 2); set train.global_batch to 4 "
     "or 8, or other mesh sizes"),
    ({**LATENT, "model__latent__q_rank": 14, "mesh__fsdp": 4}, 4, "mesh.fsdp",
     "model.latent.q_rank 14 is not divisible by mesh.fsdp 4 = 4 (14 = 4 x 3 + 2); change those sizes"),
    ({"mesh__pipeline": 2}, 2, "train.gradient_accumulation_steps",
     "train.gradient_accumulation_steps 1 is not a multiple of mesh.pipeline 2: the micro-batches of an update fill "
     "the stages; set it to 2"),
    ({**TWO_STAGES, "model__n_layers": 3}, 2, "mesh.pipeline",
     "the 3 layers of model.n_layers repeat model.layer_pattern, of 1, 3 times, which mesh.pipeline 2 does not divide"),
    ({**TWO_STAGES, "mesh__pipeline_rounds": 4}, 2, "mesh.pipeline",
     "4 times, which mesh.pipeline 2 x mesh.pipeline_rounds 4 does not divide"),
    ({"mesh__pipeline_rounds": 2}, 1, "mesh.pipeline_rounds",
     "mesh.pipeline_rounds 2 needs stages, but mesh.pipeline is 1"),
    ({**MOE, **TWO_STAGES, "model__moe__load_statistics": "batch"}, 2, "mesh.pipeline",
     "model.moe.load_statistics batch counts over one micro-batch after another"),
    ({**MOE, "mesh__context": 2, "model__moe__capacity_factor": 1.0}, 2, "mesh.context",
     "model.moe.capacity_factor drops tokens in the order of the batch, which mesh.context 2 splits"),
    ({"data__sequence_length": 12, "mesh__context": 4}, 4, "mesh.context",
     "data.sequence_length 12 is not divisible by 2 x mesh.context 4 = 8 (12 = 8 x 1 + 4); change one of them"),
    ({"data__sequence_length": 16, "model__n_kv_heads": 2, "mesh__context": 8, "mesh__context_strategy": "ulysses"}, 8,
     "mesh.context_strategy", "ulysses shares heads: 2 key/value heads / mesh.tensor 1 = 2, each with 2 query heads, "
     "cannot be split over mesh.context 8; write all_gather or ring"),
    ({**ANY_MESH, "mesh__tensor": 2}, 2, "mesh.tensor",
     "mesh.tensor 2 splits single sums, so train.determinism any_mesh allows only mesh.data and mesh.fsdp; set "
     "mesh.tensor to 1, or write"),
    ({**ANY_MESH, "mesh__context": 2}, 2, "mesh.context", "mesh.context 2 splits single sums"),
    ({**ANY_MESH, **MOE, "mesh__expert": 2}, 2, "mesh.expert", "mesh.expert 2 splits single sums"),
    ({**ANY_MESH, **TWO_STAGES}, 2, "mesh.pipeline", "mesh.pipeline 2 splits single sums"),
    ({**ANY_MESH, "mesh__data": 3, "mesh__fsdp": 1, "train__global_batch": 24}, 3, "mesh.data",
     "mesh.data 3 is no power of two, but train.determinism any_mesh adds pairs; set mesh.data to 2 or 4"),
    ({**ANY_MESH, "mesh__data": 8, "train__global_batch": 24, "train__virtual_shards": 4}, 8, "train.virtual_shards",
     "4 virtual shards cannot be shared evenly by mesh.data 8 x mesh.fsdp 1 = 8 devices in "
     "train.gradient_accumulation_steps 1 micro-batches (4 = 8 x 0 + 4); use fewer"),
    ({**ANY_MESH, "train__global_batch": 12, "train__gradient_accumulation_steps": 3}, 4, "train.virtual_shards",
     "4 virtual shards (train.global_batch 12 allows no more) cannot be shared evenly by mesh.data 1 x mesh.fsdp 4"),
    ({"train__global_batch": 6, "mesh__data": 2, "mesh__fsdp": 2}, 4, "train.global_batch",
     "which mesh.data 2 x mesh.fsdp 2 = 4 does not divide"),
])
def test_sizes_that_do_not_divide_over_the_mesh_are_named_with_both_keys(change, n_devices, key, message):
    if {"mesh__tensor", "mesh__expert", "mesh__context", "mesh__pipeline"} & set(change):
        change = {"mesh__fsdp": 1, **change}
    [(found_key, found)] = mesh_problems(changed(**change), n_devices)
    assert found_key == key
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize(("change", "n_devices"), [
    ({}, 1), ({}, 2), ({}, 8), ({"mesh__data": 2, "mesh__tensor": 2}, 8), ({"mesh__tensor": 4}, 4),
    ({**MOE, "mesh__expert": 2, "mesh__fsdp": 2, "mesh__tensor": 2}, 8), ({"mesh__expert": 2}, 8),
    ({"model__n_kv_heads": 2, "mesh__tensor": 2}, 2), ({"train__gradient_accumulation_steps": 8}, 1),
    ({"train__gradient_accumulation_steps": 2}, 4),
    ({"model__n_kv_heads": 2, "mesh__fsdp": 1, "mesh__context": 4, "mesh__context_strategy": "ulysses"}, 4),
    ({**ANY_MESH, "mesh__data": 4}, 8), ({**ANY_MESH, "train__gradient_accumulation_steps": 4}, 2),
    ({"train__gradient_accumulation_steps": 3}, 8),  # reported by `problems`, once
])
def test_a_mesh_that_fits_has_no_problem(change, n_devices):
    assert mesh_problems(changed(**change), n_devices) == []


def test_all_misfits_of_a_mesh_are_reported_and_nothing_is_changed():
    cfg = changed(model__n_heads=6, model__head_dim=8, model__d_ff=98, model__d_model=66, mesh__fsdp=4, mesh__tensor=4)
    before = copy.deepcopy(cfg)
    assert [(key, text.split()[0]) for key, text in mesh_problems(cfg, 16)] == [
        ("mesh.tensor", "model.n_heads"), ("mesh.tensor", "model.d_ff"), ("mesh.fsdp", "model.d_model")]
    assert cfg == before
