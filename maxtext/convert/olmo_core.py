"""Checkpoints of OLMo-core (`stepN/` with `model_and_optim/`), with Adam's moments and count.

Dims: D model width, V vocabulary, F feed-forward width, K key/value heads, G query heads of one, H head width.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.checkpoint.streamed import StreamedLeaf
from maxtext.config.architecture import LayerKind, ModelConfig, MoeConfig, RopeScalingConfig
from maxtext.config.load import ConfigError, load
from maxtext.config.schema import Config
from maxtext.convert import ConvertError
from maxtext.convert.continued import run_extra, small_leaves
from maxtext.convert.distcp import METADATA, Distributed
from maxtext.convert.hf import converted_config, finite, read_json, weight_leaves, write_step
from maxtext.convert.mapping import Place, Rule, assemble, check_tensors, pieces, places
from maxtext.convert.saved import PARAMS

FOLDER = "model_and_optim"
_BLOCK = "blocks.{layer}."
_MOE = _BLOCK + "feed_forward_moe."
RULES = (
    Rule("embeddings.weight", "V D", "embed", "V D"),
    Rule("lm_head.norm.weight", "D", "norm", "D"),
    Rule("lm_head.w_out.weight", "V D", "head", "D V"),
    Rule(_BLOCK + "attention.w_q.weight", "(K G H) D", "attention.qkv", "D K :G H"),
    Rule(_BLOCK + "attention.w_k.weight", "(K H) D", "attention.qkv", "D K -2 H"),
    Rule(_BLOCK + "attention.w_v.weight", "(K H) D", "attention.qkv", "D K -1 H"),
    Rule(_BLOCK + "attention.w_out.weight", "D (K G H)", "attention.out", "K G H D"),
    Rule(_BLOCK + "attention.q_norm.weight", "(K G H)", "attention.q_norm", "K G H"),
    Rule(_BLOCK + "attention.k_norm.weight", "(K H)", "attention.k_norm", "K H"),
    Rule(_BLOCK + "attention_norm.weight", "D", "attention_norm", "D"),
    Rule(_BLOCK + "feed_forward.w1.weight", "F D", "mlp.gate_up", "D 0 F"),
    Rule(_BLOCK + "feed_forward.w3.weight", "F D", "mlp.gate_up", "D 1 F"),
    Rule(_BLOCK + "feed_forward.w2.weight", "D F", "mlp.down", "F D"),
    Rule(_BLOCK + "feed_forward_norm.weight", "D", "mlp_norm", "D"),
    Rule(_MOE + "router.weight", "(E D)", "mlp.router", "D E"),
    Rule(_MOE + "experts.mlp.w1", "(E X) D", "mlp.gate_up", "E D 0 X"),
    Rule(_MOE + "experts.mlp.w3", "(E X) D", "mlp.gate_up", "E D 1 X"),
    Rule(_MOE + "experts.mlp.w2", "(E X) D", "mlp.down", "E X D"),
)
# Our tree -> how a tensor's name there is made of its parameter's name.
WEIGHTS = {PARAMS: "model.{}"}
MOMENTS = {"optimizer.mu.": "optim.state.{}.exp_avg", "optimizer.nu.": "optim.state.{}.exp_avg_sq"}
COUNT = "optim.state.{}.step"


def is_checkpoint(path: str) -> bool:
    """Whether a folder is a step of OLMo-core, or its `model_and_optim`."""
    return any(os.path.exists(os.path.join(path, *inside, METADATA)) for inside in ((), (FOLDER,)))


def import_checkpoint(path: str, out: str, config: str | None, note: Callable[[str], None],
                      allow_nonfinite: bool = False) -> Config:
    """Writes a checkpoint of OLMo-core as one of ours: weights, and moments and Adam count where it has them.

    The leaves have the names of a training state (`params`, `optimizer.mu`, `optimizer.nu`, `optimizer.count`, `step`),
    so that `train.init_from` with `optimizer: true` takes them over. With a config of ours `out` becomes a run that
    training continues: the whole state, and the position in the config's data after the same number of updates.

    Args:
      config: a config of ours for the same model and data; None: the model of the checkpoint's own config.json.

    Returns the config. Raises ConvertError, also for NaN and infinite values unless `allow_nonfinite`; then nothing was
    written.
    """
    root = Path(os.path.abspath(path))
    inside = root / FOLDER if (root / FOLDER).is_dir() else root
    root = inside.parent if inside.name == FOLDER else inside
    source = Distributed(str(inside))
    cfg = _config(root, out, config)
    wanted = places(RULES, cfg.model)
    trees = WEIGHTS | (MOMENTS if any(name.startswith("optim.state.") for name in source.shapes) else {})
    _check(wanted, source, trees, str(inside))
    count = _adam_count(wanted, source) if len(trees) > 1 else None
    named = re.fullmatch(r"step(\d+)", root.name)
    step = int(named[1]) if named else count or 0
    small = {"step": np.asarray(step, np.int32)}
    small |= {} if count is None else {"optimizer.count": np.asarray(count, np.int32)}
    extra: dict[str, Any] = {"converted": {"from": "olmo-core", "dtype": "float32"}}
    if config is not None:
        if count is None:
            raise ConvertError(f"{inside} has no optimizer state, so its run cannot be continued; leave --config out "
                               "to import the weights alone")
        small |= small_leaves(cfg, step)
        extra |= run_extra(cfg, step)
    leaves = {name: StreamedLeaf(array.shape, str(array.dtype)) for name, array in small.items()}
    for prefix in trees:
        leaves |= weight_leaves(cfg.model, prefix)

    def stream() -> Iterator[tuple[str, int | None, np.ndarray]]:
        yield from ((name, None, array) for name, array in small.items())
        for prefix, form in trees.items():
            for piece, parts in pieces(wanted.values()).items():
                yield prefix + piece.leaf, piece.repeat, assemble(piece, parts, _reader(source, form))

    write_step(out, cfg, step, leaves, stream() if allow_nonfinite else finite(stream(), str(root)), extra)
    moments = "no optimizer state" if count is None else f"Adam's moments after {count} updates"
    note(f"step {step} of OLMo-core: {len(wanted)} weights and {moments}, each mapped exactly once")
    return cfg


def _reader(source: Distributed, form: str) -> Callable[[str], np.ndarray]:
    return lambda name: source.read(form.format(name))


def _check(wanted: Mapping[str, Place], source: Distributed, trees: Mapping[str, str], where: str) -> None:
    """Exactly once, for the weights and for each moment; all faults of the first tree that has any."""
    for form in trees.values():
        before, _, after = form.partition("{}")
        found = {name[len(before): len(name) - len(after)]: shape for name, shape in source.shapes.items()
                 if name.startswith(before) and name.endswith(after)}
        check_tensors(wanted, found, f"{where} ({form.format('*')})")


def _adam_count(wanted: Mapping[str, Place], source: Distributed) -> int:
    """The number of updates, which must be the same for all weights."""
    counts: dict[float, str] = {}
    for name in wanted:
        if COUNT.format(name) not in source.shapes:
            raise ConvertError(f"{source.folder}: {COUNT.format(name)} is missing; nothing was written")
        counts.setdefault(float(source.read(COUNT.format(name)).reshape(())), name)
    if len(counts) != 1:
        raise ConvertError(f"{source.folder}: weights have had different numbers of updates, which one Adam count "
                           f"cannot hold: {', '.join(f'{name}: {count:g}' for count, name in counts.items())}")
    return int(next(iter(counts)))


# ---- config


def _config(root: Path, out: str, config: str | None) -> Config:
    if config is not None:
        try:
            return load(config)
        except ConfigError as error:
            raise ConvertError(str(error)) from None
    if not (root / "config.json").is_file():
        raise ConvertError(f"{root / 'config.json'}: not found; describe the run with --config, a config of ours")
    written = read_json(root / "config.json")
    model = read_model(written.get("model") or {}, str(root / "config.json"))
    dataset = written.get("dataset") or {}
    tokenizer = dataset.get("tokenizer") or {}
    return converted_config(model, "float32", out, positions=int(dataset.get("sequence_length") or 0),
                            eos=tokenizer.get("eos_token_id"), pad=tokenizer.get("pad_token_id"),
                            vocabulary=tokenizer.get("vocab_size"))


def read_model(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The architecture in a config.json of OLMo-core; ConvertError names every setting that we cannot honour."""
    block = config.get("block") or {}
    mixer, feed = _mixer(block), block.get("feed_forward") or {}
    norms = [block.get("layer_norm") or {}, mixer.get("qk_norm"), (config.get("lm_head") or {}).get("layer_norm") or {}]
    faults = _unsupported(config, block, mixer, feed, [norm for norm in norms if norm])
    if faults:
        raise ConvertError("\n  ".join([f"{where}: this model cannot be converted; nothing was written:", *faults]))
    kinds, window = _layers(mixer.get("sliding_window"))
    model = ModelConfig(
        vocab_size=config["vocab_size"],
        d_model=config["d_model"],
        n_layers=config["n_layers"],
        n_heads=mixer["n_heads"],
        n_kv_heads=mixer.get("n_kv_heads"),
        head_dim=mixer.get("head_dim"),
        d_ff=feed.get("hidden_size"),
        moe=_moe(block.get("feed_forward_moe") or {}),
        layer_pattern=kinds,
        last_layer_full=(mixer.get("sliding_window") or {}).get("force_full_attention_on_last_layer", True),
        window=window,
        norm_placement="post" if str(block.get("name")).endswith("reordered_norm") else "pre",
        qk_norm="projection" if mixer.get("qk_norm") else "none",
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        norm_eps=norms[0]["eps"],
        rope_theta=float(mixer["rope"]["theta"]),
        rope_scaling=_scaling(config, block, where),
        init_std=config.get("init_std") or 0.02,
    )
    return model


