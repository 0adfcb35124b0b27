"""YAML files, their bases and command-line overrides to one checked `Config`, with the origin of every value.

A file may name others with `base:` (text or list); they are merged left to right, then the file itself, then the
overrides. Sections and named items merge by key, everything else is replaced. All faults are raised at once.

The overlay is a dict of dotted paths rather than ml_collections' ConfigDict: importing that takes about 0.1 s (three
times what this module takes with PyYAML), and it would hold neither the raw text of a scalar nor where it was written.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from maxtext.config.dump import to_yaml
from maxtext.config.nodes import Items, Mapping, Node, Scalar, parse, shown
from maxtext.config.schema import Config
from maxtext.config.validate import ConfigError, Unknown, problems
from maxtext.config.values import ValueFault, read_value
from maxtext.config.wording import with_key

__all__ = ["CONFIGS", "ConfigError", "find_config", "list_configs", "load", "load_with_origins", "to_yaml"]

CONFIGS = FilePath(__file__).resolve().parents[2] / "configs"
COMMAND_LINE = "command line"
DEFAULT = "default"
_PRESENT = object()  # marks that a named item exists, even when it sets nothing
_UNKNOWN = Unknown()

Path = tuple[str, ...]


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Loads and checks a configuration.

    Args:
      path: a YAML file, or a name inside the configs folder with or without `.yml`.
      overrides: `dotted.key=value` texts, which win over the file.

    Raises:
      ConfigError: with every fault that was found.
    """
    return load_with_origins(path, overrides)[0]


