"""The key that was probably meant, searched over the whole schema: paths, leaf names and what other tools call them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from typing import Any

from maxtext.config.schema import Config

Path = tuple[str, ...]
ANY = "<name>"  # stands for the name of one source or held-out set
_LEAST = 0.7  # similarity of names below which a suggestion would mislead
_PLURAL = 0.98  # similarity of a name and its plural: with the right section, nearer than the same name elsewhere
_SAME_SECTION = 0.2  # weight of the section's similarity: it only decides between names that are alike


def nearest(path: Path) -> list[tuple[Path, str | None]]:
    """Finds the keys that an unknown one may stand for.

    Args:
      path: the unknown key with its sections.

    Returns:
      Up to three keys, equally near, as (path, the synonym that matched or None); empty when nothing is near.
    """
    leaf, section = _plain(path[-1]), ".".join(path[:-1])
    scored = []
    for known, names in _keys():
        known = _with_names_of(path, known)
        best, name = max((_alike(leaf, _plain(name)), name) for name in names)
        if best >= _LEAST:
            bonus = _SAME_SECTION * _alike(section, ".".join(known[:-1]))
            scored.append((best + bonus, known, None if name == known[-1] else name))
    top = max((score for score, _, _ in scored), default=0.0)
    return [(known, name) for score, known, name in scored if score > top - 1e-6][:3]


def suggestion(found: list[tuple[Path, str | None]], section_keys: typing.Iterable[str], section: str) -> str:
    """The end of an error: the near misses, or the keys that the section has."""
    if not found:
        return f"{section or 'a config'} has {', '.join(section_keys)}"
    names = [".".join(path) + (f" (also known as {name})" if name else "") for path, name in found]
    return f"did you mean {' or '.join(names)}?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").strip("_ ")


def _alike(a: str, b: str) -> float:
    if a == b or a.rstrip("s") == b.rstrip("s"):
        return 1.0 if a == b else _PLURAL
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def _with_names_of(path: Path, known: Path) -> Path:
    """Puts the names used in `path` where `known` has ANY, as far as the two agree."""
    result = list(known)
    for i, (mine, theirs) in enumerate(zip(path[:-1], known, strict=False)):
        if theirs == ANY:
            result[i] = mine
        elif mine != theirs:
            break
    return tuple(result)


@functools.cache
def _keys() -> tuple[tuple[Path, tuple[str, ...]], ...]:
    """Every key and section as (path, its own name and its synonyms)."""
    found: list[tuple[Path, tuple[str, ...]]] = [(("base",), ("base",))]

    def walk(cls: Any, path: Path) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            here = (*path, field.name)
            found.append((here, (field.name, *field.metadata.get("also", ()))))
            kind = hints[field.name]
            if dataclasses.is_dataclass(kind):
                walk(kind, here)
            elif typing.get_origin(kind) is dict:
                walk(typing.get_args(kind)[1], (*here, ANY))

    walk(Config, ())
    return tuple(found)
