"""Partitions of a program's warps: consumers come first, then the warps that serve them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def warps_of(warpgroups, others=0):
    """Warps of each partition but the first: of so many partitions that are a warpgroup each, then
    of `others` that are a warp."""
    return [4] * (warpgroups - 1) + [1] * others


@gluon.constexpr_function
def registers_of(consumers, of_consumer, others=4, converters=(), programs=1):
    """Registers of a thread, for each partition but the first: of the other consumers, of each
    partition that converts, and of the `others`, which together are a warpgroup and get what is
    left. A multiple of eight each, and at most 512 for one thread of each warpgroup together of all
    programs that share a multiprocessor."""
    groups = consumers + len(converters) + 1
    left = 512 // (programs * groups) // 8 * 8 * groups
    left -= consumers * of_consumer + sum(converters)
    return [of_consumer] * (consumers - 1) + list(converters) + [left] * others


@gluon.jit
def _run_one(RUN: gl.constexpr, given, NUMBER: gl.constexpr):
    RUN(*given, NUMBER)


@gluon.jit
def run_partitions(RUN: gl.constexpr, given, WARPS: gl.constexpr, REGISTERS: gl.constexpr):
    """Have each partition i run RUN(*given, i). WARPS and REGISTERS: warps, and registers of a
    thread, of each partition but the first, which has the warps of the launch."""
    gl.warp_specialize(
        [(_run_one, (RUN, given, i)) for i in (0, 1, 2, 3, 4, 5, 6)[: len(WARPS) + 1]],
        WARPS,
        REGISTERS,
    )