def load_with_origins(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """As `load`; also returns dotted key -> where the value came from: `file:line`, `command line` or `default`."""
    assert not isinstance(overrides, str), "overrides is a sequence of texts"
    file = find_config(path)
    overlay = _Overlay()
    _read_file(file, overlay, (), set())
    for argument in overrides:
        _read_override(argument, overlay)
    name = _display(file)
    cfg, origins = overlay.build(name, file.stem)
    if overlay.complete:  # otherwise values of an unread file are absent, and rules would blame the wrong thing
        overlay.faults += [f"{_place(origins, key, name)}: {with_key(key, text)}" for key, text in problems(cfg)]
    if overlay.faults:
        raise ConfigError(overlay.faults)
    return cfg, origins


def find_config(name: str | os.PathLike[str]) -> FilePath:
    """Finds a configuration by path or by its name in the configs folder. Raises ConfigError with near names."""
    text = os.fspath(name)
    file, tried = _find(text, FilePath())
    if file is None:
        raise ConfigError([f"{text or '(empty name)'}: {tried}; `maxtext config list` shows all"])
    return file


def list_configs(folder: str | os.PathLike[str] = CONFIGS) -> list[tuple[str, str]]:
    """Lists the YAML files directly in `folder` as (name without suffix, their `description`), sorted by name."""
    found = []
    for file in sorted(FilePath(folder).glob("*.yml")):
        root = _parse_file(file, faults := [])
        entry = root.items.get("description") if isinstance(root, Mapping) else None
        node = entry[1] if entry else None
        description = " ".join(node.text.split()) if isinstance(node, Scalar) and not node.is_null else ""
        found.append((file.stem, f"(cannot be read: {faults[0]})" if faults else description))
    return found


@dataclasses.dataclass(frozen=True)
class _Setting:
    value: Any
    where: str


class _Overlay:
    """Settings by path in the order of merging, and all faults so far."""

    def __init__(self) -> None:
        self.settings: dict[Path, _Setting] = {}
        self.faults: list[str] = []
        self.unreadable: set[Path] = set()  # keys and sections whose value is unknown because of a fault
        self.complete = True

    def fault(self, where: str, path: Path, message: str) -> None:
        self.faults.append(f"{where}: {'.'.join(path)}: {message}")
        self.unreadable.add(path)

    def merge(self, cls: Any, mapping: Mapping, path: Path = ()) -> None:
        """Puts a mapping of dataclass `cls` over what is there."""
        hints = _hints(cls)
        for key, (where, node) in mapping.items.items():
            if key in hints:
                self._merge_field(hints[key], cls.__dataclass_fields__[key].metadata, node, (*path, key), where)
            else:
                self._unknown_key(list(hints), node, (*path, key), where)

    def _merge_field(self, kind: Any, limits: typing.Mapping[str, Any], node: Node, path: Path, where: str) -> None:
        section, named = dataclasses.is_dataclass(kind), typing.get_origin(kind) is dict
        if section and isinstance(node, Scalar) and node.is_null and _is_optional(kind):
            for key in [key for key in self.settings if key[:len(path)] == path]:
                del self.settings[key]  # back to its defaults
        elif section and "auto" in _hints(kind) and isinstance(node, Scalar) and node.plain and node.text == "auto":
            for key in [key for key in self.settings if key[:len(path)] == path]:
                del self.settings[key]  # what it chooses replaces all that was set
            self.settings[*path, "auto"] = _Setting(True, where)
        elif (section or named) and not isinstance(node, Mapping):
            keys = ", ".join(_hints(kind)) if section else "its named items"
            word = "auto, or " if section and "auto" in _hints(kind) else ""
            self.fault(where, path, f"{shown(node)} where a section is expected; give {word}a mapping of {keys}")
        elif section:
            assert isinstance(node, Mapping)
            self.merge(kind, node, path)
        elif named:
            assert isinstance(node, Mapping)
            self._merge_named(typing.get_args(kind)[1], node, path)
        else:
            try:
                self.settings[path] = _Setting(read_value(kind, node, limits), where)
            except ValueFault as fault:
                self.settings.pop(path, None)
                self.unreadable.add(path)
                self.faults += [f"{where}: {'.'.join(path)}{suffix}: {message}" for suffix, message in fault.faults]

    def _merge_named(self, cls: Any, mapping: Mapping, path: Path) -> None:
        for name, (where, node) in mapping.items.items():
            here = (*path, name)
            if not name.strip() or any(c in ".=" or c.isspace() or not c.isprintable() for c in name):
                # Such a name could not be written as part of a dotted key.
                self.fault(where, here, "a name is one word without `.` and `=`")
            elif isinstance(node, Mapping):
                self.settings.setdefault(here, _Setting(_PRESENT, where))
                self.merge(cls, node, here)
            elif isinstance(node, Scalar) and node.is_null:
                below = [key for key in self.settings if key[:len(here)] == here]
                if not below:
                    self.fault(where, here, "null removes a named item, but no earlier file has one of this name")
                for key in below:
                    del self.settings[key]
            else:
                self.fault(where, here, f"{shown(node)} where a section is expected; give a mapping of "
                                        f"{', '.join(_hints(cls))}, or null to remove an inherited one")

    def _unknown_key(self, known: list[str], node: Node, path: Path, where: str) -> None:
        from maxtext.config.nearest import ANY, nearest, suggestion  # difflib: only on the way to an error

        section = ".".join(path[:-1])
        while where == COMMAND_LINE and isinstance(node, Mapping) and len(node.items) == 1:
            path, node = (*path, next(iter(node.items))), next(iter(node.items.values()))[1]  # name the argument whole
        if len(path) == 1 and _is_key(tuple(path[0].split("."))):
            first, _, rest = path[0].partition(".")
            self.fault(where, path, f"unknown key; a dotted key is for the command line, in a file write {first}: "
                                    f"{{{rest.replace('.', ': {')}: ...{'}' * (rest.count('.') + 1)}")
            self.unreadable.add(tuple(path[0].split(".")))
            return
        found = nearest(path)
        self.fault(where, path, f"unknown key; {suggestion(found, known, section)}")
        if len(found) == 1 and ANY not in found[0][0]:
            # The one key that was meant has an unknown value now: it is neither missing nor at its default.
            self.unreadable.add(found[0][0])

    def build(self, name: str, run_name: str) -> tuple[Config, dict[str, str]]:
        """Makes the Config; values that could not be read are Unknown. Faults get a line for each missing key."""
        origins: dict[str, str] = {}
        self.settings.setdefault(("run_name",), _Setting(run_name, DEFAULT))
        return self._build(Config, (), name, origins), origins

    def _build(self, cls: Any, path: Path, name: str, origins: dict[str, str]) -> Any:
        hints, values = _hints(cls), {}
        for field in dataclasses.fields(cls):
            here, kind, key = (*path, field.name), hints[field.name], ".".join((*path, field.name))
            if dataclasses.is_dataclass(kind):
                values[field.name] = self._build(kind, here, name, origins)
            elif typing.get_origin(kind) is dict:
                names = [p[-1] for p, s in self.settings.items() if p[:-1] == here and s.value is _PRESENT]
                item = typing.get_args(kind)[1]
                values[field.name] = {n: self._build(item, (*here, n), name, origins) for n in names}
                if not names:
                    origins[key] = DEFAULT
                if here in self.unreadable or any(p[:-1] == here for p in self.unreadable):
                    values[field.name] = _UNKNOWN
            elif here in self.settings:
                values[field.name] = self.settings[here].value
                origins[key] = self.settings[here].where
            elif any(here[:n] in self.unreadable for n in range(1, len(here) + 1)):
                values[field.name] = _UNKNOWN
            elif field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
                origins[key] = DEFAULT
            else:
                values[field.name] = _UNKNOWN
                if self.complete:
                    self.faults.append(f"{name}: {key}: required, but not given ({field.metadata['doc']})")
        return cls(**values)


def _is_optional(section: Any) -> bool:
    """Whether a section needs no key."""
    return all(field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
               for field in dataclasses.fields(section))


def _read_file(file: FilePath, overlay: _Overlay, including: tuple[FilePath, ...], seen: set[FilePath]) -> None:
    """Merges a file after its bases. A file that several bases share is merged once, at its first place."""
    seen.add(file.resolve())
    name, before = _display(file), len(overlay.faults)
    root = _parse_file(file, overlay.faults)
    if not isinstance(root, Mapping):
        if len(overlay.faults) == before:
            place, what = (name, "the file is empty") if root is None else (root.where, shown(root))
            overlay.faults.append(f"{place}: {what}; a config is a mapping of sections such as `model:`")
        overlay.complete = False
        return
    if len(overlay.faults) > before:
        overlay.complete = False  # a doubled key or the like: which of its values holds is unknown
    entries = dict(root.items)
    where, bases = entries.pop("base", ("", Items((), "")))
    for base in _base_names(where, bases, overlay):
        _read_base(base, where, file, overlay, (*including, file), seen)
    overlay.merge(Config, Mapping(entries, root.where))


def _base_names(where: str, node: Node, overlay: _Overlay) -> list[str]:
    items = node.items if isinstance(node, Items) else (node,)
    names = [item.text for item in items if isinstance(item, Scalar) and not item.is_null]
    if len(names) < len(items):
        overlay.faults.append(f"{where}: base: {shown(node)} where a file name or a list of file names is expected")
        overlay.complete = False
    return names


def _read_base(base: str, where: str, file: FilePath, overlay: _Overlay, including: tuple[FilePath, ...],
               seen: set[FilePath]) -> None:
    found, tried = _find(base, file.parent)
    if found is None:
        overlay.faults.append(f"{where}: base: {base}: {tried}")
        overlay.complete = False
    elif found.resolve() in [above.resolve() for above in including]:
        chain = " -> ".join(_display(f) for f in (*including, found))
        overlay.faults.append(f"{where}: base: {base}: a cycle of bases: {chain}")
        overlay.complete = False
    elif found.resolve() not in seen:
        _read_file(found, overlay, including, seen)


def _read_override(argument: str, overlay: _Overlay) -> None:
    key, equals, value = argument.partition("=")
    path, value = tuple(part.strip() for part in key.split(".")), value.strip()
    label = argument.encode("unicode_escape").decode() if not argument.isprintable() else argument
    say = f"{COMMAND_LINE}: {label}: "
    if not equals or not all(path):
        overlay.faults.append(f"{say}not an override; write dotted.key=value, such as optim.lr=3e-4")
        return
    if path == ("base",):
        overlay.faults.append(f"{say}only a file names its bases; give the settings one by one")
        return
    if not value:
        overlay.faults.append(f'{say}no value; write {key.strip()}=null, or {key.strip()}=\'""\' for an empty text')
        overlay.unreadable.add(path)
        return
    node: Node | None = Scalar(value, True, COMMAND_LINE)
    if value[0] in "[{\"'":
        faults: list[str] = []
        node = parse(value, lambda line: COMMAND_LINE, faults)
        overlay.faults += [say + fault.removeprefix(COMMAND_LINE + ": ") for fault in faults]
        if faults or node is None:
            overlay.unreadable.add(path)
            return
    for part in reversed(path):
        node = Mapping({part: (COMMAND_LINE, node)}, COMMAND_LINE)
    assert isinstance(node, Mapping)
    overlay.merge(Config, node)


def _parse_file(file: FilePath, faults: list[str]) -> Node | None:
    name, text = _display(file), _read_text(file, faults)
    return None if text is None else parse(text, lambda line: f"{name}:{line}", faults)


def _read_text(file: FilePath, faults: list[str]) -> str | None:
    try:
        data = file.read_bytes()
    except OSError as error:
        faults.append(f"{_display(file)}: cannot be read: {error.strerror}")
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        faults.append(f"{_display(file)}:{line}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
                      "save the file as UTF-8")
        return None


def _find(name: str, folder: FilePath) -> tuple[FilePath | None, str]:
    """Looks for a config beside `folder`, then in the configs folder; else says what was tried and what is near."""
    roots = (folder, CONFIGS) if name.strip() else ()
    suffixes = ("",) if name.endswith((".yml", ".yaml")) else ("", ".yml")
    candidates = [root / (name + suffix) for root in roots for suffix in suffixes]
    for file in candidates:
        if file.is_file():
            return file, ""
    folders = [file for file in candidates if file.is_dir()]
    if folders:
        here = "" if _display(folders[0]) == name else f"{_display(folders[0])} "
        return None, f"{here}is a folder, not a YAML file"
    import difflib

    known = [file.relative_to(CONFIGS).with_suffix("").as_posix() for file in sorted(CONFIGS.rglob("*.yml"))]
    asked = name.removeprefix("configs/").removesuffix(".yml")
    near = difflib.get_close_matches(asked, known, 1) or [k for k in known if asked and k.rpartition("/")[2] == asked]
    tried = ", ".join(_display(file) for file in candidates)
    return None, f"no such config (looked for {tried})" + (f"; did you mean {near[0]}?" if near else "")


def _display(file: FilePath) -> str:
    """The file as messages name it: relative when it stands under the working folder."""
    absolute = os.path.abspath(file)
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def _place(origins: dict[str, str], key: str, name: str) -> str:
    """Where a cross-field problem points: where the key or something below it was set, else the file."""
    places = [where for k, where in origins.items() if (k == key or k.startswith(key + ".")) and where != DEFAULT]
    return places[0] if places else name


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_key(path: Path) -> bool:
    kind: Any = Config
    for part in path:
        kind = _hints(kind).get(part) if dataclasses.is_dataclass(kind) else None
    return len(path) > 1 and kind is not None