def _unsupported(config: Mapping[str, Any], block: Mapping[str, Any], mixer: Mapping[str, Any],
                 feed: Mapping[str, Any], norms: list[Mapping[str, Any]]) -> list[str]:
    lm_head, rope, windows = config.get("lm_head") or {}, mixer.get("rope") or {}, mixer.get("sliding_window") or {}
    moe = block.get("feed_forward_moe") or {}
    router = moe.get("router") or {}
    needed = {"vocab_size": config, "d_model": config, "n_layers": config, "n_heads": mixer,
              "hidden_size": moe or feed, "theta": rope}
    faults = [f"{key} is missing" for key, section in needed.items() if section.get(key) is None]
    only: list[tuple[str, Any, Any]] = [
        ("block.name", block.get("name"), ("moe_reordered_norm", "moe") if moe else ("reordered_norm", "default")),
        ("attention.name", mixer.get("name"), ("default", "fused")),
        ("attention.bias", mixer.get("bias"), (False,)),
        ("attention.clip_qkv", mixer.get("clip_qkv"), (None,)),
        ("attention.gate", mixer.get("gate"), (None,)),
        ("attention.use_head_qk_norm", mixer.get("use_head_qk_norm"), (False, None)),
        ("attention.attention_sinks", mixer.get("attention_sinks"), (False, None)),
        ("attention.scalable_softmax", mixer.get("scalable_softmax"), (False, None)),
        ("attention.softmax_scale", mixer.get("softmax_scale"), (None,)),
        ("sliding_window.force_full_attention_on_first_layer",
         windows.get("force_full_attention_on_first_layer"), (False, None)),
        ("rope.name", rope.get("name"), ("default", "fused")),
        ("rope.no_global_rope", rope.get("no_global_rope"), (False, None)),
        ("rope.partial_rotary_factor", rope.get("partial_rotary_factor"), (1.0, None)),
        ("feed_forward.bias", feed.get("bias"), (None,) if moe else (False,)),
        ("feed_forward.activation", feed.get("activation"), ("silu", None)),
        ("feed_forward_moe.name", moe.get("name"), ("dropless", None)),
        ("feed_forward_moe.shared_mlp", moe.get("shared_mlp"), (None,)),
        ("feed_forward_moe.latent_moe", moe.get("latent_moe"), (None,)),
        ("feed_forward_moe.scale_loss_by_num_layers", moe.get("scale_loss_by_num_layers"), (True, None)),
        ("feed_forward_moe.lb_loss_granularity", moe.get("lb_loss_granularity"), ("local_batch", None)),
        ("feed_forward_moe.router.name", router.get("name"), ("default", None)),
        ("feed_forward_moe.router.jitter_eps", router.get("jitter_eps"), (None,)),
        ("feed_forward_moe.router.normalize_expert_weights", router.get("normalize_expert_weights"), (None, 1.0)),
        ("feed_forward_moe.router.uniform_expert_assignment", router.get("uniform_expert_assignment"), (False, None)),
        ("feed_forward_moe.router.random_expert_assignment", router.get("random_expert_assignment"), (False, None)),
        ("feed_forward_moe.router.bias_gamma", router.get("bias_gamma"), (None,)),
        ("feed_forward_moe.router.gating_function", router.get("gating_function"), ("softmax", "sigmoid", None)),
        ("lm_head.bias", lm_head.get("bias"), (False,)),
    ]
    faults += [f"{key} is {value!r}; only {' or '.join(map(repr, allowed))} is supported"
               for key, value, allowed in only if value not in allowed]
    if not norms or any(norm.get("name") not in ("rms", "fused_rms") or norm.get("bias") for norm in norms):
        faults.append("a layer_norm is not an RMSNorm without bias")
    if len({norm.get("eps") for norm in norms}) > 1:
        faults.append("the norms have different eps")
    return faults


