"""With `PAGED_ATTN_BATCH_INVARIANT=1`, `generate_batch` and a packed forward agree in every bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("invariant_program.py")


def test_log_probabilities_of_sampler_and_trainer():
    env = os.environ | {"PAGED_ATTN_BATCH_INVARIANT": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert found["equal"] == found["total"] == 72
        assert found["distinct"] > 60  # not all the same, as log-probabilities near 0 would be
