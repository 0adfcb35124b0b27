"""Source mixtures: how many instances each file gives, so that the sources have their ratios of a number of tokens.

Source: OLMo-core `data/source_mixture.py` and NumpyFSLDatasetMixture. A file that is taken in part, or several times,
gives its first instances each time (the reference draws a sample of documents, but does not read it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from maxtext.data import DataError


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """One source: `ratio` of the mixture, from files of `n_tokens` tokens; the config's two limits."""

    ratio: float
    n_tokens: Sequence[int]
    max_repetition: float = 1.0
    max_source_fraction: float = 1.0


@dataclasses.dataclass
class Take:
    """One occurrence of a file: `instances` of the `capacity` it has; `fraction` is what rounding down left over."""

    source: str
    file: int
    instances: int
    capacity: int
    fraction: float

    @property
    def full(self) -> bool:
        return self.instances >= self.capacity


def allot(sources: Mapping[str, MixtureSource], tokens: int, length: int, batch: int) -> list[Take]:
    """Occurrences of files in data-set order, each with its number of instances of `length` tokens.

    Args:
      sources: by name, in data-set order.
      tokens: asked for in all; whole batches of `batch` instances are filled up.
      length: T.

    Raises:
      DataError: a source has too few tokens for its ratio under its limits; all such sources, with the arithmetic.
    """
    takes = []
    problems = []
    for name, source in sources.items():
        population = sum(source.n_tokens)
        needed = int(tokens * source.ratio)
        most = int((population * source.max_source_fraction) * source.max_repetition)
        if needed > most:
            problems.append(f"data.sources.{name}: ratio {source.ratio} of data.mixture_tokens {tokens:,} needs "
                            f"{needed:,} tokens, but {population:,} tokens x max_source_fraction "
                            f"{source.max_source_fraction} x max_repetition {source.max_repetition} = {most:,}")
        else:
            takes += [take for share in _passes(needed / population) for take in _take(name, source, share, length)]
    if problems:
        raise DataError("\n".join(problems))
    _round(takes, math.ceil(tokens / (batch * length)) * batch)
    return takes


def _passes(ratio: float) -> list[float]:
    """Shares of each pass: 2.3 is 1.0, 1.0 and what float subtraction leaves, as in the reference."""
    shares = []
    while ratio > 0 or not shares:
        shares.append(min(1.0, ratio))
        ratio -= shares[-1]
    return shares


def _take(name: str, source: MixtureSource, share: float, length: int) -> list[Take]:
    """One pass over the files of a source."""
    takes = []
    for file, n_tokens in enumerate(source.n_tokens):
        wanted = math.ceil(n_tokens * share)
        capacity = n_tokens // length
        instances = min(wanted // length, capacity)
        takes.append(Take(name, file, instances, capacity,
                          wanted % length / length if instances < capacity else 0.0))
    return takes


def _round(takes: Sequence[Take], total: int) -> None:
    """Adds instances where files have more until there are `total`: first the same number to each, then by largest
    remainder (Hamilton's method; the later of equals first)."""
    open_takes = [take for take in takes if not take.full]
    missing = total - sum(take.instances for take in takes)
    if missing <= 0 or not open_takes:
        return
    each = missing // len(open_takes)
    for take in open_takes:
        take.instances += min(each, take.capacity - take.instances)
    missing = total - sum(take.instances for take in takes)
    places = [(take.fraction, place) for place, take in enumerate(takes) if not take.full]
    for _, place in sorted(places, reverse=True)[:missing]:
        takes[place].instances += 1
