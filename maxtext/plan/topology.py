"""The machines that a plan can compile for: chips with their published numbers, and devices made without hardware."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

GIB = 1 << 30
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
DEVICE_COUNT = "--xla_force_host_platform_device_count"


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what to write instead."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published numbers of one chip; `devices` of them are what JAX shows as devices."""

    name: str
    dims: int  # of the torus of its links
    devices: int  # JAX devices a chip
    memory_bytes: int  # of one device
    peak_flops: float  # dense bfloat16, of one device
    link_bytes: float  # a second, one way, of one link; a chip has two links a torus dim
    source: str

    @property
    def example(self) -> str:
        return f"{self.name}:{'x'.join(['4'] * self.dims)}"


_PAGE = "docs.cloud.google.com/tpu/docs"
# Not v4: libtpu compiles for its two cores apart, which is not how JAX runs on it.
# Links: the published bidirectional bandwidth of a chip, halved, over 2 links a torus dim.
CHIPS = {chip.name: chip for chip in (
    Chip("tpu7x", 3, 2, 96 * GIB, 1153.5e12, 100e9, f"{_PAGE}/tpu7x: 192 GiB, 2307 TFLOP/s, 1200 GB/s a chip"),
    Chip("v6e", 2, 1, 32 * GIB, 918e12, 100e9, f"{_PAGE}/v6e: 32 GiB, 918 TFLOP/s, 800 GB/s a chip"),
    Chip("v5p", 3, 1, 95 * GIB, 459e12, 100e9, f"{_PAGE}/v5p: 95 GiB, 459 TFLOP/s, 1200 GB/s a chip"),
    Chip("v5e", 2, 1, 16 * GIB, 197e12, 50e9, f"{_PAGE}/v5e: 16 GiB, 197 TFLOP/s, 400 GB/s a chip"),
)}


def compiler_flags() -> list[str]:
    """Flags given to the compiler through the environment, without the number of virtual devices."""
    given = " ".join(os.environ.get(name, "") for name in FLAG_VARIABLES).split()
    return [flag for flag in given if not flag.startswith(DEVICE_COUNT)]


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip and how many of them along each torus dim; `chip` is None for virtual devices of this machine's CPU."""

    name: str
    chip: Chip | None
    shape: tuple[int, ...]

    @property
    def n_devices(self) -> int:
        return math.prod(self.shape) * (1 if self.chip is None else self.chip.devices)

    @property
    def memory_bytes(self) -> int:
        """Of one device; virtual devices share the memory of this machine."""
        if self.chip is not None:
            return self.chip.memory_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.n_devices

    @property
    def memory_source(self) -> str:
        return "this machine's memory, shared" if self.chip is None else self.chip.source


def read_target(text: str) -> Target:
    """`tpu7x:4x4x4`, `v5p:4x4x8`, `v6e:16x16` or `cpu:8` as a Target.

    Raises:
      PlanError: for an unknown chip or a shape that the chip's torus does not have.
    """
    name, _, sizes = text.partition(":")
    known = [*CHIPS, "cpu"]
    if name not in known:
        near = difflib.get_close_matches(name.lower().replace("tpu-", "").replace("tpuv", "v"), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"--topology {text}: unknown chip {name!r}; {hint}Known are {', '.join(known)}.")
    chip = CHIPS.get(name)
    example = "cpu:8" if chip is None else chip.example
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise PlanError(f"--topology {text}: write the chip and its shape, such as {example}")
    shape = tuple(int(size) for size in sizes.split("x"))
    dims = 1 if chip is None else chip.dims
    if len(shape) != dims:
        kind = "virtual CPU devices are counted" if chip is None else f"the links of {name} form a {dims}D torus"
        raise PlanError(f"--topology {text}: {kind}, so the shape has {dims} number{'s' * (dims > 1)}, not "
                        f"{len(shape)}; write for instance {example}")
    return Target(text, chip, shape)


def prepare_process(target: Target) -> None:
    """Sets what must stand in the environment before JAX starts: no accelerator is looked for.

    Raises:
      PlanError: when libtpu is not installed and the target is a TPU.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the compile time is part of the plan
    if target.chip is None:
        rest = re.sub(rf"{DEVICE_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{rest} {DEVICE_COUNT}={target.n_devices}".strip()
        return
    os.environ["TPU_LIBRARY_PATH"] = _libtpu(target)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server of a cloud machine
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # libtpu would look for both in the cloud, and complain
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{target.chip.name}-{target.n_devices}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # plans may run side by side: no device is taken


def _libtpu(target: Target) -> str:
    given = os.environ.get("TPU_LIBRARY_PATH")
    if given:
        return given
    found = importlib.util.find_spec("libtpu")
    if found is None or not found.submodule_search_locations:
        raise PlanError(f"--topology {target.name}: compiling for a TPU needs libtpu (and no TPU); install it with "
                        "`pip install 'maxtext[tpu]'`, in a checkout `pip install -e '.[tpu]'`")
    return os.path.join(found.submodule_search_locations[0], "libtpu.so")


def make_devices(target: Target) -> Sequence[jax.Device]:
    """The devices of the target; those of a TPU are descriptions to compile for.

    Raises:
      PlanError: when libtpu does not know the topology, or the process already has fewer virtual CPU devices.
    """
    import jax

    if target.chip is None:
        devices = jax.devices("cpu")
        if len(devices) < target.n_devices:
            raise PlanError(f"--topology {target.name}: this process already has {len(devices)} CPU devices; start "
                            "a new one")
        return devices[:target.n_devices]
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
    except Exception as error:
        raise PlanError(f"--topology {target.name}: libtpu does not make it: {error}; write a shape that can be "
                        f"rented, such as {target.chip.example}") from error
    if len(devices) != target.n_devices:
        raise PlanError(f"--topology {target.name}: expected {target.n_devices} devices, libtpu makes {len(devices)}")
    return devices
