"""Every case of `*_cases.py`, on two processes and on four."""

import os
import subprocess
import sys
from pathlib import Path

import torch_paged_attn

HERE = Path(__file__).parent
ROOT = Path(torch_paged_attn.__file__).parents[1]


SIZES = (2, 4)


def test_all_cases():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "worlds.py"), ",".join(map(str, SIZES))]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for size in SIZES:
        assert f"on {size} processes: all right" in done.stdout
