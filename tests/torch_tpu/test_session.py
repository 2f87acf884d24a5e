"""Schema, fake, export and lowering on torch_tpu, as far as they go without a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found():
    session = Path(__file__).parent / "session.py"
    result = subprocess.run([sys.executable, session], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.rpartition("FOUND ")[2])


def test_private_use_1_named_tpu_has_the_tpu_backend(found):
    assert found["backend"] == "tpu"


def test_fake_and_export_keep_the_op(found):
    assert found["fake"] == [[8, 32, 128], "tpu:0", [32, 8]]
    assert found["exported"] == ["paged_attn.flash_varlen.default"]


def test_the_call_lowers_to_a_kernel_behind_a_jax_op(found):
    assert found["lowered_to_a_kernel"]
    assert found["jax_op_schema"].count("Tensor x") == 6
    assert found["fake_jax_op"] == [[8, 32, 128], [32, 8]]
