"""The Neuron backend behind torch_xla: lazy tensors in, lazy tensors out, the caches written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    session = Path(__file__).parent / "neuron_session.py"
    result = subprocess.run([sys.executable, session], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.rpartition("FOUND ")[2])


def test_the_runtime_named_neuron_is_ours(found):
    assert found.pop("backend") == "neuron"


def test_results_are_those_of_the_emulator_bit_by_bit(found):
    same = {name: is_same for name, is_same in found.items() if "/" in name}
    assert len(same) == 7 and all(same.values()), same


def test_caches_hold_what_was_written(found):
    written = {name: is_right for name, is_right in found.items() if name.startswith("cache")}
    assert len(written) == 4 and all(written.values()), written
