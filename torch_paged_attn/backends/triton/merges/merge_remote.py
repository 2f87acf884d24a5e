"""Partial results of several GPUs are exchanged and merged by one kernel, through symmetric memory.

In memory that all GPUs of a group can write, each rank has a slot for the rows of every other rank,
and a flag for each slot. A program writes its rows of each rank's heads to that rank's slots, sets
the flags there, waits for its own flags, and merges the received rows with its own. Program p of a
GPU waits only for programs p of the others, so that not all programs have to run at the same time.

A flag holds the number of the call, and calls use two sets of slots alternately. A program reuses a
set only after all ranks have set the flags of the call in between, which they do after they have
read the set. So nothing has to be reset, and calls can be replayed from a CUDA graph.

A program that waits too long writes the missing rank to host memory and stops the device with a
trap (on NVIDIA GPUs; on others its rows are NaN).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, encode, stored_format
from torch_paged_attn.backends.triton.common.softmax import LOG2E, finite_or_zero
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# elements of the result that a program merges
BLOCK = 512
WARPS = 4
THREADS = tl.constexpr(32 * WARPS)


class Slots(NamedTuple):
    """The sizes of the symmetric memory: ranks, programs, rows per program, elements per row."""

    ranks: int
    programs: int
    rows: int  # of a program
    dim: int

    @classmethod
    def of(cls, ranks: int, max_rows: int, dim: int) -> "Slots":
        """Slots for a rank that merges up to `max_rows` rows (a token of one head each)."""
        rows = max(1, BLOCK // next_power_of_2(dim))
        return cls(ranks, cdiv(max_rows, rows), rows, dim)

    @property
    def elements(self) -> int:
        """Number of float32 elements of a rank's slots: rows of values, then their softmax_lse."""
        return 2 * self.ranks * self.programs * self.rows * (self.dim + 1)

    @property
    def flags(self) -> int:
        """Number of int32 flags of a rank."""
        return self.ranks * self.programs


@triton.jit
def _lse_of(lse_ptr, slots_ptr, row_of_lse, at_lse, exists, IS_OWN: tl.constexpr):
    if IS_OWN:
        return tl.load(lse_ptr + row_of_lse, mask=exists, other=float("-inf"))
    else:
        # another GPU has written this: bypass this multiprocessor's L1 cache
        return tl.load(slots_ptr + at_lse, mask=exists, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _time(waited, IS_TIMED: tl.constexpr):
    """The GPU's clock in nanoseconds; if Triton cannot read one, the number of polls so far.

    The maximum over threads, so that all threads leave a loop at the same time: otherwise some
    would stop the device before another one has written which rank is missing.
    """
    if IS_TIMED:
        clocks = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;",
            "=l,r",
            [tl.arange(0, THREADS)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        return tl.max(clocks, 0)
    else:
        return waited + 1


@triton.jit
def _do(INSTRUCTION: tl.constexpr, x):
    tl.inline_asm_elementwise(INSTRUCTION, "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _stop(x, IS_TIMED: tl.constexpr):
    """Stop the device with a trap, after this program's stores have become visible to the host."""
    if IS_TIMED:
        _do("{ fence.sc.sys; mov.u32 $0, $1; }", x)
        tl.debug_barrier()
        _do("{ trap; mov.u32 $0, $1; }", x)


class RemoteStrides(NamedTuple):
    """Strides of this rank's part, whose last dimension is contiguous."""

    token: int
    head: int


class RemoteOptions(NamedTuple):
    RANK: int
    PROGRAMS: int
    HEAD_DIM: int
    WIDTH: int  # its next power of two
    ROWS: int
    FORMAT: Any  # how the result is stored
    IS_TIMED: bool


@triton.jit(do_not_specialize=("tokens", "patience"))
def _merge_remote_kernel(
    part,  # its values, softmax_lse
    calls_ptr,
    missing_ptr,
    slots,  # of each rank, as this one sees them
    flags,
    result,  # its values, softmax_lse
    tokens,
    patience,  # nanoseconds, or looks
    heads,  # of one rank
    strides,
    OPTIONS: tl.constexpr,
):
    """tokens and patience are not in a tuple, because Triton would compile for their divisors."""
    out_ptr, lse_ptr = part
    result_ptr, result_lse_ptr = result
    RANK: tl.constexpr = OPTIONS.RANK
    PROGRAMS: tl.constexpr = OPTIONS.PROGRAMS
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    ROWS: tl.constexpr = OPTIONS.ROWS
    FORMAT: tl.constexpr = OPTIONS.FORMAT
    IS_TIMED: tl.constexpr = OPTIONS.IS_TIMED
    RANKS: tl.constexpr = len(slots)
    # softmax_lse follows all values
    BEHIND: tl.constexpr = 2 * RANKS * PROGRAMS * ROWS * HEAD_DIM
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program) + 1
    i = tl.arange(0, ROWS)
    r = program * ROWS + i
    token, head = r // heads, r % heads
    exists = token < tokens
    dims = tl.arange(0, WIDTH)
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]
    within = i[:, None] * HEAD_DIM + dims[None, :]
    row = token.to(tl.int64) * strides.token + head * strides.head
    row_of_lse = head.to(tl.int64) * tokens + token
    turn = (call & 1) * RANKS

    for other in tl.static_range(RANKS):
        if other != RANK:
            slot = ((turn + RANK) * PROGRAMS + program).to(tl.int64) * ROWS
            at = out_ptr + row[:, None] + other * heads * strides.head + dims[None, :]
            x = tl.load(at, mask=inside, other=0.0)
            tl.store(slots[other] + slot * HEAD_DIM + within, x, mask=inside)
            # a rank's heads are `heads` rows of softmax_lse
            lse = tl.load(lse_ptr + row_of_lse + other * heads * tokens, mask=exists, other=0.0)
            tl.store(slots[other] + BEHIND + slot + i, lse, mask=exists)
    # all threads have written their rows before a flag is set
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = flags[other] + RANK * PROGRAMS + program
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    is_late = False
    start = _time(tl.full((), -1, tl.int64), IS_TIMED)
    now = start
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = flags[RANK] + other * PROGRAMS + program
            raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            # the difference is right also when the number of calls wraps around
            while (raised - call < 0) & (now - start < patience):
                raised = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                now = _time(now, IS_TIMED)
            if raised - call < 0:
                is_late = True
                tl.store(missing_ptr, other + 1)
                _stop(raised, IS_TIMED)
    tl.debug_barrier()

    own_lse = row_of_lse + RANK * heads * tokens
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for other in tl.static_range(RANKS):
        slot = ((turn + other) * PROGRAMS + program).to(tl.int64) * ROWS
        at_lse = BEHIND + slot + i
        m = tl.maximum(m, _lse_of(lse_ptr, slots[RANK], own_lse, at_lse, exists, other == RANK))
    shift = finite_or_zero(m)
    total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, WIDTH], tl.float32)
    for other in tl.static_range(RANKS):
        slot = ((turn + other) * PROGRAMS + program).to(tl.int64) * ROWS
        at_lse = BEHIND + slot + i
        lse = _lse_of(lse_ptr, slots[RANK], own_lse, at_lse, exists, other == RANK)
        weight = tl.exp2((lse - shift) * LOG2E)
        total += weight
        # rows of a part that saw no key may contain NaN
        counts = inside & (weight > 0.0)[:, None]
        if other == RANK:
            at = out_ptr + row[:, None] + RANK * heads * strides.head + dims[None, :]
            x = tl.load(at, mask=counts, other=0.0)
        else:
            at = slots[RANK] + slot * HEAD_DIM + within
            x = tl.load(at, mask=counts, other=0.0, cache_modifier=".cg")
        merged += x * weight[:, None]
    divisor = tl.where(total == 0.0, 1.0, total)
    divisor = tl.where(is_late, float("nan"), divisor)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
    tl.store(result_lse_ptr + head.to(tl.int64) * tokens + token, lse, mask=exists)
    at = result_ptr + r.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    stored = encode(merged / divisor[:, None], result_ptr.dtype.element_ty, FORMAT)
    tl.store(at, stored, mask=inside)
    tl.store(calls_ptr + program, call)