def _moe(moe: Mapping[str, Any]) -> MoeConfig:
    """The experts of every layer; the block of a dense model has none."""
    if not moe:
        return MoeConfig()
    router = moe.get("router") or {}
    return MoeConfig(
        experts=moe["num_experts"],
        top_k=router.get("top_k", 1),
        d_expert=moe["hidden_size"],
        scores=router.get("gating_function") or "softmax",
        renormalise=router.get("normalize_expert_weights") is not None,
        load_balance_loss=moe.get("lb_loss_weight") or 0.0,
        z_loss=moe.get("z_loss_weight") or 0.0,
    )


def _layers(windows: Mapping[str, Any] | None) -> tuple[tuple[LayerKind, ...], int | None]:
    """(layer_pattern, window) of OLMo-core's list of windows, where -1 is full attention."""
    if windows is None:
        return ("full",), None
    sizes = {size for size in windows["pattern"] if size != -1}
    if len(sizes) > 1:
        raise ConvertError(f"windows of different sizes ({sorted(sizes)}) are not supported")
    return tuple("full" if size == -1 else "window" for size in windows["pattern"]), next(iter(sizes), None)


def _mixer(block: Mapping[str, Any]) -> dict[str, Any]:
    """The attention section, which has had two names."""
    return block.get("sequence_mixer") or block.get("attention") or {}


