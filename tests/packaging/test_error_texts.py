"""Errors have one form: `function(): expected argument to be this, got that` (ops/checks.py)."""

import ast
import re
from pathlib import Path

import pytest

import torch_paged_attn
from torch_paged_attn.ops import checks

PACKAGE = Path(torch_paged_attn.__file__).parent
# words of the old form, and verbs where a noun belongs
OLD = re.compile(r"\bcame\b|; allowed|allowed:")
VERB = re.compile(r"(is|has|have|came|was|came with) ")


def texts(node):
    """The beginnings of a text: a constant, or the first part of an f-string."""
    for x in ast.walk(node):
        if isinstance(x, ast.Constant) and isinstance(x.value, str):
            yield x.value


def faults(source):
    """The texts in a page that are not of the form."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            found += [text for text in texts(node.exc) if OLD.search(text)]
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name not in ("fail", "refuse", "_refuse"):
                continue
            found += [text for arg in node.args for text in texts(arg) if OLD.search(text)]
            for arg in node.args[-3:] if name == "fail" else ():
                first = arg.values[0] if isinstance(arg, ast.JoinedStr) and arg.values else arg
                if isinstance(first, ast.Constant) and VERB.match(str(first.value)):
                    found.append(first.value)
    return found


@pytest.mark.parametrize("page", sorted(PACKAGE.rglob("*.py")), ids=lambda x: x.stem)
def test_errors_have_one_form(page):
    assert not faults(page.read_text())


def test_it_finds_the_old_form():
    assert faults('fail(op, "q", "is 3", "at least 4")') == ["is 3"]
    assert faults('fail(op, "q", f"has shape {x}", "(3,)")') == ["has shape "]
    assert faults('raise ValueError(f"{x} came; allowed: none")')
    assert not faults('fail(op, "q", f"shape {x}", "(3,)")')


def test_the_form():
    with pytest.raises(TypeError, match=r"^f\(\): expected q to be int32, got int64$"):
        checks.fail("f", "q", "int64", "int32", TypeError)
    with pytest.raises(NotImplementedError, match=r"^f\(\): no gradient: call g$"):
        checks.refuse("f", "no gradient", "call g")
    with pytest.raises(NotImplementedError, match=r"^f\(\): no gradient$"):
        checks.refuse("f", "no gradient")
