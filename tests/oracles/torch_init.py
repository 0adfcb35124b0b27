"""The initial weights that PyTorch draws for a model of the reference, bit for bit but for the last place.

OLMo-core fills one array after another with `torch.nn.init.trunc_normal_` from one CPU generator. Torch's generator is
the Mersenne Twister that numpy has; its normal numbers are Box-Muller pairs over blocks of 16 uniforms of 24 bits, and
torch 2.13 draws again what lies outside the cut. So committed cases need no weights: they are made from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

Shape = tuple[int, ...]


class TorchGenerator:
    """`torch.Generator().manual_seed(seed)` on CPU."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.MT19937()
        self._bits._legacy_seeding(seed)

    def normal(self, shape: Shape, std: float) -> np.ndarray:
        """`torch.empty(shape).normal_(0, std)`; the number of entries must be a multiple of 16."""
        count = math.prod(shape)
        assert count % 16 == 0, "torch fills a rest in another way"
        uniform = (self._bits.random_raw(count) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
        first, second = uniform.reshape(-1, 2, 8).swapaxes(0, 1)
        radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - first))
        angle = np.float32(2 * math.pi) * second
        return (np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) * np.float32(std)).reshape(shape)

    def truncated_normal(self, shape: Shape, std: float) -> np.ndarray:
        """`torch.nn.init.trunc_normal_` cut at 3 deviations."""
        drawn, bound = self.normal(shape, std), np.float32(3 * std)
        while (outside := np.abs(drawn) > bound).any():
            drawn = np.where(outside, self.normal(shape, std), drawn)
        return drawn


def olmo3_weights(tensors: Iterable[tuple[str, Shape]], seed: int, std: float) -> dict[str, np.ndarray]:
    """Every tensor of a transformers Olmo3 model, drawn in the order in which the reference does.

    Args:
      tensors: their names and shapes, in any order.
    """
    shapes, generator = dict(tensors), TorchGenerator(seed)
    drawn = {name: generator.truncated_normal(shapes[name], std) for name in _order(shapes)}
    return drawn | {name: np.ones(shape, np.float32) for name, shape in shapes.items() if name not in drawn}


def olmo_core_moe_weights(tensors: Iterable[tuple[str, Shape]], seed: int, std: float) -> dict[str, np.ndarray]:
    """Every tensor of a mixture of experts under OLMo-core's own names, drawn in the order in which it does."""
    shapes, generator = dict(tensors), TorchGenerator(seed)
    drawn = {name: generator.truncated_normal(shapes[name], std) for name in _moe_order(shapes)}
    return drawn | {name: np.ones(shape, np.float32) for name, shape in shapes.items() if name not in drawn}


def _moe_order(shapes: dict[str, Shape]) -> Iterator[str]:
    yield "embeddings.weight"
    layer = 0
    while f"blocks.{layer}.feed_forward_moe.router.weight" in shapes:
        for part in ("q", "k", "v", "out"):
            yield f"blocks.{layer}.attention.w_{part}.weight"
        for part in ("router.weight", "experts.mlp.w1", "experts.mlp.w2", "experts.mlp.w3"):
            yield f"blocks.{layer}.feed_forward_moe.{part}"
        layer += 1
    yield "lm_head.w_out.weight"


def _order(shapes: dict[str, Shape]) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    layer = 0
    while f"model.layers.{layer}.mlp.down_proj.weight" in shapes:
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            yield f"model.layers.{layer}.{part}_proj.weight"
        layer += 1
    yield "lm_head.weight"
