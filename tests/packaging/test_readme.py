"""What the README tells a newcomer to type works, and its tables are those of the results."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_gpu_tables_are_printed_from_the_results():
    command = [sys.executable, "benchmarks/gpu/report.py", "benchmarks/results/cuda/h200.json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    section = README.split("## Measured on a GPU")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 50
    assert set(rows) <= set(printed.splitlines())
