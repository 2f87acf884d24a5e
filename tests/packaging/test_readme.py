"""What the README tells a newcomer to type works, and tables are those of the results."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_examples_run_in_order(monkeypatch):
    """A reader types them one after the other, in the repository's folder."""
    monkeypatch.chdir(ROOT)
    assert len(EXAMPLES) >= 6
    names = {}
    for example in EXAMPLES:
        assert len(example.splitlines()) <= 8
        exec(compile(example, "README.md", "exec"), names)


def test_length():
    """The page is read in a minute; further text belongs to docs/."""
    assert len(README.splitlines()) <= 90


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w[\w-]*)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_exist():
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / link).exists(), link


def test_environment_variables():
    """The table has every variable that the package reads."""
    page = (ROOT / "docs" / "running.md").read_text()
    sources = [*ROOT.glob("torch_paged_attn/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    read = {
        name
        for path in sources
        for name in re.findall(
            r'(?:environ[^\n]*|_flag|getenv)\("(PAGED_ATTN_\w+)', path.read_text()
        )
    }
    assert read == set(re.findall(r"^\| `(PAGED_ATTN_\w+)=", page, re.MULTILINE))


def test_tables_are_those_of_the_results():
    command = [sys.executable, "benchmarks/render.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
