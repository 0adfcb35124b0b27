"""The site of docs/: it builds without a warning, needs no network to be read, and a fault in a page is a warning."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from pathlib import Path

import pytest

from tests.materials import imported, program

imported("mkdocs")
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
# What a browser fetches to show a page; links that a reader may follow are not among it.
FETCHED = re.compile(r"<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=\"([^\"]+)|<link\b[^>]*?\bhref=\"([^\"]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {one["location"].partition("#")[0] for one in found} == {str(page) for page in pages}


def test_nothing_is_fetched_from_a_network(site: Path):
    fetched = {(path.name, address) for path in site.rglob("*.html")
               for pair in FETCHED.findall(path.read_text()) for address in pair if address}
    assert len(fetched) > 50
    assert [one for one in fetched if "//" in one[1]] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()[^;)]*//", styles) == []


def test_search_works_where_the_site_is_read_from_a_disk(site: Path, tmp_path: Path):
    shown = subprocess.run(
        [program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--virtual-time-budget=10000", "--dump-dom", f"file://{site}/index.html?q=pipeline"],
        capture_output=True, text=True, timeout=120)
    assert re.search(r"[1-9]\d* matching documents", shown.stdout), shown.stderr[-500:]


def test_a_file_outside_the_pages_has_a_page_of_its_own(site: Path):
    assert 'href="source/maxtext/model/decoder.py.page.html"' in (site / "path_of_a_batch.html").read_text()
    assert "read this first" in (site / "source/maxtext/model/decoder.py.page.html").read_text()
    readme = (site / "source/README.md.page.html").read_text()
    assert 'href="../numerics.html"' in readme
    assert 'href="CONTRIBUTING.md.page.html"' in readme


def test_lists_and_code_are_not_taken_for_text(site: Path):
    """Markdown for the site wants four spaces before what belongs to an item; a repository's browser takes two."""
    fault = re.compile(r"<p>(?:maxtext|python|pip) [^<]*|<p>[^<]*\n[-*] [^<]*|<p>\|[^<]*")
    wrong = [(path.name, found) for path in site.glob("*.html") for found in fault.findall(path.read_text())]
    assert wrong == []


@pytest.mark.parametrize(("text", "warning"), [
    ("[a](absent.md)", "a link 'absent.md', but the target"),
    ("[a](../absent.py)", "a link 'source/absent.py.page.md', but the target"),
    ("[a](other.md#absent)", "does not contain an anchor '#absent'"),
    ("[a](/other.md)", "absolute link"),
    (None, "not included in the"),
])
def test_a_fault_in_a_page_ends_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None,
                                          warning: str, monkeypatch: pytest.MonkeyPatch):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Index\n\n{text or ''}\n")
    (docs / "other.md").write_text("# Other\n")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, docs_dir=str(docs), site_dir=str(tmp_path / "site"),
                         nav=["index.md", *(["other.md"] if text else [])], extra_css=[], extra={})
    from scripts import site as hook

    monkeypatch.setattr(hook, "ROOT", tmp_path)
    config["plugins"].events["files"] = [hook.on_files]
    with caplog.at_level(logging.INFO), pytest.raises(Abort):
        build(config)
    assert warning in caplog.text
