"""Kernels for chips that are not here: registers stay registers, what is shared fits, and matrix
instructions do the work.

Every chip compiles a tenth of the calls and every call is compiled for one chip; of the backward,
and of arguments that a backend may lack, a few calls for a chip each. With the `thorough` profile,
all of them, of those few those whose tiles have been fitted. `cross_compile.py` prints what other
chips make of them.
"""

import contextlib
import functools
import os

import cross_compile
import fit_tiles
import pytest

from torch_paged_attn.testing import EXTENDED, EXTENDED_DIFFERENTIABLE

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

# what CI compiles of the backward: kernels with the most in them, for chips with the least room
FEW = {
    ("sm90", "backward/d128/causal/bf16"),
    ("gfx942", "backward/d128/everything/bf16"),
    ("sm86", "backward/d128/everything/bf16"),
    # of the arguments that a backend may lack
    ("sm90", "deepseek_mla/latent/bf16"),
    ("gfx942", "dcp/window_alibi/f32"),
    ("sm90", "rl/invariant/f16"),
}


def is_extended(name):
    """Whether a call has arguments that a backend may lack."""
    return name.removeprefix(cross_compile.BACKWARDS) in EXTENDED | EXTENDED_DIFFERENTIABLE


def is_fitted(arch, name):
    """Whether somebody looked at the tiles of such a call, or of a backward's, on a chip. TODO: all
    of them, once `fit_tiles.py` has been run for what the tables leave to the rule of thumb.
    """
    if is_extended(name) and not name.startswith(cross_compile.BACKWARDS):
        return arch == "sm90"
    _, width, kind, dtype = name.split("/") if name.count("/") == 3 else ("", "", "", "")
    if arch == "sm90":
        return dtype == "bf16"
    return arch != "gfx1100" and (width, dtype) == ("d128", "bf16") and kind != "one_bias"


JOBS = [
    (arch, name)
    for i, arch in enumerate(cross_compile.CHIPS)
    for j, name in enumerate(cross_compile.CALLS)
    if (
        (arch, name) in FEW or (IS_THOROUGH and is_fitted(arch, name))
        if name.startswith(cross_compile.BACKWARDS) or is_extended(name)
        else IS_THOROUGH or (i + j) % 10 == 0
    )
]


@pytest.fixture(scope="session")
def compiler():
    """The process that compiles for a chip; another one for the next chip."""
    with contextlib.ExitStack() as processes:

        @functools.lru_cache(maxsize=1)
        def of_chip(arch):
            processes.close()
            return processes.enter_context(cross_compile.workers(1))

        yield of_chip


@pytest.mark.parametrize("arch, name", JOBS)
def test_compiles(arch, name, compiler):
    kernels = compiler(arch).submit(cross_compile.compile_call, arch, name).result()
    assert kernels
    for kernel in kernels:
        assert not kernel.faults(arch, name), kernel


@pytest.mark.parametrize("arch", cross_compile.CHIPS)
def test_table_entries_compile(arch):
    with cross_compile.workers(1) as pool:
        taken, entries = pool.submit(fit_tiles.entries_of, arch).result()
    assert set(taken) == set(entries)
