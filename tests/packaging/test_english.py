"""The pages a user reads: plain English, no laboratory journal, lines that fit a screen. In code,
the words that readers stumble over most.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *DOCS]
DESIGN = ROOT / "docs" / "design"
KERNELS = ROOT / "torch_paged_attn" / "backends" / "triton"

# words that readers stumble over: the field has a name for the thing, or the sentence is inverted
STUMBLES = {
    "came": "given, was passed, arrived",
    "had better": "should",
    "as far as anybody": "name who knows it",
    "nobody": "name who does not",
    "whoever": "name who does",
    "is told": "gets, reads, receives",
    "are told": "get, read, receive",
    "is said": "state it",
    "guessed tokens?": "draft tokens",
    "dealt( out)?": "distributed",
    "adjoins?": "is contiguous",
    "what it takes": "needs",
    "of its own accord": "by itself",
    "lies (in|at|there|behind|between)": "is in, is at",
    "(not yet|never yet) run": "untested",
    "where it loses": "where it is slower",
}
# what a user's page does not report: when and at which commit something ran, and against which aim
JOURNAL = {
    r"(?<![.\w])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,12}\b": "a commit",
    r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b": "the date of a run",
    r"\bissue \d+": "an issue",
    r"\bbars? (is|was|are|were|of|at|for|\d)|\(bar[ ,:]|\| bar \|": "a bar",
    r"\bthe seed'?s\b": "the first version of the repository",
    r"\bbranch `?h/": "a branch",
}
LONGEST = 130
# in names, comments, docstrings and messages; "came" and "dealt" are names there
IN_CODE = [words for words in STUMBLES if words not in ("came", "dealt( out)?", "what it takes")]
FOLDERS = "torch_paged_attn", "tests", "tools", "examples", "benchmarks"
CODE = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    # the GPU's kernels are compiled anew when a comment moves a line
    if path.name != "test_english.py" and not path.is_relative_to(KERNELS)
]


def prose(page):
    """Lines with their numbers, without code."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("```", "    ")):
            yield number, re.sub(r"`[^`]*`", "", line)


def found(page, patterns):
    for number, line in prose(page):
        for pattern, hint in patterns.items():
            if match := re.search(pattern, line, re.IGNORECASE):
                yield f"{page.name}:{number}: {match[0]!r}: {hint}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_words(page):
    patterns = {rf"\b{words}\b": f"write: {instead}" for words, instead in STUMBLES.items()}
    assert not list(found(page, patterns))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_journal(page):
    assert not list(found(page, JOURNAL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_fit(page):
    assert not [n for n, line in prose(page) if len(line) > LONGEST and not line.startswith("|")]


def test_words_in_code():
    assert len(CODE) > 400
    pattern = re.compile(rf"\b({'|'.join(IN_CODE)})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in CODE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        # names in snake_case are words, too
        if (match := pattern.search(line.replace("_", " ")))
    ]
    assert not found


def test_design_pages_are_short():
    pages = sorted(DESIGN.glob("*.md"))
    assert len(pages) >= 6
    assert all(len(page.read_text().splitlines()) <= 150 for page in pages)


@pytest.mark.parametrize(
    "text", ["tail_mask came.", "Seen at 3f2a91bc.", "On 2026-11-23 it ran.", "Nobody reads it."]
)
def test_the_patterns_match(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    patterns = {rf"\b{words}\b": words for words in STUMBLES} | JOURNAL
    assert list(found(page, patterns))
