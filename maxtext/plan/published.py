"""Training speeds that others published, and what shapes predict for the same runs: the error of the simulator.

Nothing is fitted to these runs. Sources: MaxText's tiering page (docs/reference/models/tiering.md) and the benchmark
configs it links to for batch, mesh and remat; MaxText's OLMo launcher for Ironwood; Llama 3's paper (arXiv 2407.21783,
table 4) for H100. Values that are offloaded to the host count as kept. Where only MFU is published it is taken to be by
the same count of FLOPs as here.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from maxtext.config.load import find_config, load
from maxtext.config.schema import Config
from maxtext.model.cost import flops_per_token
from maxtext.model.prediction import Prediction, predict
from maxtext.parallel.chips import CHIPS
from maxtext.parallel.network import Network

_405B = ("model.d_model=16384", "model.n_layers=126", "model.n_heads=128", "model.d_ff=53248")
_LLAMA2 = ("model.vocab_size=32000",)
_FULL, _NONE = ("train.remat.mode=full",), ("train.remat.mode=none",)


def _kept(*names: str) -> tuple[str, ...]:
    return ("train.remat.mode=names", f"train.remat.save=[{','.join(names)}]")


_MLP_AGAIN = _kept("qkv", "attention_out")
_DOTS = _kept("qkv", "attention", "attention_out", "gate_up", "mlp_out")


@dataclasses.dataclass(frozen=True)
class Point:
    """One published run; `tokens` a second and device, or `mfu` in percent where that is all there is."""

    name: str
    model: str  # in configs/models
    overrides: tuple[str, ...]
    length: int
    sequences: float  # a device and update
    chip: str
    torus: tuple[int, ...]  # chips; none: GPUs
    mesh: dict[str, int]
    tokens: float | None = None
    mfu: float | None = None
    micro_batches: int = 1
    repeats: int = 1  # of a circular pipeline; Llama 3's paper does not say how many, so one layer each

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def config(self) -> Config:
        return load(find_config(f"models/{self.model}"), [
            *self.overrides, "optim.lr=1e-4", "train.steps=1", "data.prepared=none",
            f"data.sequence_length={self.length}", f"train.global_batch={round(self.sequences * self.devices)}",
            f"train.gradient_accumulation_steps={self.micro_batches}"])

    @property
    def prediction(self) -> Prediction:
        chip = CHIPS[self.chip]
        network = Network(chip, chip.domain or self.devices, self.torus)
        return predict(self.config, self.mesh, network, self.repeats)

    @property
    def published_step(self) -> float:
        """Seconds of one update."""
        cfg, peak = self.config, CHIPS[self.chip].peak_flops
        tokens = cfg.batch_tokens / self.devices
        if self.tokens is not None:
            return tokens / self.tokens
        assert self.mfu is not None
        return flops_per_token(cfg.model, self.length) * tokens / (peak * self.mfu / 100)


_V6E, _V5P, _V7 = ("v6e", (16, 16)), ("v5p", (4, 8, 8)), ("tpu7x", (4, 4, 4))
_FSDP = {"fsdp": 256}
_PIPELINE = {"pipeline": 16, "fsdp": 64, "context": 1, "tensor": 8}
POINTS = (
    Point("Llama 3.1 8B", "llama31_8b", _MLP_AGAIN, 8192, 4, *_V6E, _FSDP, tokens=7207),
    Point("Llama 3.1 70B", "llama3_70b", _kept("qkv"), 8192, 5, *_V6E, _FSDP, tokens=960),
    Point("Llama 3.1 405B", "llama3_70b", (*_405B, *_MLP_AGAIN), 8192, 1, *_V6E, {"fsdp": 64, "tensor": 4},
          tokens=123),
    Point("Llama 2 70B", "llama3_70b", (*_LLAMA2, *_kept("qkv")), 4096, 2, *_V6E, _FSDP, tokens=900),
    Point("Mixtral 8x7B, dense dispatch", "mixtral_8x7b", ("model.moe.capacity_factor=1.25", *_MLP_AGAIN), 4096, 12,
          *_V6E, _FSDP, tokens=3899),
    Point("Llama 2 70B", "llama3_70b", (*_LLAMA2, *_kept("qkv", "attention", "attention_out", "mlp_out")), 4096, 4,
          *_V5P, _FSDP, tokens=692),
    Point("Mixtral 8x7B, dropless", "mixtral_8x7b", _FULL, 4096, 36, *_V5P, _FSDP, tokens=2909),
    Point("OLMo 3 7B, 16 heads", "olmo3_7b", ("model.n_heads=16", "model.head_dim=256", *_DOTS), 8192, 4, *_V7,
          {"fsdp": 128}, mfu=44.5),
    Point("Llama 3.1 8B", "llama31_8b", _DOTS, 8192, 4, *_V7, {"fsdp": 128}, mfu=47),
    Point("Llama 3 405B", "llama3_70b", (*_405B, *_NONE), 8192, 1 / 4, "h100", (), _PIPELINE, mfu=43, micro_batches=32,
          repeats=8),
    Point("Llama 3 405B", "llama3_70b", (*_405B, *_NONE), 8192, 1 / 8, "h100", (), _PIPELINE | {"fsdp": 128}, mfu=41,
          micro_batches=16, repeats=8),
    Point("Llama 3 405B, 131,072 tokens", "llama3_70b", (*_405B, *_NONE), 131_072, 1 / 128, "h100", (),
          _PIPELINE | {"fsdp": 8, "context": 16}, mfu=38, micro_batches=16, repeats=8),
)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How far predicted steps are from published ones; ratios are published over predicted."""

    ratios: dict[str, tuple[float, ...]]  # by platform

    @property
    def mean_error(self) -> float:
        """Mean of |predicted - published| / published."""
        return statistics.mean(abs(1 / one - 1) for ratios in self.ratios.values() for one in ratios)

    @property
    def calibrated_error(self) -> float:
        """The same after scaling each prediction by the median ratio of the other runs of its platform."""
        errors = [abs(statistics.median(rest) / one - 1) for ratios in self.ratios.values()
                  for number, one in enumerate(ratios) if (rest := ratios[:number] + ratios[number + 1:])]
        return statistics.mean(errors)

    def sentence(self, platform: str) -> str:
        """What a reader of a prediction for a platform should know."""
        mine = self.ratios[platform]
        return (f"{len(mine)} published runs took {min(mine):.2f} to {max(mine):.2f} times the step that shapes "
                f"predict, {statistics.median(mine):.2f} in the middle")


