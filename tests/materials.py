"""Packages that some tests need and the project does not: weights, tasks, PyTorch, libtpu, data, trackers, the site.

`REAL=1 TORCH=1 TPU=1 DATA=1 TRACKERS=1 DOCS=1 scripts/test.sh` installs them and names them in MAXTEXT_TESTS_NEED; a
test whose package is then missing fails. Elsewhere it is skipped, with a word on what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

NEED = "MAXTEXT_TESTS_NEED"
SWITCH = {"torch": "TORCH=1", "transformers": "TORCH=1", "libtpu": "TPU=1",  # of scripts/test.sh; others: REAL=1
          "mkdocs": "DOCS=1",
          "wandb": "TRACKERS=1", "mlflow": "TRACKERS=1", "chromium": "BROWSER=1",
          **dict.fromkeys(("google_crc32c", "tensorflow_datasets", "datasets", "tiktoken", "ray", "aiohttp"), "DATA=1"),
          **dict.fromkeys(("pydantic", "nbclient", "jsonschema", "kubernetes_validate", "shellcheck", "hadolint"),
                          "LAUNCH=1")}  # pydantic: of Ray Train

OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome", "google-chrome-stable")}


def folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        absent(package)
    return Path(next(iter(spec.submodule_search_locations)))


def imported(package: str) -> ModuleType:
    if importlib.util.find_spec(package) is None:
        absent(package)
    module = importlib.import_module(package)
    if package == "torch":
        module.set_num_threads(1)  # beside other work its threads wait for each other: one is six times as fast then
    return module


def program(name: str) -> str:
    """The path of a program, which may have other names too, and may be one of this environment."""
    for one in (name, *OTHER_NAMES.get(name, ())):
        if found := shutil.which(one) or shutil.which(one, path=Path(sys.executable).parent):
            return found
    absent(name)


def absent(package: str) -> NoReturn:
    """Skips what asks for the package, a whole file where that is imported; fails where it must not be missing."""
    message = f"{package} is not installed: {SWITCH.get(package, 'REAL=1')} scripts/test.sh installs it"
    if package in os.environ.get(NEED, "").split():
        pytest.fail(f"{message}; {NEED} says that it is here")
    pytest.skip(message, allow_module_level=True)
