"""Quick forms of three examples: each compares its own results, and exits with 1 if they differ."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# embed: embeddings of packed sequences against SDPA's; rollout: bits of a sampler and a trainer;
# indexer: losses and written bytes of selected keys against an eager formula
NAMES = ("embed", "rollout", "indexer")

# one after another in one process, whose imports are half of what an example takes
PROGRAM = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))  # an example imports files beside it
for path in sys.argv[1:]:
    sys.argv = [path, "--quick"]
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as done:
        code = done.code or 0
    print(f"{path} ended with {code}", flush=True)
"""


@pytest.fixture(scope="module")
def said():
    paths = [str(EXAMPLES / f"{name}.py") for name in NAMES]
    command = [sys.executable, "-c", PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_results_agree(name, said):
    ended = re.search(rf"{name}\.py ended with (.*)", said)
    assert ended is not None and ended[1] == "0", said[-4000:]
