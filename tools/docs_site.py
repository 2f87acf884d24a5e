"""What mkdocs builds the site from: README, docs/ and every file of the repository they link to.

The site is laid out as the repository is, with docs/ at its top and README as its first page, so
that the same text can be read in both. A link to a file that is not there, or to a heading that a
page does not have, fails the build (mkdocs.yml). `api_pages.py` generates the pages of docs/api.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# mkdocs runs this file as a hook, with neither folder on the path
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import api_pages  # noqa: E402

CONTENTS = "<!-- contents -->"
# the target of a link or an image, and what follows it: a heading
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def links(path: str) -> list[str]:
    """The files of the repository that a page links to."""
    text = (ROOT / path).read_text()
    folder = os.path.dirname(path)
    return [os.path.normpath(os.path.join(folder, target)) for _, target, _ in LINK.findall(text)]


def page(path: str) -> str:
    """The text of a page, with links from its place on the site."""
    folder = os.path.dirname(path)

    def move(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        target = place(os.path.normpath(os.path.join(folder, target)))
        return before + os.path.relpath(target, os.path.dirname(place(path)) or ".") + after

    moved = LINK.sub(move, (ROOT / path).read_text())
    return moved.replace(CONTENTS, api_pages.contents())


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """mkdocs calls it first. A page of docs/ that mkdocs.yml does not name comes last."""
    assert config.nav is not None
    docs = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    config.nav += [page for page in docs if f"'{page}'" not in str(config.nav)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs calls it with the files of docs/; the theme's own stay."""
    docs = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    found: set[str] = set()
    new = {"README.md"} | docs
    while new:
        found |= new
        pages = [path for path in new if path.endswith(".md")]
        new = {to for path in pages for to in links(path) if (ROOT / to).is_file()} - found
    for file in [f for f in files if f.src_dir == config.docs_dir and not f.is_css()]:
        files.remove(file)
    for path in sorted(found):
        source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
        if path.endswith(".md"):
            source = {"content": page(path)}
        files.append(File.generated(config, place(path), **source))
    for name in api_pages.PAGES:
        files.append(File.generated(config, f"api/{name}.md", content=api_pages.text(name)))
    return files
