"""A hook of mkdocs.yml: files outside docs/ that pages link to become pages of the site.

Pages link to the README, to sources and to configs by relative paths, as a repository browser wants it. On the site
such a path leads to `source/...`: Markdown as a page, all else as text with its colours. So the site needs no address
of a repository, and a link to what does not exist is a warning, which `mkdocs build --strict` refuses.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
log = logging.getLogger("mkdocs.hooks.site")


def repository_path(src_uri: str) -> str:
    """Where a page of the site stands in the repository."""
    outside = src_uri.removeprefix("source/")
    return f"docs/{src_uri}" if outside == src_uri else outside.removesuffix(".page.md")


def site_path(path: str) -> str:
    """Where a file of the repository stands on the site, as mkdocs names sources."""
    inside = path.removeprefix("docs/")
    return inside if inside != path else f"source/{path}.page.md"


def targets(path: str) -> list[str]:
    """The files of the repository that a Markdown file links to."""
    text = (ROOT / path).read_text()
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), found)) for found in LINK.findall(text)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside docs/ to which a path of links leads from a page."""
    waiting, seen = [f"docs/{file.src_uri}" for file in files.documentation_pages()], set()
    while waiting:
        for target in targets(waiting.pop()):
            if target.startswith("docs/") or target in seen:
                continue
            seen.add(target)
            if not (ROOT / target).is_file():
                continue  # mkdocs says that the link leads nowhere
            files.append(File.generated(config, site_path(target), content=_content(target),
                                        inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links that lead out of docs/ to the pages of their targets."""
    path = repository_path(page.file.src_uri)
    if not path.endswith(".md"):
        return markdown  # a source, in which brackets are code

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        return posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(turned, markdown)


def _content(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return NOT_SEARCHED + text
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    return f"{NOT_SEARCHED}# {path}\n\n``````{language}\n{text}\n``````\n"
