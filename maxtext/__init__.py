"""maxtext: pre-train decoder-only language models in JAX from one short YAML.

    import maxtext as mt
    cfg = mt.load("quickstart", "train.steps=100")
    run = mt.train(cfg)
    mt.evaluate(run.run_dir)
    mt.generate(run.run_dir, ["def "])

The functions are those of maxtext/api.py, which is imported with the first of them: `import maxtext` alone imports
nothing, and JAX only comes with what computes. The package is layered; imports point downwards only (see
docs/path_of_a_batch.md and tests/test_layers.py).
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxtext.api import evaluate, generate, load, train, weights

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "generate", "load", "train", "weights"]


class VerbPackage(ModuleType):
    """A part of this package that has the name of a function of maxtext/api.py: called, it is that function.

    Whoever imports `maxtext.train.loop` makes `maxtext.train` the part, as Python sets it there; so the part itself has
    to answer to `maxtext.train(cfg)`.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("maxtext.api"), self.__name__.rpartition(".")[2])(*args, **options)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("maxtext.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
