"""Replays a training case of the PyTorch reference with our own data, model, loss, optimizer and step.

A case is a folder: config.json (hyper-parameters), record.json (what the reference logged at every step), tokens/ and
tokens_val/ (headerless arrays), init_hf/ (the model before the first step; without its weights they are drawn from the
seed as torch does) and logits.npz. A case whose config.json has `init_from` starts where another one ended: from that
one's final_hf/ and its own init_optim.safetensors, or from start.npz. The files were made by running OLMo-core 3.0.0's
own trainer on CPU; tests/oracles/README.md says how each case is set up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.architecture import ModelConfig, MoeConfig
from maxtext.config.schema import (
    Config,
    DataConfig,
    EvalConfig,
    EvalSetConfig,
    InstanceFilterConfig,
    OptimConfig,
    RematConfig,
    ScheduleConfig,
    SkipConfig,
    SourceConfig,
    TrainConfig,
)
from maxtext.convert.config_json import read_model
from maxtext.convert.families import family_of
from maxtext.convert.hf import open_folder, read_json
from maxtext.convert.mapping import assemble, pieces, places
from maxtext.convert.olmo_core import RULES
from maxtext.convert.safetensors import read_header
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve
from maxtext.eval.evaluations import Evaluations
from maxtext.model.decoder import Decoder, abstract_decoder, leaf_names
from maxtext.model.loss import logits
from maxtext.parallel.sharding import sharding
from maxtext.train.state import TrainState, init_state
from maxtext.train.step import compile_train_step
from tests.oracles.torch_init import olmo3_weights, olmo_core_moe_weights
from tests.tiny import mesh_of

SHARED = "a1_fp32"
SCHEDULES = {"cos": "cosine", "linear": "linear"}


class Case(NamedTuple):
    folder: Path
    about: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    @property
    def weights_folder(self) -> Path:
        """Where the initial weights lie; cases with the data of a1 share its weights."""
        own = self.folder / "init_hf"
        return own if own.exists() else self.folder.parent / SHARED / "init_hf"

    @property
    def tokens(self) -> Path:
        own = self.folder / "tokens"
        return own if own.exists() else self.folder.parent / SHARED / "tokens"

    @property
    def held_out(self) -> dict[str, Path]:
        """Token files of the held-out sets that the reference evaluated, by set."""
        names = sorted({name.split("/")[2] for name in self.evals[0] if name.startswith("eval/lm/")})
        own = self.folder / "tokens_val"
        files = sorted((own if own.exists() else self.folder.parent / SHARED / "tokens_val").iterdir()) if names else []
        return dict(zip(names, files, strict=True))


def read_case(folder: Path) -> Case:
    record = json.loads((folder / "record.json").read_text())
    return Case(folder, json.loads((folder / "config.json").read_text()), record["steps"], record["evals"])


def config_of(case: Case, model: ModelConfig) -> Config:
    """The case's hyper-parameters as a config of ours."""
    train, data = case.about["train"], case.about["data"]
    resolved = case.about["resolved"]
    masked = any("doc_lens" in step for step in case.steps)
    packed, kept = data["packed"], data["filter"]
    paths = [str(case.tokens / name) for name in sorted(data["path_order"])]
    ranks = train["world_size"]
    schedule = train["scheduler"]
    return Config(
        model=model,
        data=DataConfig(
            sequence_length=train["seq"],
            sources={"train": SourceConfig(paths=tuple(paths))},
            vocab_size=resolved["vocab_size"], eos_id=resolved["eos"], pad_id=resolved["pad"], dtype=data["dtype"],
            seed=data["loader_seed"],
            document_masking=masked,
            packing="best_fit" if packed else "chunk",
            packing_group=packed["source_group_size"] if packed else 8,
            packing_seed=data["source_permutation_seed"],
            max_target_sequence_length=data["max_target_sequence_length"],
            instance_filter=InstanceFilterConfig(
                enabled=True, min_period=kept["repetition_min_period"], max_period=kept["repetition_max_period"],
                max_count=kept["repetition_max_count"]) if kept else InstanceFilterConfig(),
        ),
        optim=OptimConfig(
            lr=train["lr"], betas=tuple(train["betas"]), eps=train["eps"], weight_decay=train["weight_decay"],
            max_grad_norm=train["max_grad_norm"],
            skip=SkipConfig(train["skip_step"]["rolling_interval_length"], train["skip_step"]["sigma_factor"])),
        schedule=ScheduleConfig(
            kind=SCHEDULES[schedule["name"]], warmup_steps=schedule["warmup"], total_steps=train["steps"],
            min_ratio=schedule["alpha_f"]),
        train=TrainConfig(
            steps=train["steps"], global_batch=train["global_batch_instances"],
            gradient_accumulation_steps=train["global_batch_instances"] // train["microbatch_instances"] // ranks,
            compute_dtype="float32" if train["precision"] == "fp32" else "bfloat16",
            z_loss=train["z_loss_multiplier"], remat=RematConfig("none")),
        eval=EvalConfig(rows="truncated", batch=train["microbatch_instances"] * ranks,
                        sets={name: EvalSetConfig((str(path),)) for name, path in case.held_out.items()}),
    )


