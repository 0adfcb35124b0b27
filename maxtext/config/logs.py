"""The `log` and `profile` sections: what is written while training, and for whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from maxtext.config.field import field
from maxtext.config.wording import Problem

if TYPE_CHECKING:
    from maxtext.config.schema import Config

WandbMode = Literal["none", "offline", "online"]


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is written while training."""

    every: int = field("Updates between console lines; metrics.jsonl has every update.", 1, also=("log_interval",),
                       minimum=1)
    csv: bool = field("Write metrics.csv, the table of metrics.jsonl.", True)
    tensorboard: bool = field("Write TensorBoard events.", True)
    wandb: WandbMode = field("Weights & Biases: none; offline = files in the run directory, which `wandb sync` sends; "
                             "or online.", "none", also=("use_wandb", "enable_wandb"))
    wandb_project: str = field("Project of Weights & Biases.", "maxtext")
    mlflow: str | None = field("Tracking URI of MLflow, such as https://HOST or sqlite:///runs/mlflow.db; null: none.",
                               None, also=("mlflow_tracking_uri",))
    mlflow_experiment: str = field("Experiment of MLflow.", "maxtext")
    report: bool = field("Write report.html and loss.png at the end.", True)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Which updates are looked into."""

    steps: tuple[int, int] | None = field(
        "First and last update of a trace for XProf, which the report sums up; null: none.", None,
        also=("profile_steps", "profiler_steps", "skip_first_n_steps_for_profiler"), minimum=1)


def profile_problems(cfg: Config) -> Iterator[Problem]:
    """The updates that are profiled exist, and their order is right."""
    if cfg.profile.steps is None:
        return
    first, last = cfg.profile.steps
    if first > last:
        yield "profile.steps", f"[{first}, {last}] ends before it begins; write [{last}, {first}]"
    elif last > cfg.train.steps:
        yield "profile.steps", (f"[{first}, {last}] goes beyond train.steps {cfg.train.steps}; end it at "
                                f"{cfg.train.steps}, or raise train.steps")
