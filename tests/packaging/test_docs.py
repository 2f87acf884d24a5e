"""Python snippets run, but for those of a device that is not here; links lead somewhere."""

import re
from pathlib import Path

import docs_tables
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DEVICES = ("gpu", "tpu", "neuron")
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{i}")
    for page in PAGES
    if page.stem not in DEVICES
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(snippet):
    exec(compile(snippet, "docs", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_exist(page):
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (\w[\w-]*)", page.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tests_that_contributing_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) >= 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_generated_tables_are_up_to_date():
    for page in PAGES:
        assert page.read_text() == docs_tables.rendered(page), "run python tools/docs_tables.py"
    marked = [page.name for page in PAGES if docs_tables.MARK.search(page.read_text())]
    assert {"install.md", "index.md"} <= set(marked)


def test_messages_of_the_faq_are_raised():
    """The table of errors quotes parts of messages: each is in the sources."""
    sources = [*ROOT.glob("torch_paged_attn/**/*.py")]
    text = "\n".join(re.sub(r"\{[^{}]*\}", "...", path.read_text()) for path in sources)
    page = (ROOT / "docs" / "faq.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) >= 4
    for message in quoted:
        words = message.removeprefix("expected ").split(" to be ")
        assert all(part in text for part in words), message
