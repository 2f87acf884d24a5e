"""Kernels for chips that are not here: registers stay registers, what is shared fits, and matrix
instructions do the work.

Every chip compiles a tenth of the calls and every call is compiled for one chip; of the backward,
and of arguments that a backend may lack, a few calls for a chip each; of calls that differ in how
their tiles are cut, a third. With `--sample`, those of `SAMPLED`. With the `thorough` profile, all
whose tiles have been fitted. `cross_compile.py` prints what other chips make of them.
"""

import contextlib
import functools
import os
import re

import cross_compile
import fit_tiles
import pytest
from covering import left_out

from torch_paged_attn.testing import EXTENDED, EXTENDED_DIFFERENTIABLE

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

# what CI compiles of the backward: kernels with the most in them, for chips with the least room
FEW = {
    ("sm90", "backward/d128/causal/bf16"),
    ("gfx942", "backward/d128/everything/bf16"),
    ("sm86", "backward/d128/everything/bf16"),
    # of the arguments that a backend may lack
    ("sm90", "deepseek_mla/latent/bf16"),
    ("sm90", "latent/sparse_columns_int4/f16"),
    ("gfx942", "dcp/window_alibi/f32"),
    # of bits that depend on a sequence alone: Hopper's kernel, and the portable one
    ("sm90", "rl/invariant/f16"),
    ("sm80", "rl/invariant/f16"),
    # whose threads wait for other GPUs
    ("sm90", "merge_remote/bf16"),
}
# What `--sample` compiles: one call for a chip or two, each of another kind, and of a kind what
# compiles in seconds. Hopper's own backward is that of test_hopper_backward.py.
SAMPLED = {
    ("sm80", "minilm/packed/f32"),
    ("sm80", "rl/invariant/f16"),
    ("sm86", "nsa/selected_blocks/f16"),
    ("sm90", "d128/decode_invariant/bf16"),
    ("sm90", "deepseek_mla/latent/bf16"),
    ("sm90", "merge_remote/bf16"),
    ("sm100", "d64/decode/bf16"),
    ("sm120", "mla/decode_columns/bf16"),
    ("gfx90a", "d64/decode/kv_int8"),
    ("gfx90a", "reshape_and_cache/quantize_bf16_to_int4"),
    ("gfx942", "backward/d128/everything/bf16"),
    ("gfx942", "dcp/window_alibi/f32"),
    ("gfx950", "d128/decode_many/tokens_int4"),
    ("gfx1100", "d64/mixed/tokens_int8"),
    ("gfx1201", "append_and_attend/rotary_int8"),
}

KINDS = ("causal", "full", "everything", "one_bias")
RDNA = ("gfx1100", "gfx1201")


def is_extended(name):
    """Whether a call has arguments that a backend may lack."""
    return name.removeprefix(cross_compile.BACKWARDS) in EXTENDED | EXTENDED_DIFFERENTIABLE


# backwards that no tile was found for: with the smallest they spill, so they work, slowly, or where
# shared memory does not hold them are refused (docs/design/hopper_backward.md)
UNFITTED = {
    *(
        (arch, f"{width}/{kind}/f32")
        for arch in cross_compile.CHIPS
        if not arch.startswith("gfx9")
        for width in ("d256", "d576")
        for kind in KINDS
    ),
    *((arch, f"d128/{kind}/f32") for arch in RDNA for kind in ("everything", "one_bias")),
    *(
        (arch, f"d576/{kind}/bf16")
        for arch in ("sm80", "sm86", "gfx1100")
        for kind in ("everything", "one_bias")
    ),
}


def is_fitted(arch, name):
    """Whether tiles were found for such a call, or for a backward's, on a chip. TODO: all of them,
    once float32's products over wide heads need fewer registers.
    """
    if not name.startswith(cross_compile.BACKWARDS):
        return arch == "sm90" or not is_extended(name)
    call = name.removeprefix(cross_compile.BACKWARDS)
    return (arch, call) not in UNFITTED


