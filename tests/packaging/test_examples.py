"""The quick form of an example that `make run` starts: its exit status is 1 if embeddings differ
from those by SDPA.
"""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_embeddings_of_packed_sequences_agree():
    command = [sys.executable, EXAMPLES / "embed.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
