"""The TPU's functions on two devices, in a process of their own: JAX counts devices once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_paged_attn

ROOT = Path(torch_paged_attn.__file__).parents[1]


@pytest.mark.device_suite
def test_two_devices():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "two_devices.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "right on 2 devices\n", done.stdout + done.stderr