def merge_remote(
    out: Tensor,
    lse: Tensor,
    calls: Tensor,
    missing: Tensor,
    slots: list[Tensor],
    flags: list[Tensor],
    *,
    rank: int,
    out_dtype: torch.dtype,
    seconds: float,
) -> tuple[Tensor, Tensor]:
    """The merged results of all ranks' parts, for this rank's heads.

    Args:
        out: `(tokens, num_heads, head_dim_v)` float32, this rank's part, contiguous.
        lse: `(num_heads, tokens)` float32, contiguous.
        calls: `(programs,)` int32, the number of calls of each program, initially 0.
        missing: `(1,)` int32 in pinned host memory, initially 0: the missing rank, plus 1.
        slots: for each rank, `Slots.elements` float32 in symmetric memory.
        flags: for each rank, `Slots.flags` int32 in symmetric memory, initially 0.
        rank: this rank.
        out_dtype: of the result.
        seconds: how long each program waits for the others. If Triton cannot read the GPU's clock,
            a million polls count as a second.
    """
    options = {"rank": rank, "out_dtype": out_dtype, "seconds": seconds}
    tensors = out, lse, calls, missing, *slots, *flags
    return launch_cache.call("merge_remote", _plan, tensors, options)


def _plan(*tensors: Tensor, rank: int, out_dtype: torch.dtype, seconds: float) -> Plan:
    out, _, calls, _, *shared = tensors
    ranks = len(shared) // 2
    tokens, num_heads, dim = out.shape
    heads, programs = num_heads // ranks, len(calls)
    slots = Slots.of(ranks, tokens * heads, dim)
    is_empty = tokens == 0
    target = target_of(out.device)
    is_timed = target.arch.startswith("sm")
    new_out = Allocation((tokens, heads, dim), out_dtype, out.device)
    new_lse = Allocation((heads, tokens), torch.float32, out.device)
    launch = Launch(
        _merge_remote_kernel,
        (slots.programs,),
        tokens=tokens,
        patience=round(seconds * (1e9 if is_timed else 1e6)),
        heads=heads,
        strides=RemoteStrides(out.stride(0), out.stride(1)),
        OPTIONS=RemoteOptions(
            RANK=rank,
            PROGRAMS=programs,
            HEAD_DIM=dim,
            WIDTH=next_power_of_2(dim),
            ROWS=slots.rows,
            FORMAT=stored_format(out_dtype, target),
            IS_TIMED=is_timed,
        ),
        num_warps=WARPS,
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        result, result_lse = new_out(), new_lse()
        if is_empty:
            return result, result_lse
        given = addresses if launch.is_ready else tensors
        part = tuple(given[:2])
        shared = tuple(given[4 : 4 + ranks]), tuple(given[4 + ranks :])
        if launch.is_ready:
            launch.start(part, *given[2:4], *shared, (result.data_ptr(), result_lse.data_ptr()))
        else:
            launch(part, *given[2:4], *shared, (as_stored(result, target)[0], result_lse))
        return result, result_lse

    return run
