"""docs/configs.md from the schema: every key with its type, range, default, meaning and the names it has elsewhere.

`python -m maxtext.config.page` writes the page anew; a test holds it to the schema.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxtext.config.dump import value_text
from maxtext.config.schema import Config

HEAD = """\
# Configs: every key

<!-- written by python -m maxtext.config.page: change maxtext/config/ instead -->

A config is a YAML of the keys below, over its `base:` files and under the `key=value` of the command line. Units
stand in the names or in the sentence; `required` means that there is no default. Names after "Elsewhere" are those of
other tools: an error leads from them to the key here.

    maxtext config list                              # the configs and parts in configs/
    maxtext config show configs/quickstart.yml       # every value of one, and where it came from

"""
COLUMNS = ("key", "type", "default", "meaning")


def page() -> str:
    """The whole page as Markdown."""
    own = [(key, field, kind) for key, field, kind in _fields(Config, "") if not _sections(kind)]
    parts = [f"## Top level\n\n{_table(own)}"]
    for key, field, kind in _fields(Config, ""):
        for section in _sections(kind):
            parts += _section(key, section, field.metadata["doc"], depth=2)
    return HEAD + "\n".join(parts)


def _section(key: str, cls: type, doc: str, depth: int) -> Iterator[str]:
    """The heading, docstring and table of one section, then those of the sections in it."""
    fields = list(_fields(cls, f"{key}."))
    said = " ".join((cls.__doc__ or doc).split())
    yield f"{'#' * depth} {key}\n\n{said}\n\n{_table(fields)}"
    for inner, field, kind in fields:
        for section in _sections(kind):
            yield from _section(_heading(inner, kind), section, field.metadata["doc"], depth=3)


def _fields(cls: type, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name, field, hints[field.name]


def _heading(key: str, kind: Any) -> str:
    """Of the section that a key stands for; a mapping has one for each name."""
    return f"{key}.NAME" if typing.get_origin(kind) is dict else key


def _sections(kind: Any) -> list[type]:
    """The dataclasses that a type is, or is made of."""
    parts = (kind, *typing.get_args(kind))
    return [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]


def _table(fields: list[tuple[str, dataclasses.Field[Any], Any]]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(*field) for field in fields)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows) + "\n"


def _row(key: str, field: dataclasses.Field[Any], kind: Any) -> tuple[str, ...]:
    metadata = field.metadata
    meaning = metadata["doc"]
    if metadata["also"]:
        meaning += f" Elsewhere: {', '.join(f'`{name}`' for name in metadata['also'])}."
    if _sections(kind):
        heading = _heading(key, kind)
        anchor = heading.lower().replace(".", "")
        return f"`{key}`", f"[{'section' if heading == key else 'named sections'}](#{anchor})", "", meaning
    return f"`{key}`", _type(kind, metadata), _default(field), meaning


def _type(kind: Any, limits: Mapping[str, Any]) -> str:
    """`integer, at least 1, or null`."""
    if isinstance(kind, types.UnionType):
        inner = next(part for part in typing.get_args(kind) if part is not types.NoneType)
        return f"{_type(inner, limits)}, or null"
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if items[-1] is Ellipsis:
            return f"list of: {_type(items[0], limits)}"
        return f"[{', '.join(_type(item, {}) for item in items)}]{_range(limits)}"
    if typing.get_origin(kind) is dict:
        return f"names to: {_type(typing.get_args(kind)[1], limits)}"
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    return {str: "text", bool: "true or false", int: "integer", float: "number"}[kind] + _range(limits)


def _range(limits: Mapping[str, Any]) -> str:
    words = (("minimum", "at least"), ("above", "above"), ("maximum", "at most"))
    return "".join(f", {word} {limits[name]}" for name, word in words if limits.get(name) is not None)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{value_text(field.default_factory())}`"
    return "required" if field.default is dataclasses.MISSING else f"`{value_text(field.default)}`"


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[2] / "docs" / "configs.md"
    target.write_text(page())
    print(target)
