"""The `optim` section: AdamW, Muon, the rule that skips outlier steps, and how the optimizer's state is kept."""

from __future__ import annotations

import dataclasses
from typing import Literal

from maxtext.config.field import field

OptimizerKind = Literal["skip_step_adamw", "adamw", "skip_step_muon", "muon"]
StateDtype = Literal["float32", "bfloat16"]
Offload = Literal["none", "auto", "host"]
MuonScale = Literal["adamw_rms", "aspect"]


@dataclasses.dataclass(frozen=True)
class SkipConfig:
    """When a step's update is skipped as an outlier (facts of SkipStepAdamW)."""

    window: int = field("Past steps whose loss and grad norm give the mean and deviation.", 128,
                        also=("rolling_interval_length",), minimum=2)
    sigma: float = field("A step is skipped beyond the mean plus this many deviations.", 6.0, also=("sigma_factor",),
                         above=0)


@dataclasses.dataclass(frozen=True)
class MuonConfig:
    """Muon for the matrices inside blocks (kinds muon and skip_step_muon); AdamW keeps all else."""

    matrix_lr: float | None = field("Peak learning rate of the matrices, on the same schedule; null: optim.lr.", None,
                                    also=("muon_lr",), above=0)
    matrix_weight_decay: float | None = field("Decoupled weight decay of the matrices; null: optim.weight_decay.", None,
                                              also=("muon_weight_decay",), minimum=0)
    momentum: float = field("Decay of the running mean of gradients that is orthogonalised.", 0.95,
                            also=("muon_momentum", "muon_beta"), minimum=0, maximum=1)
    nesterov: bool = field("Whether the newest gradient counts once more in what is orthogonalised.", True)
    ns_steps: int = field("Newton-Schulz iterations.", 5, also=("muon_ns_steps", "backend_steps"), minimum=1)
    scale: MuonScale = field(
        "Factor of a matrix of `in` by `out`: adamw_rms = 0.2 sqrt(max(in, out)), so that AdamW's rates fit (Liu et "
        "al. 2025); aspect = sqrt(max(1, out / in)), which wants a rate of its own in muon.matrix_lr (Jordan 2024).",
        "adamw_rms", also=("adjust_lr_fn", "muon_scale"))
    dtype: StateDtype = field("Type in which matrices are exchanged between devices and orthogonalised.", "float32")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer."""

    lr: float = field("Peak learning rate.", also=("learning_rate", "max_lr", "peak_lr"), minimum=0)
    kind: OptimizerKind = field("adamw, or muon for the matrices inside blocks and AdamW for all else; with skip_step_ "
                                "before it outlier steps are skipped.", "skip_step_adamw")
    betas: tuple[float, float] = field("Decay of AdamW's first and second moments.", (0.9, 0.95), minimum=0, maximum=1)
    eps: float = field("Added to the square root of the second moment.", 1e-8, also=("adam_eps",), above=0)
    weight_decay: float = field("Decoupled weight decay, scaled by the learning rate.", 0.1, minimum=0)
    no_decay: tuple[str, ...] = field("Parameters without weight decay: glob patterns on their dotted names.",
                                      ("embed",))
    max_grad_norm: float | None = field("Gradients are scaled so that their global L2 norm is at most this; null: off.",
                                        1.0, also=("gradient_clipping_threshold", "clip_grad_norm", "grad_clip"),
                                        above=0)
    skip: SkipConfig = field("Rule of the kinds skip_step_adamw and skip_step_muon.", SkipConfig)
    muon: MuonConfig = field("Rule of the kinds muon and skip_step_muon.", MuonConfig)
    moments_dtype: StateDtype = field(
        "Type in which moments are kept; bfloat16 rounds up or down at random, so that the mean is exact.", "float32",
        also=("mu_dtype", "state_dtype", "optimizer_dtype"))
    offload: Offload = field(
        "Where moments lie between updates: none = on the devices, host = in the hosts' memory, auto = host where the "
        "devices have memory of their own and can reach the host's.", "none",
        also=("offload_optimizer", "optimizer_memory_host_offload"))
    offload_weights: Offload = field(
        "Where the float32 weights lie, likewise; during an update the devices then hold a copy in "
        "train.compute_dtype.", "none", also=("offload_params", "parameter_memory_host_offload"))
    step_increment_bugfix: bool = field("False reproduces the reference's old bias correction, frozen at step 1.", True)

    @property
    def skips(self) -> bool:
        """Whether outlier steps are skipped."""
        return self.kind.startswith("skip_step_")

    @property
    def uses_muon(self) -> bool:
        return self.kind.endswith("muon")
