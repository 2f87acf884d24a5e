"""Real text that every machine has: the docstrings and the source of Python's standard library."""

import ast
import itertools
import sysconfig
from pathlib import Path
from typing import NamedTuple

SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data"),  # tables, not text
}


class Passage(NamedTuple):
    """A docstring, and the qualified name of what it documents."""

    name: str
    text: str


def sources():
    """(module name, source text) of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED.intersection(parts):
            name = ".".join(part for part in parts if part != "__init__")
            yield name, path.read_text(encoding="utf-8", errors="replace")


def passages(min_words=5, every=1):
    """Every distinct docstring of `min_words` or more, in every `every`-th module."""
    found = {}
    for module, source in itertools.islice(sources(), 0, None, every):
        for name, text in _docstrings(ast.parse(source), module):
            if len(text.split()) >= min_words:
                found.setdefault(text, Passage(name, text))
    return list(found.values())


def _docstrings(node, name):
    if text := ast.get_docstring(node):
        yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
