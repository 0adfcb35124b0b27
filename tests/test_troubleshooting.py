"""docs/troubleshooting.md quotes what the program says: each message stands in the sources, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxtext.config.load import load

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [row[0] for table in re.findall(r"\| it says \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE)
            for row in re.findall(r"(?m)^\| `(.*?)` \| (.*) \|$", table)]


def texts(source: str) -> Iterator[str]:
    """Every text of a program that is no docstring; what is put into it later is a zero byte."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
             for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in inner:
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield re.sub(r"%[sdg]", "\0", node.value)


def said(message: str, text: str) -> bool:
    """Whether a text of the program can become the message; `...` in it stands for anything."""
    if max(map(len, message.split("..."))) < 8:
        return False  # too little to be told from other messages
    return re.search(".*".join(re.escape(part.strip()) for part in message.split("...")), text, re.DOTALL) is not None


@pytest.fixture(scope="module")
def spoken() -> list[str]:
    return [text for path in sorted((ROOT / "maxtext").rglob("*.py")) for text in texts(path.read_text())]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_program(message: str, spoken: list[str]):
    assert any(said(message, text) for text in spoken)


def test_all_messages_are_read_off_the_page():
    assert len(MESSAGES) == PAGE.count("\n| `") - len(re.findall(r"(?m)^\| `data` on", PAGE)) > 30


def test_the_reader_tells_messages_apart():
    source = "def f(a):\n  'a docstring'\n  raise ValueError(f'{a} is not good; give ' f'{a} more')\nlog('x %s y', 1)"
    assert sorted(texts(source)) == ["\0 is not good; give \0 more", "x \0 y"]
    assert said("... is not good; give ...", "\0 is not good; give \0 more")
    for wrong in ("... is not bad; give ...", "... give ...; is not good", "... is ..."):
        assert not said(wrong, "\0 is not good; give \0 more")


def test_settings_and_verbs_on_the_page_exist():
    for setting in re.findall(r"`((?:train|data|optim|mesh|checkpoint)[\w.]*=[\w./-]+)`", PAGE):
        if "data/mine" not in setting:
            load("olmo3_7b", [setting])
    for key in re.findall(r"`((?:train|data|optim|schedule|checkpoint|guard|model)\.[a-z_.]+)`", PAGE):
        node = load("olmo3_7b")
        for part in key.split("."):
            node = getattr(node, part)