# of few queries a sequence, for which tiles and the stretches of keys are chosen by their number
CUT_OTHERWISE = [x for x in cross_compile.CALLS if re.match(r"d\d+/(decode|guessed|said)_", x)]


def is_sampled(i, j, name):
    """Whether CI compiles call `j` for chip `i`."""
    return (i + j) % 10 == 0 and (name not in CUT_OTHERWISE or CUT_OTHERWISE.index(name) % 3 == 0)


JOBS = [
    (arch, name) if (arch, name) in SAMPLED else left_out(arch, name)
    for i, arch in enumerate(cross_compile.CHIPS)
    for j, name in enumerate(cross_compile.CALLS)
    if (arch, name) in FEW | SAMPLED
    or (
        IS_THOROUGH and is_fitted(arch, name)
        if name.startswith(cross_compile.BACKWARDS) or is_extended(name)
        else IS_THOROUGH or is_sampled(i, j, name)
    )
]


def kin(arch):
    """Chips for which one process may compile: see `cross_compile.workers`."""
    return "NVIDIA" if arch.startswith("sm") else "CDNA" if arch.startswith("gfx9") else arch


@pytest.fixture(scope="session")
def compiler():
    """The process that compiles for a chip and its kin; another one for the next, which takes
    seconds to start.
    """
    with contextlib.ExitStack() as processes:

        @functools.lru_cache(maxsize=1)
        def of_kin(name):
            processes.close()
            return processes.enter_context(cross_compile.workers(1))

        yield lambda arch: of_kin(kin(arch))


@pytest.mark.parametrize("arch, name", JOBS)
def test_compiles(arch, name, compiler):
    kernels = compiler(arch).submit(cross_compile.compile_call, arch, name).result()
    assert kernels
    for kernel in kernels:
        assert not kernel.faults(arch, name), kernel


def test_what_repeats_factors():
    """Four lanes hold four numbers each of a factor of 16, and eight of one of 32."""
    mma = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0}>"
    weights = "tensor<16x16xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = %d}>>"
    values = "tensor<2x32x128xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = %d}>>"
    found = [
        cross_compile.repeated_factors(f"{mma}\n{weights % a}\n{values % b}")
        for a, b in ((4, 4), (8, 8), (8, 16))
    ]
    assert found == [0, 1, 2]


def test_what_is_an_idle_barrier():
    """A barrier is used where something waits for it, or by partitions of warps that take it."""

    def made(name):
        at = f"%{name}_0 = ttg.memdesc_index %{name}[%c0] : !ttg.memdesc<2x1xi64, #shared>"
        room = f"%{name} = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable>"
        return f"{room} loc(#a)\n{at}\nttng.init_barrier %{name}_0, 1 : !ttg.memdesc<1xi64>\n"

    code = f"{made('a')}{made('b')}{made('c')}{made('d')}"
    code += "%words = ttg.local_alloc : () -> !ttg.memdesc<2x1xi32, #shared, #smem, mutable>\n"
    code += "ttng.wait_barrier %a_0, %c0 : !ttg.memdesc<1xi64>\n"
    code += "%at = ttg.memdesc_index %b[%n] : !ttg.memdesc<2x1xi64>\nttng.arrive_barrier %at, 1\n"
    ends = "ttg.warp_specialize(%c)", "ttg.warp_specialize(%c, %d)"
    found = [cross_compile.idle_barriers(f"{code}{end}\npartition0(%d)") for end in ends]
    assert found == [1, 0]


@pytest.fixture(scope="module")
def planner():
    """A process that compiles nothing, so that one does for all chips."""
    with cross_compile.workers(1) as process:
        yield process


@pytest.mark.parametrize("arch", [x if x == "sm90" else left_out(x) for x in cross_compile.CHIPS])
def test_table_entries_compile(arch, planner):
    taken, entries = planner.submit(fit_tiles.entries_of, arch).result()
    assert set(taken) == set(entries)
