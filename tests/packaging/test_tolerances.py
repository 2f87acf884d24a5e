"""What is right is decided in torch_paged_attn/testing alone: no test has a tolerance of its own.

Bits and integers are compared exactly. Numbers that a person computed by hand (tests/reference) and
timings that a test made up (tests/benchmarks) are compared by pytest.approx.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGES = [page for page in sorted(TESTS.rglob("*.py")) if page != Path(__file__)]
TOLERANCE = re.compile(r"\b(assert_close|allclose|isclose|rtol|atol|slack)\b")
APPROX = ("reference", "benchmarks")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TESTS)))
def test_no_tolerance(page):
    text = page.read_text()
    assert not TOLERANCE.findall(text)
    if page.parent.name not in APPROX:
        assert "approx(" not in text
