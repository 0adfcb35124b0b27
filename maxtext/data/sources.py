"""Finds the files of sources: paths and globs, official mix lists, or a prepared folder."""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maxtext.config.reason import reason
from maxtext.config.schema import Config, SourceConfig
from maxtext.data import DataError
from maxtext.data.manifest import Prepared
from maxtext.data.preflight import raise_problems
from maxtext.data.storage import is_url

MIX_PACKAGE = "olmo_core"  # ai2-olmo-core on the package index


class SourceFile(NamedTuple):
    """A token file, and the label that a mix list gives it ("" elsewhere)."""

    path: str
    label: str = ""


def find_files(cfg: Config, prepared: Prepared | None, training: bool) -> tuple[
        dict[str, list[SourceFile]], dict[str, tuple[str, ...]]]:
    """Training files by source, in data-set order, and held-out files by set.

    Held-out sets are those of eval.sets, else of the prepared folder. Without `training` no source is looked at.

    Raises:
      DataError: all sources and sets that name no files, one a line.
    """
    problems = []
    files: dict[str, list[SourceFile]] = {}
    if training and not cfg.data.sources and prepared is None:
        problems.append("data.sources: is empty; name a source with paths, or give data.prepared")
    for name in (cfg.data.sources or (prepared.train if prepared else {})) if training else ():
        try:
            files[name] = _source_files(name, cfg.data.sources.get(name, SourceConfig()), prepared)
        except DataError as error:
            problems.append(str(error))
    eval_sets: dict[str, tuple[str, ...]] = {}
    for name, eval_set in cfg.eval.sets.items():
        try:
            eval_sets[name] = tuple(_expand(eval_set.paths, "", f"eval.sets.{name}.paths"))
        except DataError as error:
            problems.append(str(error))
    raise_problems(problems)
    if not eval_sets and prepared is not None:
        eval_sets = {name: tuple(file.path for file in group) for name, group in prepared.heldout.items()}
    return files, eval_sets


def read_mix(mix: str, root: str, tokenizer: str) -> list[SourceFile]:
    """The files of a mix list: lines of `label,path`, in the order of the list (OLMo-core `data/mixes`).

    Args:
      mix: a file, or the name of an official list in the installed package ai2-olmo-core, such as
        OLMo-mix-0625-official. The package is found, not imported.
      root: folder or URL that relative paths start from.
      tokenizer: what `{TOKENIZER}` in a path stands for.

    Raises:
      DataError: no such list, or a line of another form; names the line.
    """
    path = Path(mix) if os.path.exists(mix) else _official_mix(mix)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the mix file ({reason(error)})") from error
    files = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            label, comma, file = (part.strip() for part in line.partition(","))
            if not (label and comma and file):
                raise DataError(f"{path}:{number}: expected label,path but found {line!r}")
            files.append(SourceFile(_join(root, file.replace("{TOKENIZER}", tokenizer)), label))
    if not files:
        raise DataError(f"{path}: names no file")
    return files


def _official_mix(name: str) -> Path:
    """The file of an official list."""
    package = importlib.util.find_spec(MIX_PACKAGE)
    folders = [Path(place, "data", "mixes") for place in (package.submodule_search_locations or ())] if package else []
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.txt"))}
    if name.removesuffix(".txt") in known:
        return known[name.removesuffix(".txt")]
    if not folders:
        raise DataError(f"{name}: no such mix file. The official lists come with ai2-olmo-core: install it without its "
                        "dependencies (pip install --no-deps ai2-olmo-core), or give the path of a list")
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
    raise DataError(f"{name}: no such mix file, and no official list in {folders[0]}; {hint}")


def _source_files(name: str, source: SourceConfig, prepared: Prepared | None) -> list[SourceFile]:
    """The files of one source in data-set order: its paths, its mix file, or those of the prepared folder."""
    where = f"data.sources.{name}"
    if source.paths and source.mix is not None:
        raise DataError(f"{where}: give paths or mix, not both")
    if source.paths:
        return [SourceFile(path) for path in _expand(source.paths, source.root, f"{where}.paths")]
    if source.mix is not None:
        return read_mix(source.mix, source.root, source.tokenizer_placeholder)
    if prepared is None:
        raise DataError(f"{where}: gives neither paths nor mix, and there is no data.prepared")
    files = [SourceFile(file.path) for file in prepared.source(name)]
    if not files:
        raise DataError(f"{where}: {prepared.folder} has no training file of it")
    return files


def _expand(paths: Sequence[str], root: str, key: str) -> list[str]:
    """Paths from `root` on, with globs replaced by their matches sorted by name."""
    if not paths:
        raise DataError(f"{key}: is empty")
    files: list[str] = []
    for path in paths:
        full = _join(root, path)
        if not is_url(full) and glob.has_magic(full) and not os.path.exists(full):
            matches = sorted(glob.glob(full, recursive=True))
            if not matches:
                raise DataError(f"{key}: no file matches {full}")
            files += matches
        else:
            files.append(full)
    return files


def _join(root: str, path: str) -> str:
    if not root or is_url(path) or os.path.isabs(path):
        return path
    return f"{root.rstrip('/')}/{path}" if is_url(root) else os.path.join(root, path)
