"""Imports go downwards only: each part of maxtext/ may import the parts below it, read from the sources with ast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxtext"

_MODEL = {"config", "parallel", "kernels", "model"}
_DATA = {"config", "parallel", "data"}
_EVAL = _MODEL | _DATA | {"checkpoint", "generate", "eval"}
_TRAIN = _EVAL | {"report", "train"}  # report reads the files that train writes, and knows their format

# Part -> the parts it may import, itself included. What is absent may import anything, inside a function.
EVERYTHING = ("cli", "api")
MAY_IMPORT = {
    "__init__": {"api"},
    "config": {"config"},
    "parallel": {"config", "parallel"},
    "kernels": {"config", "parallel", "kernels"},
    "model": _MODEL,
    "checkpoint": {"config", "parallel", "checkpoint"},
    "data": _DATA,
    "generate": _MODEL | {"generate"},
    "eval": _EVAL,
    "convert": _MODEL | _DATA | {"checkpoint", "convert"},
    "train": _TRAIN,
    "elastic": _TRAIN | {"elastic", "launch"},
    "sweep": _TRAIN | {"sweep"},
    "plan": _TRAIN | {"plan"},
    "compare": _TRAIN | {"compare"},
    "report": {"config", "report"},
    "watch": {"config", "checkpoint", "report", "watch"},  # of checkpoint the lease alone, which needs no jax
    "launch": {"config", "launch"},
}
OTHER_FRAMEWORKS = {"torch", "transformers", "tensorflow", "keras", "torchvision"}


def part_of(module: str) -> str:
    """`maxtext.model.decoder` -> `model`, `maxtext` -> `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, absolute name) of every import below `tree`, those inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            # `from maxtext import model` names a part in its alias.
            found += [(node.lineno, f"{base}.{alias.name}" if base == "maxtext" else base) for alias in node.names]
    return found


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every import in `source` that the table does not allow to `module`."""
    part = part_of(module)
    allowed = MAY_IMPORT.get(part, set())
    wrong = []
    for line, name in imported(ast.parse(source), module, is_package):
        top = name.split(".")[0]
        if top in OTHER_FRAMEWORKS and part != "convert":
            wrong.append(f"{module}:{line}: {top}; only maxtext/convert may import it")
        # What the package itself holds: its version, and what makes a part of it callable.
        is_own = name in ("maxtext", "maxtext.__version__", "maxtext.VerbPackage")
        if top == "maxtext" and not is_own and part not in EVERYTHING and part_of(name) not in allowed:
            wrong.append(f"{module}:{line}: {name}; {part} may import {sorted(allowed)}")
        if part == "config" and top not in {"maxtext", "yaml"} | set(sys.stdlib_module_names):
            wrong.append(f"{module}:{line}: {name}; config needs only the standard library and yaml, to answer at once")
    return wrong


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path):
    module = module_name(path)
    assert part_of(module) in {*MAY_IMPORT, *EVERYTHING}, f"{module}: add its part to MAY_IMPORT"
    assert wrong_imports(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("part", [*EVERYTHING, "__init__"])
def test_the_top_imports_parts_inside_the_function_that_needs_them(part: str):
    """So that `import maxtext`, `--help` and every config error answer without the seconds that importing jax takes."""
    tree = ast.parse((PACKAGE / f"{part}.py").read_text())
    later = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top_level = ast.Module([node for node in tree.body if not isinstance(node, later) and not _for_types(node)], [])
    for line, name in imported(top_level, f"maxtext.{part}", is_package=False):
        quick = name.split(".")[0] in sys.stdlib_module_names or name.startswith("maxtext.config")
        assert quick, f"maxtext/{part}.py:{line}: import {name} inside the function that needs it"


def test_help_answers_without_jax_and_numpy():
    verbs = ["train", "sweep", "launch local", "launch ray", "launch gke", "launch slurm", "plan", "compare", "config",
             "config show", "data", "data prepare", "data tokenize", "data inspect", "data stats", "data overlap",
             "checkpoint", "checkpoint diff", "checkpoint merge", "convert import", "eval", "generate", "report",
             "watch", "runs"]
    code = ("import sys\nfrom maxtext.cli import main\n"
            f"for verb in {verbs}:\n"
            "    try:\n        code = main([*verb.split(), '--help'])\n"
            "    except SystemExit as end:\n        code = end.code\n"
            "    loaded = [name for name in ('jax', 'numpy') if name in sys.modules]\n"
            "    assert not code and not loaded, (verb, code, loaded)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr


def _for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize(
    ("source", "module", "fault"),
    [
        ("from maxtext.train import step", "maxtext.model.decoder", "maxtext.train; model may import"),
        ("def f():\n  import maxtext.data.batch", "maxtext.kernels.attention", "maxtext.data.batch; kernels may"),
        ("from maxtext import convert", "maxtext.train.loop", "maxtext.convert; train may import"),
        ("from ..model import decoder", "maxtext.data.batch", "maxtext.model; data may import"),
        ("import torch.nn", "maxtext.eval.perplexity", "torch; only maxtext/convert"),
        ("import jax", "maxtext.config.load", "jax; config needs only"),
        ("from maxtext.config import schema", "maxtext", "maxtext.config; __init__ may import ['api']"),
    ],
)
def test_the_reader_finds_each_kind_of_fault(source: str, module: str, fault: str):
    assert len(found := wrong_imports(source, module)) == 1
    assert fault in found[0]


def test_the_reader_accepts_what_the_table_allows():
    assert wrong_imports("from . import schema\nimport dataclasses, yaml", "maxtext.config.load") == []
    assert wrong_imports("from .decoder import Decoder", "maxtext.model", is_package=True) == []
    assert wrong_imports("def f():\n  import torch", "maxtext.convert.parity") == []
    assert wrong_imports("from maxtext import train, convert", "maxtext.cli") == []
    assert wrong_imports("import maxtext\nfrom maxtext import __version__", "maxtext.checkpoint.manager") == []
