"""Which kernel computes what, on which platform, and why.

`auto` takes the fastest that can do the model; a kernel asked for by name is an error where it cannot.
"""

from __future__ import annotations

from typing import NamedTuple

from maxtext.config.schema import Config
from maxtext.kernels import cudnn
from maxtext.kernels.grouped_matmul import default_backend


class KernelError(ValueError):
    """A kernel was asked for that cannot do this model on this platform; the message says what to write instead."""


class Choice(NamedTuple):
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})"


class Problem(NamedTuple):
    """What an attention kernel has to do."""

    dtype: str
    width: int  # of a head
    value_width: int
    documents: bool
    sinks: bool


def problem_of(cfg: Config) -> Problem:
    """The attention of a run's training step."""
    return Problem(cfg.train.compute_dtype, cfg.model.head_width, cfg.model.value_width,
                   documents=cfg.data.document_masking or cfg.data.packs_documents,
                   sinks=cfg.model.attention_sinks)


def choose_attention(wanted: str, platform: str, problem: Problem) -> Choice:
    """The attention kernel.

    Args:
      wanted: `kernels.attention` of the config.
      platform: cpu, tpu, gpu or another.

    Raises:
      KernelError: when `wanted` names a kernel that cannot do it.
    """
    reasons = {"splash": _splash_refusal(platform), "cudnn": _cudnn_refusal(platform, problem), "blocked": None}
    if wanted != "auto":
        if reasons[wanted] is not None:
            raise KernelError(f"kernels.attention={wanted}: {reasons[wanted]}; write kernels.attention=auto, or "
                              "blocked, which runs everywhere")
        return Choice(wanted, "asked for")
    if platform == "tpu":
        return Choice("splash", "the Pallas kernel of TPUs")
    if platform == "gpu":
        refused = reasons["cudnn"]
        return Choice("cudnn", "the fused kernel of NVIDIA GPUs") if refused is None else Choice(
            "blocked", f"no cudnn: {refused}")
    return Choice("blocked", f"plain JAX, for {platform}")


def _splash_refusal(platform: str) -> str | None:
    return None if platform == "tpu" else f"it runs on TPUs, and this is {platform}"


def _cudnn_refusal(platform: str, problem: Problem) -> str | None:
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, and this is {platform}"
    return cudnn.refusal(problem.dtype, problem.width, problem.value_width, problem.documents, problem.sinks)


def choose_grouped_matmul(wanted: str, platform: str) -> Choice:
    """The kernel of the experts' matmuls; `wanted` is `kernels.grouped_matmul` of the config.

    Raises:
      KernelError: when `wanted` names a kernel that the platform does not have.
    """
    if wanted == "megablox" and platform != "tpu":
        raise KernelError(f"kernels.grouped_matmul=megablox: it runs on TPUs, and this is {platform}; write "
                          "kernels.grouped_matmul=auto")
    if wanted != "auto":
        return Choice(wanted, "asked for")
    kind = default_backend(platform)
    reasons = {"blocked": "plain JAX", "megablox": "the Pallas kernel of TPUs", "ragged_dot": "XLA's own"}
    return Choice(kind, reasons[kind])
