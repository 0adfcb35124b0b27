"""A resolved configuration as YAML that loads back to the same Config."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from maxtext.config.schema import Config

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
# Words that some YAML reader takes for something other than text.
_NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_COMMENT_COLUMN = 48


def to_yaml(cfg: Config, origins: Mapping[str, str] | None = None) -> str:
    """Writes the whole tree, defaults included.

    Args:
      cfg: the configuration.
      origins: dotted key -> where its value came from (of `load_with_origins`), written as trailing comments.

    Returns:
      YAML text; `load` of it gives an equal Config.
    """
    lines = []
    for depth, key, text, dotted in _lines(cfg, 0, ""):
        line = f"{'  ' * depth}{key}:{' ' + text if text else ''}"
        origin = (origins or {}).get(dotted)
        if origin:
            line = f"{line:<{_COMMENT_COLUMN}}  # {''.join(c if c.isprintable() else '?' for c in origin)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def changes_to_yaml(cfg: Config) -> str:
    """Writes what differs from the schema's defaults, and what has none: the short form that `repr` shows."""
    return "".join(f"{'  ' * depth}{key}:{' ' + text if text else ''}\n" for depth, key, text in _changed(cfg, 0))


def _changed(section: Any, depth: int) -> Iterator[tuple[int, str, str]]:
    """As `_lines`, without values that are the defaults of their section."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value == default:
            continue
        named = {field.name: value} if dataclasses.is_dataclass(value) else value
        if not isinstance(named, dict) or not all(map(dataclasses.is_dataclass, named.values())):
            yield from ((at, key, text) for at, key, text, _ in _line(field.name, value, depth, ""))
            continue
        below = depth
        if named is value:  # sections under names of the run's own
            yield depth, field.name, ""
            below += 1
        for name, item in named.items():
            inner = list(_changed(item, below + 1))
            yield below, _text(name), "" if inner else "{}"
            yield from inner


def _lines(section: Any, depth: int, path: str) -> Iterator[tuple[int, str, str, str]]:
    """(depth, key, value or nothing for a section, dotted key) of every line."""
    for field in dataclasses.fields(section):
        yield from _line(field.name, getattr(section, field.name), depth, f"{path}{field.name}")


def _line(key: str, value: Any, depth: int, dotted: str) -> Iterator[tuple[int, str, str, str]]:
    if dataclasses.is_dataclass(value):
        yield depth, _text(key), "", dotted
        yield from _lines(value, depth + 1, dotted + ".")
    elif isinstance(value, dict) and value:
        yield depth, _text(key), "", dotted
        for name, item in value.items():
            yield from _line(name, item, depth + 1, f"{dotted}.{name}")
    else:
        yield depth, _text(key), value_text(value), dotted


def value_text(value: Any) -> str:
    """One value as YAML on one line. Raises TypeError for what a config cannot hold."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):  # numpy's too, which print otherwise
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, str | os.PathLike):
        return _text(os.fspath(value))
    if isinstance(value, tuple | list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(str(key))}: {value_text(item)}' for key, item in value.items())}}}"
    raise TypeError(f"{value!r} is of type {type(value).__name__}; give text, a number, a truth value, None, a list "
                    "or a dict")


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    escaped = "".join(f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'