def read_weights(folder: Path, seed: int) -> tuple[ModelConfig, Decoder]:
    """A transformers folder as a model and a tree of float32 numpy arrays; `seed` draws weights that are not there."""
    config = read_json(folder / "config.json")
    family = family_of(config, str(folder))
    model = read_model(family, config, str(folder))
    wanted = places(family.rules, model)
    if (folder / "model.safetensors").exists():
        tensors = open_folder(str(folder)).tensors
        return model, fill(model, wanted, lambda name: tensors[name].read())
    drawn = olmo3_weights(((name, place.shape) for name, place in wanted.items()), seed, model.init_std)
    return model, fill(model, wanted, drawn.__getitem__)


def initial_weights(case: Case) -> tuple[ModelConfig, Decoder]:
    """The model before the first step; a mixture of experts is stored, or drawn, under OLMo-core's own names."""
    seed, moe = case.about["arch"]["init_seed"], case.about["arch"].get("moe")
    if moe is None:
        return read_weights(case.weights_folder, seed)
    model = moe_model(case)
    wanted, stored = places(RULES, model), case.folder / "init_olmocore" / "model.safetensors"
    if stored.exists():
        tensors = read_header(str(stored))
        return model, fill(model, wanted, lambda name: tensors[name].read())
    drawn = olmo_core_moe_weights(((name, place.shape) for name, place in wanted.items()), seed, model.init_std)
    return model, fill(model, wanted, drawn.__getitem__)


def moe_model(case: Case) -> ModelConfig:
    arch, moe, resolved = case.about["arch"], case.about["arch"]["moe"], case.about["resolved"]
    assert moe["type"] == "dropless"
    assert set(resolved["layer_window"]) == {None}
    return ModelConfig(
        vocab_size=resolved["vocab_size"], d_model=arch["d_model"], n_layers=arch["n_layers"], n_heads=arch["n_heads"],
        norm_eps=resolved["rms_eps"], rope_theta=float(resolved["rope_theta"]),
        moe=MoeConfig(experts=moe["num_experts"], top_k=moe["top_k"], d_expert=moe["hidden"],
                      load_balance_loss=moe["lb"], z_loss=moe["z"]))


def fill(model: ModelConfig, wanted: Mapping[str, Any], read: Any) -> Decoder:
    """Our arrays out of another format's tensors."""
    mesh = mesh_of((1, 1, 1))
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_decoder(model, mesh))
    by_name = dict(zip(jax.tree.leaves(leaf_names(arrays)), jax.tree.leaves(arrays), strict=True))
    for piece, parts in pieces(wanted.values()).items():
        by_name[piece.leaf][... if piece.repeat is None else piece.repeat] = assemble(piece, parts, read)
    return arrays


