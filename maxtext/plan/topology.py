"""The machines that a plan can compile for: chips with their published numbers, and devices made without hardware."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maxtext.parallel.chips import CHIPS, GIB, Chip
from maxtext.parallel.network import Network

if TYPE_CHECKING:
    import jax

__all__ = ["CHIPS", "GIB", "Chip", "PlanError", "Target", "make_devices", "prepare_process", "read_target",
           "stay_on_cpu"]

FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
DEVICE_COUNT = "--xla_force_host_platform_device_count"


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what to write instead."""


def compiler_flags() -> list[str]:
    """Flags given to the compiler through the environment, without the number of virtual devices."""
    given = " ".join(os.environ.get(name, "") for name in FLAG_VARIABLES).split()
    return [flag for flag in given if not flag.startswith(DEVICE_COUNT)]


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip and how many of them: along each torus dim of a slice, or nodes and GPUs in a node.

    `chip` is None for virtual devices of this machine's CPU.
    """

    text: str
    chip: Chip | None
    shape: tuple[int, ...]
    slices: int = 1  # that only the network of the data centre joins

    @property
    def name(self) -> str:
        return self.text if self.slices == 1 else f"{self.slices} x {self.text}"

    @property
    def slice_devices(self) -> int:
        return math.prod(self.shape) * (1 if self.chip is None else self.chip.devices)

    @property
    def n_devices(self) -> int:
        return self.slices * self.slice_devices

    @property
    def network(self) -> Network:
        """How its devices talk to each other."""
        if self.chip is None:
            return Network(None, self.n_devices)
        torus = self.shape if self.chip.dims else ()
        return Network(self.chip, self.slice_devices if self.chip.dims else self.shape[-1], torus)

    @property
    def memory_bytes(self) -> int:
        """Of one device; virtual devices share the memory of this machine."""
        if self.chip is not None:
            return self.chip.memory_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.n_devices

    @property
    def memory_source(self) -> str:
        return "this machine's memory, shared" if self.chip is None else self.chip.source


def read_target(text: str, slices: int = 1) -> Target:
    """`tpu7x:4x4x4`, `v5p:4x4x8`, `v6e:16x16`, `h100:8x8` (nodes x GPUs) or `cpu:8` as a Target.

    Raises:
      PlanError: for an unknown chip, a shape that the chip's torus does not have, or slices of what has none.
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
    dims = 1 if chip is None else chip.dims or 2
    if len(shape) != dims:
        kind = "virtual CPU devices are counted"
        if chip is not None:
            kind = f"the links of {name} form a {dims}D torus" if chip.dims else f"{name} has nodes and GPUs in a node"
        raise PlanError(f"--topology {text}: {kind}, so the shape has {dims} number{'s' * (dims > 1)}, not "
                        f"{len(shape)}; write for instance {example}")
    if chip is not None and chip.domain and shape[-1] > chip.domain:
        raise PlanError(f"--topology {text}: one switch joins at most {chip.domain} GPUs of {name}, not {shape[-1]}; "
                        f"write for instance {example}")
    if slices < 1 or (slices > 1 and (chip is None or not chip.dims)):
        raise PlanError(f"--slices {slices}: only TPUs have slices, 1 or more; for GPUs write more nodes, for instance "
                        f"{example}")
    return Target(text, chip, shape, slices)


def prepare_process(target: Target) -> None:
    """Sets what must stand in the environment before JAX starts: no accelerator is looked for.

    Raises:
      PlanError: when what compiles for the target is not installed: libtpu, or JAX's plugin for CUDA.
    """
    stay_on_cpu()
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the compile time is part of the plan
    if target.chip is None:
        rest = re.sub(rf"{DEVICE_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{rest} {DEVICE_COUNT}={target.n_devices}".strip()
        return
    if target.chip.platform == "cuda":
        _check_cuda(target)
        if "--xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):  # choosing kernels by timing needs a GPU
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        return
    os.environ["TPU_LIBRARY_PATH"] = _libtpu(target)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server of a cloud machine
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # libtpu would look for both in the cloud, and complain
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{target.chip.name}-{target.n_devices}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # plans may run side by side: no device is taken


def stay_on_cpu() -> None:
    """No accelerator is looked for. It must be called before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def _check_cuda(target: Target) -> None:
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (13, 12)):
        raise PlanError(f"--topology {target.name}: compiling for a GPU needs JAX's plugin for CUDA (and no GPU); "
                        "install it with `pip install 'maxtext[cuda]'`, or give --estimate for numbers from shapes")


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
    """The devices of the target; those of a TPU or GPU are descriptions to compile for.

    Raises:
      PlanError: when the compiler does not know the topology, or the process already has fewer virtual CPU devices.
    """
    import jax

    if target.chip is None:
        devices = jax.devices("cpu")
        if len(devices) < target.n_devices:
            raise PlanError(f"--topology {target.name}: this process already has {len(devices)} CPU devices; start "
                            "a new one")
        return devices[:target.n_devices]
    from jax.experimental import topologies

    if target.chip.platform == "cuda":
        nodes, gpus = target.shape
        made: dict[str, Any] = {"topology": f"1x{nodes}x{gpus}", "target_config": target_config(target.chip)}
        maker = "JAX's plugin for CUDA"
    else:
        made, maker = {"topology_name": target.text}, "libtpu"
        if target.slices > 1:
            made["num_slices"] = target.slices
    try:
        devices = topologies.get_topology_desc(platform=target.chip.platform, **made).devices
    except Exception as error:
        raise PlanError(f"--topology {target.name}: {maker} does not make it: {error}; write a shape that can be "
                        f"rented, such as {target.chip.example}") from error
    if len(devices) != target.n_devices:
        raise PlanError(f"--topology {target.name}: expected {target.n_devices} devices, {maker} makes {len(devices)}")
    return devices


# What XLA wants to know of a GPU: name, compute capability, cores, L2 bytes and clock. Hopper as XLA's own descriptions
# have it; Blackwell from NVIDIA's data sheets, its clock and registers taken to be Hopper's.
_GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 9, 132, 50 << 20, 1.98),
    "h200": ("NVIDIA H200", 9, 132, 50 << 20, 1.98),
    "b200": ("NVIDIA B200", 10, 148, 126 << 20, 1.98),
    "gb200": ("NVIDIA GB200", 10, 152, 126 << 20, 1.98),
}


def target_config(chip: Chip) -> str:
    """XLA's description of a GPU, with which it compiles without one, as a text of GpuTargetConfigProto."""
    name, capability, cores, cache, clock = _GPUS[chip.name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.memory_rate)} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {chip.memory_bytes} cuda_compute_capability {{ major: {capability} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
