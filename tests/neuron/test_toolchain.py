"""Without Neuron's packages the backend imports, and says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import torch_paged_attn

CODE = """
import sys, types
{before}
from torch_paged_attn.backends.neuron import BACKEND
print(BACKEND.unsupported())
"""


def say(before="", emulate="0"):
    path = str(Path(torch_paged_attn.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": path, "PAGED_ATTN_NEURON_EMULATE": emulate}
    code = CODE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_says_where_the_emulator_is():
    assert "tools/ of torch_paged_attn's repository on PYTHONPATH" in say(emulate="1")


def test_says_how_to_get_nki():
    assert "install nki" in say("sys.modules['nki'] = None")


def test_knows_the_old_sdk():
    before = "sys.modules['nki'] = None; "
    before += "sys.modules['neuronxcc'] = sys.modules['neuronxcc.nki'] = types.ModuleType('x')"
    assert "SDK 2.29 or newer" in say(before)


def test_knows_a_stranger_of_the_same_name():
    assert "without nki.jit is installed" in say("sys.modules['nki'] = types.ModuleType('nki')")
