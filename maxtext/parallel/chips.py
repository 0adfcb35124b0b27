"""Published numbers of accelerators: memory, peak, and how fast they talk to each other. No device is needed.

A *domain* is what fast links join: a slice of a TPU (ICI) or the GPUs of one NVLink switch. Domains talk over the
network of the data centre (DCN, InfiniBand), at `network_bytes` a device.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published numbers of one chip; `devices` of them are what JAX shows as devices."""

    name: str
    platform: Literal["tpu", "cuda"]
    dims: int  # of the torus of its links; 0: a switch joins all devices of a domain
    devices: int  # JAX devices a chip
    memory_bytes: int  # of one device
    peak_flops: float  # dense bfloat16, of one device
    link_bytes: float  # a second, one way: of one of a chip's two links a torus dim, or of a GPU into its switch
    memory_rate: float  # bytes a second between a device and its memory
    network_bytes: float  # a second, one way, of one device to other domains
    domain: int  # devices that a switch joins; 0: all of a slice
    kinds: tuple[str, ...]  # what `device_kind` holds
    source: str

    @property
    def example(self) -> str:
        return f"{self.name}:{'x'.join(['4'] * self.dims)}" if self.dims else f"{self.name}:8x{self.domain}"


_PAGE = "docs.cloud.google.com/tpu/docs"
# Not v4: libtpu compiles for its two cores apart, which is not how JAX runs on it.
# TPU links: the published bidirectional bandwidth of a chip, halved, over 2 links a torus dim. TPU network: published
# bits a second of a chip (tpu7x page; v5e: 2 x 100 Gb/s a host of 8). GPUs: NVIDIA's data sheets for memory and peak
# without sparsity; NVLink one way; one 400 Gb/s port a GPU, as in a DGX.
CHIPS = {chip.name: chip for chip in (
    Chip("tpu7x", "tpu", 3, 2, 96 * GIB, 1153.5e12, 100e9, 3690e9, 6.25e9, 0, ("TPU7x",),
         f"{_PAGE}/tpu7x: 192 GiB, 2307 TFLOP/s, 1200 GB/s a chip"),
    Chip("v6e", "tpu", 2, 1, 32 * GIB, 918e12, 100e9, 1638e9, 12.5e9, 0, ("TPU v6 lite", "TPU v6e"),
         f"{_PAGE}/v6e: 32 GiB, 918 TFLOP/s, 800 GB/s a chip"),
    Chip("v5p", "tpu", 3, 1, 95 * GIB, 459e12, 100e9, 2765e9, 6.25e9, 0, ("TPU v5p", "TPU v5"),
         f"{_PAGE}/v5p: 95 GiB, 459 TFLOP/s, 1200 GB/s a chip"),
    Chip("v5e", "tpu", 2, 1, 16 * GIB, 197e12, 50e9, 819e9, 3.125e9, 0, ("TPU v5 lite", "TPU v5e"),
         f"{_PAGE}/v5e: 16 GiB, 197 TFLOP/s, 400 GB/s a chip"),
    Chip("h100", "cuda", 0, 1, 80 * 10**9, 989.5e12, 450e9, 3350e9, 50e9, 8, ("H100",),
         "NVIDIA H100 SXM data sheet: 80 GB, 989.5 TFLOP/s, NVLink 900 GB/s both ways"),
    Chip("h200", "cuda", 0, 1, 141 * 10**9, 989.5e12, 450e9, 4800e9, 50e9, 8, ("H200",),
         "NVIDIA H200 SXM data sheet: 141 GB, 989.5 TFLOP/s, NVLink 900 GB/s both ways"),
    Chip("gb200", "cuda", 0, 1, 186 * 10**9, 2500e12, 900e9, 8000e9, 50e9, 72, ("GB200",),
         "NVIDIA GB200 NVL72 data sheet: 186 GB, 2500 TFLOP/s a GPU, NVLink 1800 GB/s both ways, 72 GPUs a switch"),
    Chip("b200", "cuda", 0, 1, 180 * 10**9, 2250e12, 900e9, 7700e9, 50e9, 8, ("B200",),
         "NVIDIA DGX B200 data sheet: 180 GB, 2250 TFLOP/s, NVLink 1800 GB/s both ways"),
)}

# Share of the peak that matmuls reach. TPU: XLA's own cycle estimates put one large bfloat16 matmul at 82 to 87% on
# v5p, v6e and tpu7x. GPU: under load the clock is below the data sheet's; assumed, nothing here confirms it.
MATMUL_EFFICIENCY = {"tpu": 0.83, "cuda": 0.75}
# Share of the peak that attention kernels reach forward and backward together, with heads of 128 and of 256. TPU:
# ideal matrix cycles over the bundles of jax's splash kernel, compiled in tiles of 512 x 512 (v5e as v5p). GPU:
# FlashAttention 3 on an H100, causal (arXiv 2407.08608); Blackwell taken to be alike.
ATTENTION_EFFICIENCY = {"tpu7x": (0.30, 0.50), "v6e": (0.27, 0.51), "v5p": (0.36, 0.43), "v5e": (0.36, 0.43),
                        "h100": (0.58, 0.58), "h200": (0.58, 0.58), "b200": (0.58, 0.58), "gb200": (0.58, 0.58)}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that a device says it is, or None for a CPU and for what is not listed."""
    found = [(len(kind), chip) for chip in CHIPS.values() for kind in chip.kinds if kind in device_kind]
    return max(found, key=lambda pair: pair[0])[1] if found else None
