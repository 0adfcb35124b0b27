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

# Chips with SparseCores on which XLA gathers and scatters only when told; on Ironwood it does so anyway. Meanwhile
# the matrix units go on. The group of a collective may span one, two or three dims of the torus.
SPARSE_CORE_KINDS = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
SPARSE_CORES = {
    f"xla_tpu_enable_sparse_core_collective_offload_{name}": "true"
    for name in ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter")
}


GPU_DETERMINISTIC = {
    # No atomic additions, and no kernels chosen by how long they took.
    "xla_gpu_deterministic_ops": "True",
}


def compiler_options(platform: str, kind: str, deterministic: bool = False) -> dict[str, str]:
    """Options for a platform and a kind of device, without those that LIBTPU_INIT_ARGS sets: what users ask for stands.

    Args:
      kind: what JAX calls the device, such as `TPU v5`.
      deterministic: whether a rerun must have the same bits; CPUs and TPUs do that as they are.
    """
    if platform == "gpu" and deterministic:
        return dict(GPU_DETERMINISTIC)
    if platform != "tpu":
        return {}
    wanted, given = TPU | (SPARSE_CORES if kind in SPARSE_CORE_KINDS else {}), os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in wanted.items() if f"--{name}=" not in given}
