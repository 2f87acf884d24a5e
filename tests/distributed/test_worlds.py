"""Every case of `*_cases.py`, on two processes and on four."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_paged_attn

HERE = Path(__file__).parent
ROOT = Path(torch_paged_attn.__file__).parents[1]


@pytest.mark.parametrize("size", (2, 4))
def test_all_cases(size):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "worlds.py"), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on {size} processes: all right" in done.stdout
