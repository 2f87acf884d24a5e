"""A process finds in Triton's cache what another one compiled, whatever either ran before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernel_keys.py")


@pytest.fixture(scope="module")
def keys_by_order():
    """What two processes print, which take the kernels in opposite orders; neither interprets."""
    rest = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    commands = [[sys.executable, str(SCRIPT)], [sys.executable, str(SCRIPT), "reversed"]]
    running = [subprocess.Popen(c, env=rest, stdout=subprocess.PIPE, text=True) for c in commands]
    return [json.loads(process.communicate()[0]) for process in running]


@pytest.mark.device_suite
def test_keys_do_not_depend_on_the_order_of_kernels(keys_by_order):
    first, second = (found["keys"] for found in keys_by_order)
    assert (
        "torch_paged_attn.backends.triton.hopper.forward.kernel._hopper_attention_fwd_kernel"
        in first
    )
    assert first == second


@pytest.mark.device_suite
def test_a_constant_has_one_value_in_the_modules_of_a_kernel(keys_by_order):
    assert keys_by_order[0]["clashes"] == []
