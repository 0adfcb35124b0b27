"""Rules of the section `quant`; `validate.py` collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from maxtext.config.schema import Config
from maxtext.config.wording import Problem, default_of, division, multiples

MX_BLOCK = 32  # values that share a scale in mxfp8 (OCP Microscaling Formats 1.0)
INT8_PRODUCTS = (2**31 - 1) // 127**2  # as many surely fit into an int32 sum


def _unused(cfg: Config) -> Iterator[Problem]:
    quant = cfg.quant
    if quant.kind != "none":
        return
    for name in ("parts", "weight_gradients", "stochastic_rounding"):
        if getattr(quant, name) != default_of(quant, name):
            yield f"quant.{name}", (f"quant.{name} is set, but quant.kind is none; write quant.kind: int8, fp8 or "
                                    f"mxfp8, or remove quant.{name}")


def _parts(cfg: Config) -> Iterator[Problem]:
    quant = cfg.quant
    if quant.kind == "none":
        return
    twice = sorted({part for part in quant.parts if quant.parts.count(part) > 1})
    if twice:
        yield "quant.parts", f"{', '.join(twice)} is listed twice; list each part once"
    if not quant.parts or (quant.parts == ("experts",) and not cfg.model.moe.experts):
        yield "quant.parts", (f"quant.kind is {quant.kind}, but quant.parts names no part that this model has; write "
                              "quant.kind: none, or quant.parts: [dense]")


def _blocks(cfg: Config) -> Iterator[Problem]:
    for key, size in _block_sizes(cfg):
        if size % MX_BLOCK:
            yield "quant.kind", (f"quant.kind mxfp8 has blocks of {MX_BLOCK}, but {key} is {size} "
                                 f"{division(size, MX_BLOCK)}; set it to {multiples(size, MX_BLOCK)}, or write "
                                 "quant.kind: fp8")


def _block_sizes(cfg: Config) -> list[tuple[str, int]]:
    """The dims along which matmuls of this run cut blocks, when they do."""
    model, quant = cfg.model, cfg.quant
    if quant.kind != "mxfp8":
        return []
    sizes: list[tuple[str, int | None]] = [("model.d_model", model.d_model)]
    if quant.of("dense"):
        latent = model.latent
        sizes += [("the width of a head's query", model.head_width), ("the width of a head's value", model.value_width)]
        if latent.kv_rank is not None:
            sizes += [("model.latent.kv_rank", latent.kv_rank), ("model.latent.q_rank", latent.q_rank),
                      ("model.latent.kv_rank + rope_dim", latent.kv_rank + latent.rope_dim),
                      ("model.latent.nope_dim + value_dim", latent.nope_dim + latent.value_dim)]
        sizes += _over_tensor(cfg)
        if quant.weight_gradients:
            sizes += [("data.sequence_length", cfg.data.sequence_length)]
    elif quant.of("experts"):
        sizes += _over_tensor(cfg)
    return [(key, size) for key, size in sizes if size is not None]


def _over_tensor(cfg: Config) -> list[tuple[str, int | None]]:
    """Those of them that the tensor axis splits."""
    model, quant = cfg.model, cfg.quant
    dense = quant.of("dense") and (not all(model.routed_layers))
    shared = quant.of("dense") and model.moe.experts and model.moe.shared_experts
    width = model.moe.d_expert if model.moe.experts and (quant.of("experts") or shared) else None
    return [("model.d_ff", model.d_ff if dense else None), ("model.moe.d_expert", width)]


def block_misfits(cfg: Config, shape: Mapping[str, int]) -> Iterator[Problem]:
    """Blocks of mxfp8 that a mesh of these sizes would cut in two."""
    if cfg.quant.kind != "mxfp8":
        return
    positions = cfg.data.sequence_length if cfg.quant.of("dense") and cfg.quant.weight_gradients else None
    split = [*((key, size, "tensor") for key, size in _over_tensor(cfg)),
             ("data.sequence_length", positions, "context")]
    for key, size, axis in split:
        ways = shape[axis]
        if size is not None and not size % ways and not size % MX_BLOCK and size // ways % MX_BLOCK:
            yield f"mesh.{axis}", (f"{key} {size} / mesh.{axis} {ways} = {size // ways} on a device, which blocks of "
                                   f"{MX_BLOCK} of quant.kind mxfp8 do not divide {division(size // ways, MX_BLOCK)}; "
                                   "change one of them, or write quant.kind: fp8")


def _int8_sums(cfg: Config) -> Iterator[Problem]:
    quant, train = cfg.quant, cfg.train
    if quant.kind != "int8" or not quant.weight_gradients:
        return
    tokens = cfg.batch_tokens // train.gradient_accumulation_steps
    if tokens > INT8_PRODUCTS:
        yield "quant.weight_gradients", (
            f"quant.kind int8 sums gradients of weights in an int32, which surely holds {INT8_PRODUCTS:,} products, "
            f"but a micro-batch has {tokens:,} tokens; set quant.weight_gradients: false, or "
            f"train.gradient_accumulation_steps to {-(-cfg.batch_tokens // INT8_PRODUCTS)} or more")


QUANT_RULES: tuple[Callable[[Config], Iterable[Problem]], ...] = (_unused, _parts, _blocks, _int8_sums)