def _scaling(config: Mapping[str, Any], block: Mapping[str, Any], where: str) -> RopeScalingConfig:
    """YaRN, which OLMo-core writes as an override of each full-attention block."""
    base, layers = _mixer(block), int(config["n_layers"])
    scalings: dict[int, Any] = {}
    for layer, override in (config.get("block_overrides") or {}).items():
        mixer = _mixer(override)
        rope = dict(mixer.get("rope") or {})
        scalings[int(layer)] = rope.pop("scaling", None)
        rest, others = ({key: value for key, value in b.items() if key not in ("sequence_mixer", "attention")}
                        for b in (override, block))
        if rest != others or {**mixer, "rope": rope} != base:
            raise ConvertError(f"{where}: block {layer} differs from the others in more than rope scaling")
    if base["rope"].get("scaling"):
        scalings = dict.fromkeys(range(layers), base["rope"]["scaling"]) | scalings
    if not scalings:
        return RopeScalingConfig()
    kinds, _ = _layers(base.get("sliding_window"))
    full = {layer for layer in range(layers) if kinds[layer % len(kinds)] == "full"}
    if (base.get("sliding_window") or {}).get("force_full_attention_on_last_layer", True):
        full.add(layers - 1)
    one = next(iter(scalings.values()))
    if set(scalings) != full or any(scaling != one for scaling in scalings.values()):
        raise ConvertError(f"{where}: rope scaling is not the same on all full-attention layers and on them alone")
    if not one or "YaRN" not in str(one.get("_CLASS_")):
        raise ConvertError(f"{where}: rope scaling {one} is not supported; only YaRN is")
    return RopeScalingConfig(kind="yarn", factor=float(one["factor"]), original_length=int(one["old_context_len"]),
                             beta_fast=float(one["beta_fast"]), beta_slow=float(one["beta_slow"]))
