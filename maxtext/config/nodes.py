"""YAML text as a small tree that keeps what typed reading needs: each scalar's raw text and where each key stands.

PyYAML's composer is used without its YAML 1.1 type guessing (there `1e-5` is text, `on` is true and `010` is eight):
what a scalar means is decided by the declared type of its field, in `values.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import yaml

# The C parser reads a config in about a millisecond; wheels without it carry only the slower one, with the same tree.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")}
NULLS = ("", "~", "null", "Null", "NULL")


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One value as written: `text` without quotes; `plain` when it had none."""

    text: str
    plain: bool
    where: str

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in NULLS


@dataclasses.dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    where: str


@dataclasses.dataclass(frozen=True)
class Mapping:
    """A mapping: key -> (where the key stands, value)."""

    items: dict[str, tuple[str, Node]]
    where: str


Node = Scalar | Items | Mapping


def shown(node: Node) -> str:
    """The value as an error names it, on one line and cut to a readable length."""
    if isinstance(node, Items):
        return f"a list of {len(node.items)}"
    if isinstance(node, Mapping):
        return "a mapping"
    if node.is_null:
        return "null"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in node.text)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if node.plain else f'"{text}"'


def parse(text: str, where: Callable[[int], str], problems: list[str]) -> Node | None:
    """Parses one YAML document.

    Args:
      text: the document.
      where: from a 1-based line to the place that messages and origins show.
      problems: every fault found is appended as one line.

    Returns:
      The tree; None for a document that cannot be used (with a problem) or is empty (without one).
    """
    try:
        root = yaml.compose(text, Loader=_LOADER)
        return None if root is None else _convert(root, "", where, problems, {}, ())
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax(error, text, where))
    except yaml.reader.ReaderError as error:
        at = error.position if isinstance(error.position, int) else 0
        problems.append(f"{where(text.count(chr(10), 0, at) + 1)}: not valid YAML: {error.reason}")
    except RecursionError:
        problems.append(f"{where(1)}: not valid YAML: nested too deeply")
    return None


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Callable[[int], str]) -> str:
    mark = error.problem_mark or error.context_mark
    number = mark.line + 1 if mark else 1
    lines = text.splitlines()
    line = lines[number - 1] if number <= len(lines) else ""
    note = ""
    if "\t" in line[:len(line) - len(line.lstrip())]:
        note = "; this line is indented with a tab: use spaces"
    elif "alias" in f"{error.problem} {error.context}":
        note = "; quote a text that starts with *"
    elif error.context_mark and error.context_mark.line + 1 != number:
        note = f" ({error.context} that starts at line {error.context_mark.line + 1})"
    return f"{where(number)}: not valid YAML: {error.problem}{note}"


def _is_plain(node: yaml.ScalarNode) -> bool:
    return not node.style  # None from PyYAML's own parser, empty from libyaml


def _convert(node: yaml.Node, path: str, where: Callable[[int], str], problems: list[str], done: dict[int, Node],
             above: tuple[int, ...]) -> Node:
    """Converts PyYAML's tree. `done` shares the nodes of aliases, `above` finds an alias inside its own anchor."""
    if id(node) in done:
        return done[id(node)]
    place = where(node.start_mark.line + 1)
    name = path or "the file"
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        _check_tag(node.tag in _SCALAR_TAGS, node, place, name, problems)
        result: Node = Scalar(node.value, _is_plain(node), place)
    elif isinstance(node, yaml.SequenceNode):
        _check_tag(node.tag == _CORE + "seq", node, place, name, problems)
        items = []
        for i, child in enumerate(node.value):
            if _looped(child, above, f"{path}[{i}]", place, problems):
                continue
            items.append(_convert(child, f"{path}[{i}]", where, problems, done, above))
        result = Items(tuple(items), place)
    else:
        assert isinstance(node, yaml.MappingNode)
        _check_tag(node.tag == _CORE + "map", node, place, name, problems)
        result = Mapping(_entries(node, path, where, problems, done, above), place)
    done[id(node)] = result
    return result


def _entries(node: yaml.MappingNode, path: str, where: Callable[[int], str], problems: list[str],
             done: dict[int, Node], above: tuple[int, ...]) -> dict[str, tuple[str, Node]]:
    entries: dict[str, tuple[str, Node]] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{where(line)}: {path or 'the file'}: a key must be a name, not a list or a mapping")
            continue
        child = f"{path}.{key.value}" if path else key.value
        if key.value == "<<" and _is_plain(key):
            problems.append(f"{where(line)}: {child}: merge keys are not read; share settings with `base:`")
        elif key.value in entries:
            problems.append(f"{where(line)}: {child}: given twice; first at {entries[key.value][0]}")
        elif not _looped(value, above, child, where(line), problems):
            entries[key.value] = (where(line), _convert(value, child, where, problems, done, above))
    return entries


def _looped(node: yaml.Node, above: tuple[int, ...], path: str, place: str, problems: list[str]) -> bool:
    if id(node) in above:
        problems.append(f"{place}: {path}: an alias that contains itself")
        return True
    return False


def _check_tag(known: bool, node: yaml.Node, place: str, name: str, problems: list[str]) -> None:
    if not known:
        problems.append(f"{place}: {name}: tag {node.tag.replace(_CORE, '!!')} is not read; write the plain value")
