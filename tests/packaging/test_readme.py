"""What the README tells a newcomer to type works."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})


def test_the_commands_exist():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"`?make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
