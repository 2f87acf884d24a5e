"""Quick forms of three examples: each compares its own results, and exits with 1 if they differ."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


# embed: embeddings of packed sequences against SDPA's; rollout: bits of a sampler and a trainer;
# indexer: losses and written bytes of selected keys against an eager formula
@pytest.mark.parametrize("name", ["embed", "rollout", "indexer"])
def test_results_agree(name):
    command = [sys.executable, EXAMPLES / f"{name}.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
