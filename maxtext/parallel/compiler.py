"""Options of XLA's compiler that a train step is compiled with, by platform.

They change how a step is laid out and scheduled, never what it computes.
"""

from __future__ import annotations

import os

TPU = {
    # On 64 devices and more, weights are otherwise gathered by an all-reduce, which sends twice the bytes.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    # Fast memory that a fusion may plan with; what MaxText's launchers set for these chips. Matmuls get larger tiles.
    "xla_tpu_scoped_vmem_limit_kib": "65536",
}


GPU_DETERMINISTIC = {
    # No atomic additions, and no kernels chosen by how long they took.
    "xla_gpu_deterministic_ops": "True",
}


def compiler_options(platform: str, deterministic: bool = False) -> dict[str, str]:
    """Options for a platform, without those that LIBTPU_INIT_ARGS sets: what a user asks for stands.

    Args:
      deterministic: whether a rerun must have the same bits; CPUs and TPUs do that as they are.
    """
    if platform == "gpu" and deterministic:
        return dict(GPU_DETERMINISTIC)
    if platform != "tpu":
        return {}
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in TPU.items() if f"--{name}=" not in given}
