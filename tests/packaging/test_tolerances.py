"""What is right is decided in torch_paged_attn/testing alone: no test has a tolerance of its own.

Bits and integers are compared exactly. Numbers that a person computed by hand (tests/reference) and
timings that a test made up (tests/benchmarks) are compared by pytest.approx.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGES = [page for page in sorted(TESTS.rglob("*.py")) if page != Path(__file__)]
TOLERANCE = {"assert_close", "allclose", "isclose", "rtol", "atol", "slack"}
APPROX = ("reference", "benchmarks")
# statistics of random numbers: how far a frequency may be from its expectation
STATISTICS = {"reference/test_attention.py", "reference/test_philox.py"}


def tolerances(source: str) -> set[str]:
    """The tolerances in a page: names of functions and arguments that take one, "approx", and
    "difference" where the size of a difference is compared with a number that is not 0.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "arg", None)}
        found |= names & (TOLERANCE | {"approx"})
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            ordered = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
            if ordered and any(map(_is_difference, sides)) and any(map(_is_fraction, sides)):
                found.add("difference")
    return found


def _is_difference(side: ast.AST) -> bool:
    """Whether an expression takes the absolute value or the norm of a difference."""
    for node in ast.walk(side):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("abs", "norm", "fabs", "dist") and any(
            isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub) for x in ast.walk(node)
        ):
            return True
    return False


def _is_fraction(side: ast.AST) -> bool:
    """Whether an expression has a number that is no integer."""
    return any(
        isinstance(x, ast.Constant) and isinstance(x.value, float) and x.value % 1
        for x in ast.walk(side)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TESTS)))
def test_no_tolerance(page):
    found = tolerances(page.read_text())
    if page.parent.name in APPROX:
        found -= {"approx"}
    if str(page.relative_to(TESTS)) in STATISTICS:
        found -= {"difference"}
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("assert (a - b).abs().max() < 1e-3", {"difference"}),
        ("assert 1e-3 > abs(a - b)", {"difference"}),
        ("assert torch.linalg.norm(a - b) / n <= 0.01", {"difference"}),
        ("torch.testing.assert_close(a, b)", {"assert_close"}),
        ("f(a, b, atol=0)", {"atol"}),
        ("assert a == approx(1)", {"approx"}),
        ("assert (a - b).abs().max() == 0", set()),
        ("assert abs(first - second) <= 1", set()),
        ('"a text that says rtol"', set()),
    ],
)
def test_it_finds_what_it_looks_for(source, found):
    assert tolerances(source) == found
