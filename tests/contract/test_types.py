"""Type checkers and editors see every argument: the stubs are the list's, and mypy reads them."""

import re
import subprocess
import sys

import pytest
import stubs

PROGRAM = """
import torch
from torch_paged_attn import blocksparse, flash_varlen
x = torch.ones(1, 1, 8)
cu = torch.tensor([0, 1], dtype=torch.int32)
flash_varlen(x, x, x, cu, causl=True)
flash_varlen(x, x, x, cu, softcap="no")
out, _ = flash_varlen(x, x, x, cu, causal=True, softcap=30, softmax_scale=None, sinks=x)
out, _ = blocksparse(x, x, x, cu[None], cu[None], cu, q_block_size=64, sinks=None)
reveal_type(out)
"""


def test_the_stubs_are_up_to_date():
    # if not: PYTHONPATH=. python tools/stubs.py
    assert stubs.STUBS.read_text() == stubs.stubs()


def test_mypy_refuses_a_misspelt_argument_and_takes_a_right_call(tmp_path):
    """With the project's own settings, whose cache `make lint` has filled."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=stubs.STUBS.parents[2])
    said = {}
    for line in done.stdout.splitlines():
        if found := re.search(r"program.py:(\d+): (?:error|note): (.*)", line):
            said.setdefault(int(found[1]), found[2])
    assert set(said) == {6, 7, 10}, done.stdout + done.stderr
    assert said[6].startswith('Unexpected keyword argument "causl"')
    assert '"softcap"' in said[7] and "Tensor" in said[10]
