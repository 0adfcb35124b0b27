"""Gives some tests of this folder every transformers folder with what transformers computed beside it."""

from pathlib import Path

import pytest

from tests.convert.folders import HF


def pytest_generate_tests(metafunc):
    if "hf_folder" in metafunc.fixturenames:
        given = metafunc.config.getoption("--hf-folders")
        folders = sorted(path.parent for path in Path(given or HF).glob("*/expected.npz"))
        if given and not folders:
            raise pytest.UsageError(f"--hf-folders {given}: no folder in it has an expected.npz")
        metafunc.parametrize("hf_folder", [pytest.param(folder, id=folder.name) for folder in folders])
