"""The layers of a model, as stacks of repeated patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from maxtext.config.architecture import ModelConfig


class Layer(NamedTuple):
    """What tells one layer from another."""

    window: int | None  # tokens that it sees; None: full attention
    routed: bool = False  # whether its feed-forward is a mixture of experts


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` times a pattern of blocks."""

    layers: tuple[Layer, ...]
    repeats: int


def segments(cfg: ModelConfig) -> tuple[Segment, ...]:
    """Splits the layers into as few repeated patterns as the declared `layer_pattern` allows.

    Dense layers that stand before the routed ones are segments of their own.
    """
    layers = [Layer(*layer) for layer in zip(cfg.layer_windows, cfg.routed_layers, strict=True)]
    dense = 0 if all(cfg.routed_layers) else cfg.routed_layers.index(True) if any(cfg.routed_layers) else len(layers)
    return *_repeated(layers[:dense], len(cfg.layer_pattern)), *_repeated(layers[dense:], len(cfg.layer_pattern))


def _repeated(layers: Sequence[Layer], pattern: int) -> list[Segment]:
    repeats = 0
    while layers[repeats * pattern : (repeats + 1) * pattern] == layers[:pattern] and len(layers) >= pattern:
        repeats += 1
    found = [Segment(tuple(layers[:pattern]), repeats)] if repeats else []
    rest = layers[repeats * pattern :]
    while rest:  # what the pattern leaves over: runs of equal layers
        run = next((i for i, layer in enumerate(rest) if layer != rest[0]), len(rest))
        found.append(Segment((rest[0],), run))
        rest = rest[run:]
    return found