def accuracy(points: Sequence[Point] = POINTS) -> Accuracy:
    ratios: dict[str, list[float]] = {}
    for one in points:
        ratios.setdefault(CHIPS[one.chip].platform, []).append(one.published_step / one.prediction.step)
    return Accuracy({platform: tuple(found) for platform, found in ratios.items()})


def table(points: Sequence[Point] = POINTS) -> str:
    """A Markdown table, one row a run, and what they say together."""
    rows = [("run", "devices", "mesh", "published", "published step, s", "predicted step, s", "error",
             "predicted parts, s"), ("---",) * 8]
    for one in points:
        made, real = one.prediction, one.published_step
        said = f"{one.tokens:,.0f} tokens/s a device" if one.tokens is not None else f"MFU {one.mfu:g}%"
        mesh = " x ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1)
        bubbles = f", bubbles {made.bubble:.0%}" if made.bubble else ""
        parts = (f"matmuls {made.matmul:.2f}, attention {made.attention:.2f}, memory {made.elementwise:.2f}{bubbles}, "
                 f"overlapped {made.hidden:.2f}, blocking {made.exposed:.2f}")
        rows.append((f"{one.name}, {one.length:,}", f"{one.devices:,} {one.chip}", mesh, said, f"{real:.2f}",
                     f"{made.step:.2f}", f"{made.step / real - 1:+.0%}", parts))
    found = accuracy(points)
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    names = {"tpu": "TPU", "cuda": "GPU"}
    by_platform = "; ".join(f"{names[platform]}: {found.sentence(platform)}" for platform in found.ratios)
    lines.append(f"\nMean error of the predicted step {found.mean_error:.0%}, and {found.calibrated_error:.0%} after "
                 f"scaling each by the median of the other runs of its platform. {by_platform}.")
    return "\n".join(lines)
