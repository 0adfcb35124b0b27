"""How the next token is chosen from logits: pure functions of one row, so that no row depends on those beside it.

Dims: V vocabulary, B rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature is applied first, then top_k, then top_p to what top_k left (as in transformers).

    Attributes:
      temperature: 0: always the likeliest token.
      top_k: sample among this many likeliest tokens; None: all.
      top_p: sample among the fewest likeliest tokens that together have this probability (Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no such choice."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} is below 0; give 0 for the likeliest token, or more")
        if math.isinf(self.temperature):
            raise ValueError(f"temperature {self.temperature} leaves nothing of what the model says; give a number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} leaves no token; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is no probability above 0; give at most 1, which leaves all tokens")


def allowed(logits_V: jax.Array, top_k: int | None, top_p: float) -> jax.Array:
    """Which tokens may be drawn, (V,) bool; of equal logits the lower id comes first. The likeliest always may."""
    order_V = jnp.argsort(-logits_V, stable=True)
    sorted_V = logits_V[order_V]
    if top_k is not None:
        sorted_V = jnp.where(jnp.arange(sorted_V.size) < top_k, sorted_V, -jnp.inf)
    kept_V = sorted_V > -jnp.inf
    if top_p < 1:
        probs_V = jax.nn.softmax(sorted_V)
        before_V = jnp.concatenate([jnp.zeros_like(probs_V[:1]), jnp.cumsum(probs_V)[:-1]])
        kept_V &= before_V < top_p
    return kept_V[jnp.argsort(order_V)]


def sample(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id, int32."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    # From the largest down, so that none overflows however low the temperature.
    lowest = float(jnp.finfo(jnp.float32).tiny)
    logits_V = (logits_V - logits_V.max()) / max(sampling.temperature, lowest)
    if sampling.top_k is not None or sampling.top_p < 1:
        logits_V = jnp.where(allowed(logits_V, sampling.top_k, sampling.top_p), logits_V, -jnp.inf)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


def sample_rows(logits_BV: jax.Array, rows_B: jax.Array, step: jax.Array, seed: jax.Array,
                sampling: Sampling) -> jax.Array:
    """A token of each row. What is drawn depends on the seed, the row's own number and the step, and on nothing else.

    Args:
      rows_B: number of each row among all prompts.
      step: which new token it is.
    """
    def one(logits_V: jax.Array, row: jax.Array) -> jax.Array:
        return sample(logits_V, jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), step), sampling)

    return jax.vmap(one)(logits_BV, rows_B)
