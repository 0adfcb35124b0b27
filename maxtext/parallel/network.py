"""How long collectives take: latency a step and bytes over bandwidth, for rings on fast links and over a network.

A group of devices lies in one or several domains (see `chips`). What crosses domains is done in two stages: each of
the k members inside a domain exchanges its share with its counterparts in the other domains, all k at once, and the
members inside a domain exchange what they have. A ring keeps all links busy but takes a step a member; a tree takes
log2 n steps up and as many down at 0.9 of the rate (as in NCCL's model): faster for small arrays over many devices.

Latencies: NCCL's own model (src/graph/tuning.cc, protocol Simple): 8.4 us a call, 3.4 us a step over NVLink, 9.6 us
over the network. ICI 1 us a hop and DCN 50 us a step are assumed. Rates: rings of eight H100 measure 370 of 450 GB/s
(JAX scaling book, chapter on GPUs), so NVLink and InfiniBand count 0.82 of theirs; ICI and DCN count in full.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from maxtext.parallel.chips import Chip, chip_of

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
SWITCH_EFFICIENCY = 370 / 450
TREE_EFFICIENCY = 0.9
# Devices that nothing is published of, such as virtual ones: only ratios matter, to choose between meshes.
UNKNOWN_RATE, UNKNOWN_NETWORK = 10e9, 1e9


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds of a collective beside its bytes."""

    call: float
    near: float  # a step inside a domain
    far: float  # a step between domains


LATENCIES = {"tpu": Latency(2e-6, 1e-6, 50e-6), "cuda": Latency(8.4e-6, 3.4e-6, 9.6e-6)}


@dataclasses.dataclass(frozen=True)
class Network:
    """The links between the devices of a job, which are numbered domain by domain."""

    chip: Chip | None
    domain: int  # devices in one
    torus: tuple[int, ...] = ()  # chips along each dim of a slice; none: a switch

    def dims(self, devices: int) -> int:
        """Dims of the torus that a ring of so many devices of a slice can span, largest first."""
        if not self.torus or self.chip is None:
            return 0
        chips, covered = max(1, devices // self.chip.devices), 1
        for number, size in enumerate(sorted(self.torus, reverse=True), 1):
            covered *= size
            if covered >= chips:
                return number
        return len(self.torus)

    def near_rate(self, devices: int) -> float:
        """Bytes a second that one of so many devices inside a domain sends, all its links together."""
        if self.chip is None:
            return UNKNOWN_RATE
        if not self.chip.dims:
            return SWITCH_EFFICIENCY * self.chip.link_bytes
        return 2 * max(1, self.dims(devices)) * self.chip.link_bytes / self.chip.devices

    @property
    def far_rate(self) -> float:
        """Bytes a second that one device sends to other domains."""
        if self.chip is None:
            return UNKNOWN_NETWORK
        return self.chip.network_bytes * (SWITCH_EFFICIENCY if self.chip.platform == "cuda" else 1.0)

    @property
    def latency(self) -> Latency:
        return LATENCIES["cuda" if self.chip is None else self.chip.platform]

    def seconds(self, kind: Kind, array: float, near: int, far: int = 1, calls: int = 1) -> float:
        """Time of `calls` collectives, one after another.

        Args:
          array: bytes of the whole array of one call: what an all-gather makes, what the others start from.
          near: members of the group inside one domain.
          far: domains that the group lies in.
        """
        if near * far == 1 or not calls:
            return 0.0
        if kind == "all-reduce":
            ring = 2 * self._one_way(array, near, far)
            return calls * (self.latency.call + min(ring, self._tree(array, near, far)))
        if kind == "collective-permute":
            steps = self.latency.far if far > 1 else self.latency.near
            return calls * (self.latency.call + steps + array / (self.far_rate if far > 1 else self.near_rate(near)))
        if kind == "all-to-all":
            # On a torus a message crosses a quarter of each ring on average, so links carry that many times as much.
            spread = max(1.0, self._ring(near) / 4 / max(1, self.dims(near))) if self.torus and self.chip else 1.0
            inside = array * (near - 1) / (near * far) * spread / self.near_rate(near)
            between = array * (far - 1) / far / self.far_rate
            return calls * (self.latency.call + inside + between + self._steps(near, far))
        return calls * (self.latency.call + self._one_way(array, near, far))

    def _one_way(self, array: float, near: int, far: int) -> float:
        """An all-gather, or a reduce-scatter, which is the same backwards."""
        between = array / near * (far - 1) / far / self.far_rate
        inside = array * (near - 1) / near / self.near_rate(near)
        return between + inside + self._steps(near, far)

    def _steps(self, near: int, far: int) -> float:
        return self._ring(near) * self.latency.near + (far - 1) * self.latency.far

    def _ring(self, near: int) -> int:
        """Steps around the rings that a group in one domain forms: one ring a dim of a torus, both ways at once."""
        if not self.torus or self.chip is None:
            return near - 1
        chips, steps = max(1, near // self.chip.devices), 0
        for size in sorted(self.torus, reverse=True):
            length = min(size, chips)
            chips, steps = -(-chips // length), steps + length // 2
        return max(steps, 1 if near > 1 else 0)

    def _tree(self, array: float, near: int, far: int) -> float:
        """Up and down a double binary tree: the whole array crosses each link twice."""
        steps = 2 * (math.ceil(math.log2(near)) * self.latency.near + math.ceil(math.log2(far)) * self.latency.far)
        inside = 2 * array / self.near_rate(near) if near > 1 else 0.0
        between = 2 * array / (near * self.far_rate) if far > 1 else 0.0
        return steps + (inside + between) / TREE_EFFICIENCY


@functools.lru_cache(maxsize=4096)
def _spread(axes: tuple[str, ...], names: tuple[str, ...], shape: tuple[int, ...], domain: int) -> tuple[int, int]:
    strides = [math.prod(shape[number + 1:]) for number in range(len(shape))]
    ranges = [range(0, size * stride, stride) for name, size, stride in zip(names, shape, strides, strict=True)
              if name in axes]
    domains = {sum(places) // domain for places in itertools.product(*ranges)}
    members = math.prod(len(one) for one in ranges)
    return -(-members // len(domains)), len(domains)


def spread(axes: Collection[str], sizes: Mapping[str, int], domain: int) -> tuple[int, int]:
    """(members in one domain, domains) of a group over these axes of a mesh whose last axis varies fastest."""
    return _spread(tuple(sorted(axes)), tuple(sizes), tuple(sizes.values()), domain)


def network_of(devices: Sequence[Any]) -> Network:
    """The network between devices at hand. A domain is a slice, the GPUs of a process, or all other devices.

    With one GPU a process, as some launchers have it, processes are taken to fill one node after the other.
    """
    chip = chip_of(getattr(devices[0], "device_kind", ""))
    keys = [getattr(device, "slice_index", 0) for device in devices]
    if chip is not None and not chip.dims:
        keys = [device.process_index for device in devices]
    domain = len(devices) // len(set(keys))
    if chip is not None and not chip.dims and domain == 1:
        domain = math.gcd(len(devices), chip.domain)
    if chip is None or not chip.dims:
        return Network(chip, domain)
    places = [device.coords for device, key in zip(devices, keys, strict=True) if key == keys[0]]
    return Network(chip, domain, tuple(len(set(along)) for along in zip(*places, strict=True))[:chip.dims])
