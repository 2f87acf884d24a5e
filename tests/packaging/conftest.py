"""The package's command line."""

from pathlib import Path

import pytest

import torch_paged_attn

ROOT = Path(torch_paged_attn.__file__).parents[1]
PROGRAM = """
import runpy, sys
sys.argv[1:] = {options}
runpy.run_module("torch_paged_attn", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def run(programs):
    """Runs `python -m torch_paged_attn` in a process of its own; returns its status, output and
    errors.
    """

    def run(*options, **environment):
        return programs.end(PROGRAM.format(options=[*options]), str(ROOT), **environment)

    return run