@dataclasses.dataclass
class Replay:
    """Our side of a case: a list with an entry a step for each metric, and the final weights."""

    cross_entropy: list[float]
    squared_log_z: list[float]
    grad_norm: list[float]
    learning_rate: list[float]
    skipped: list[int]
    instance_ids: list[list[int]]
    rejected: list[list[bool] | None]
    document_lengths: list[list[list[int]] | None]
    router: list[dict[str, np.ndarray] | None]  # of each layer of experts
    evals: list[dict[str, float]]  # one for each evaluation of the reference
    first_logits: np.ndarray
    last_logits: np.ndarray
    final: TrainState


class Start(NamedTuple):
    """Where a case starts that goes on from another."""

    params: Decoder
    count: int
    mu: Decoder
    nu: Decoder


def replay(case: Case, start: Start | None = None) -> Replay:
    """Trains as the reference did, from its weights; `start` gives weights, moments and Adam count instead."""
    model, weights = initial_weights(case)
    if start is not None:
        weights = start.params
    cfg = config_of(case, model)
    mesh = mesh_of((case.about["train"]["world_size"], 1, 1))
    with jax.set_mesh(mesh):
        def place(x: Any, want: Any) -> jax.Array:
            return jax.device_put(np.asarray(x), want.sharding)

        state = init_state(cfg)
        state = state.replace(params=jax.tree.map(place, weights, state.params))
        if start is not None:
            count = place(np.int32(start.count), state.optimizer.count)
            mu, nu = (jax.tree.map(place, moment, state.optimizer.mu) for moment in (start.mu, start.nu))
            state = state.replace(optimizer=state.optimizer._replace(count=count, mu=mu, nu=nu))
        return _run(case, cfg, mesh, state)


def _run(case: Case, cfg: Config, mesh: jax.sharding.Mesh, state: TrainState) -> Replay:
    data = resolve(cfg)
    batches, evaluate = make_batches(cfg, data, sharding(mesh, "batch", None)), Evaluations(cfg, data, mesh)
    evaluated = {record["step"] for record in case.evals}
    fixed_ids = jnp.asarray(np.load(case.folder / "logits.npz")["fixed_input_ids"])
    fixed_ids = jax.device_put(jnp.tile(fixed_ids, (mesh.size, 1)), sharding(mesh, "batch", None))
    all_logits = jax.jit(lambda p: logits(p, fixed_ids, cfg))
    first_logits, nothing = np.asarray(all_logits(state.params))[:1], np.zeros(0)
    done = Replay([], [], [], [], [], [], [], [], [], [], first_logits, nothing, state)
    step = compile_train_step(cfg)
    done.evals += [evaluate(state.params)] if 0 in evaluated else []
    for number in range(1, len(case.steps) + 1):
        batch = next(batches)
        state, metrics = step(state, batch)
        done.cross_entropy.append(metrics["cross_entropy"].item())
        done.squared_log_z.append(metrics["squared_log_z"].item())
        done.grad_norm.append(metrics["grad_norm"].item())
        done.learning_rate.append(metrics["learning_rate"].item())
        done.skipped.append(metrics["skipped"].item())
        done.instance_ids.append(batches.instance_ids(number).tolist())
        done.rejected.append(None if batch.rejected_B is None else (np.asarray(batch.rejected_B) > 0).tolist())
        done.document_lengths.append(None if batch.segments_BT is None else lengths_of(np.asarray(batch.segments_BT)))
        done.router.append(jax.device_get(metrics.get("router")))
        done.evals += [evaluate(state.params)] if number in evaluated else []
    batches.close()
    done.last_logits, done.final = np.asarray(all_logits(state.params))[:1], jax.tree.map(np.asarray, state)
    return done


def lengths_of(segments_BT: np.ndarray) -> list[list[int]]:
    """Document lengths of each row, in order."""
    return [[int(n) for n in np.diff(np.flatnonzero(np.concatenate([[1], np.diff(row) != 0, [1]])))]
            for row in segments_BT]
