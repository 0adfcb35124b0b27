"""Messages speak to people: no `[Errno 2]`, which is what an OSError becomes in a text by itself."""

import ast
from pathlib import Path

import pytest

from maxtext.config.reason import placed, reason

PACKAGE = Path(__file__).resolve().parents[1] / "maxtext"


def raw(source: str) -> list[int]:
    """Lines at which an exception that may be an OSError stands in a message as it is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler) or node.name is None or node.type is None:
            continue
        if "OSError" not in {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}:
            continue
        for inner in (inner for statement in node.body for inner in ast.walk(statement)):
            texts = [inner.value] if isinstance(inner, ast.FormattedValue) else []
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in ("print", "str"):
                texts = inner.args
            found += [text.lineno for text in texts if isinstance(text, ast.Name) and text.id == node.name]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_message_shows_an_os_error_as_it_is(path: Path):
    assert raw(path.read_text()) == []


@pytest.mark.parametrize(("handler", "found"), [
    ("except OSError as e: raise ValueError(f'{e}')", [3]), ("except (KeyError, OSError) as e: print(e)", [3]),
    ("except OSError as e: raise ValueError(f'{reason(e)}')", []), ("except KeyError as e: print(e)", []),
])
def test_the_reader_finds_them(handler: str, found: list[int]):
    assert raw(f"try:\n  pass\n{handler}") == found


def test_reasons(tmp_path: Path):
    with pytest.raises(OSError) as caught:
        (tmp_path / "absent").read_text()
    assert reason(caught.value) == "No such file or directory"
    assert placed(caught.value) == f"{tmp_path / 'absent'}: No such file or directory"
    assert (reason(ValueError("why")), placed(ValueError("why")), reason(EOFError())) == ("why", "why", "EOFError")
    assert (reason(OSError("odd")), placed(OSError("odd"))) == ("odd", "odd")
