"""Writes the table of families in README.md from what the tests prove.

    python -m tests.convert.table

A cell says yes when the test behind it runs over the tiny models of the family (`tiny_families.NAMES`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from maxtext.config.load import CONFIGS, load
from maxtext.convert import ConvertError, trace
from maxtext.convert.families import FAMILIES, family_for
from tests.convert.tiny_families import NAMES, trace_of

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- families: written by python -m tests.convert.table -->\n", "<!-- families: end -->"
PROOFS = {
    "logits, hidden states, modules": (
        "tests/convert/test_tiny_families.py",
        "test_logits_hidden_states_and_every_part_are_those_of_transformers"),
    "export and import are inverse": ("tests/convert/test_tiny_families.py", "test_export_and_import_are_inverse"),
    "transformers loads the export": (
        "tests/convert/test_transformers.py", "test_every_family_is_exported_as_transformers_wrote_it"),
    "gradients on a mesh": ("tests/model/test_meshes.py", "test_a_family_has_the_numbers_of_one_device"),
    "cached generation": (
        "tests/model/test_families.py",
        "test_a_family_decodes_from_a_cache_to_the_logits_of_the_full_forward_pass"),
}
SETTINGS = ("data.prepared=x", "data.sequence_length=64", "optim.lr=1e-3", "train.steps=1", "train.global_batch=1")

# A test runs over all families when it has one of these: functions that mark some of them, and leave none out.
ALL = ("pytest.mark.parametrize('name', NAMES)", "pytest.mark.parametrize('name', families(",
       "pytest.mark.parametrize(('name', 'kind'), families_on_meshes(")


def proved(source: str, function: str) -> tuple[str, ...]:
    """The tiny models that a test runs over, read from its decorator: some tests cannot be imported without torch."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            if any(ast.unparse(mark).startswith(ALL) for mark in node.decorator_list):
                return NAMES
            raise ValueError(f"{function} does not run over NAMES; say in {__file__} what it proves")
    raise ValueError(f"there is no {function} any more; {__file__} names it")


def tiny_models() -> dict[str, dict[str, int]]:
    """Family -> its tiny models, with how many modules of each are compared."""
    found: dict[str, dict[str, int]] = {name: {} for name in FAMILIES}
    for name in NAMES:
        recorded = trace.load(str(trace_of(name)))
        found[recorded.config["model_type"]][name] = len(recorded.modules)
    return found


def model_parts() -> dict[str | None, list[str]]:
    """Family -> the parts in configs/models that it stands for; None: those that transformers has no class for."""
    found: dict[str | None, list[str]] = {}
    for path in sorted((CONFIGS / "models").glob("*.yml"), key=lambda path: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]):
        try:
            family = family_for(load(path, SETTINGS).model, preferred=path.stem.split("_")[0]).name
        except ConvertError:
            family = None
        found.setdefault(family, []).append(path.stem)
    return found


def rows() -> list[str]:
    tiny, parts = tiny_models(), model_parts()
    columns = {title: proved((ROOT / path).read_text(), function) for title, (path, function) in PROOFS.items()}
    lines = [f"| {' | '.join(['family', 'parts in configs/models', *columns])} |", "|---" * (len(columns) + 2) + "|"]
    for family in FAMILIES:
        cells = ["yes" if tiny[family] and set(tiny[family]) <= set(names) else "no" for names in columns.values()]
        cells[0] += f", {max(tiny[family].values(), default=0)} modules"
        lines.append(f"| `{family}` | {', '.join(parts.get(family, ['-']))} | {' | '.join(cells)} |")
    return [*lines, "", f"Ours, without a class in transformers: {', '.join(parts.get(None, []))}."]


def page(text: str) -> str:
    """README.md with the table made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(rows()) + f"\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(page(readme.read_text()))
