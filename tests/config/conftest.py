"""A folder with a good config, for the tests of loading."""

from pathlib import Path

import pytest

from tests.config.files import GOOD


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yml").write_text(GOOD)
    return tmp_path
