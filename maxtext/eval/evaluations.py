"""All that a run evaluates: held-out perplexity and downstream tasks, as one dict of metrics."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from maxtext.config.schema import Config
from maxtext.data.tokens import ResolvedData
from maxtext.eval.downstream import Downstream
from maxtext.eval.perplexity import Perplexity
from maxtext.model.decoder import Decoder


class Evaluations:
    """Evaluates weights. What is wrong with sets, tasks or tokenizer is raised when it is made, before any update."""

    def __init__(self, cfg: Config, data: ResolvedData | None, mesh: Mesh) -> None:
        """Raises DataError for held-out sets and tokenizers, TaskError for tasks. `data` None: tasks only."""
        self._parts: list[Callable[[Decoder], dict[str, float]]] = []
        if data is not None and data.eval_sets:
            self._parts.append(Perplexity(cfg, data, mesh))
        if cfg.eval.tasks:
            self._parts.append(Downstream(cfg, None if data is None else data.tokenizer, mesh))

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self._parts)

    def __call__(self, params: Decoder) -> dict[str, float]:
        """All metrics under OLMo-core's names (`eval/lm/...`, `eval/downstream/...`)."""
        metrics: dict[str, float] = {}
        for part in self._parts:
            metrics |= part(params)
        return metrics
