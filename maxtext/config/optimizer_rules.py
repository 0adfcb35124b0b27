"""Rules between the fields of `optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from maxtext.config.optimizer import MuonConfig, SkipConfig
from maxtext.config.schema import Config
from maxtext.config.wording import Problem


def _kind(cfg: Config) -> Iterator[Problem]:
    optim = cfg.optim
    if not optim.skips and optim.skip != SkipConfig():
        yield "optim.skip", (f"optim.skip is set, but optim.kind {optim.kind} skips no step; write optim.kind: "
                             f"skip_step_{optim.kind}, or remove optim.skip")
    if not optim.uses_muon and optim.muon != MuonConfig():
        yield "optim.muon", (f"optim.muon is set, but optim.kind is {optim.kind}; write optim.kind: "
                             f"{optim.kind.replace('adamw', 'muon')}, or remove optim.muon")


def _decays(cfg: Config) -> Iterator[Problem]:
    for i, beta in enumerate(cfg.optim.betas):
        if beta == 1:
            yield "optim.betas", f"optim.betas[{i}] is 1, which never takes in a new gradient; it must be below 1"
    if cfg.optim.muon.momentum == 1:
        yield "optim.muon.momentum", "optim.muon.momentum is 1, which never takes in a new gradient; write 0.95"


def _rates(cfg: Config) -> Iterator[Problem]:
    optim = cfg.optim
    if optim.uses_muon and optim.muon.matrix_lr is not None and optim.lr == 0:
        yield "optim.muon.matrix_lr", (f"optim.muon.matrix_lr is {optim.muon.matrix_lr}, but optim.lr is 0, whose "
                                       "schedule both follow; set optim.lr above 0")


OPTIMIZER_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (_kind, _decays, _rates)
