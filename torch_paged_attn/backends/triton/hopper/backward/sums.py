"""How the parts of dQ, which programs of several tiles of keys make, are added up in float32.

A consumer's part are PASS rows of its share of the columns. In memory it lies in fours, as they lie
in a thread's registers, and a later kernel puts them in their places (`_finish_sums_kernel`).

BY_BOX: a consumer leaves its part in shared memory, where a warp of its own has the tensor memory
accelerator add it. A warp stores 512 bytes in a row: rows of the result would meet in the same
banks. BY_LANE: each thread adds its fours to memory; that spares shared memory's bandwidth, and the
memory.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from torch_paged_attn.backends.triton.common.seqlen_info import find_tile, query_span
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.tma import add_box

NONE, BY_BOX, BY_LANE = (gl.constexpr(i) for i in range(3))


@gluon.jit
def _in_fours(part):
    """A consumer's part, four numbers of a thread to a row, in the order (column group, warp, row,
    quad, row half, pair)."""
    ROWS: gl.constexpr = part.shape[0]
    COLUMNS: gl.constexpr = part.shape[1]
    x = gl.reshape(part, [4, 2, 8, COLUMNS // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [ROWS * COLUMNS // 4, 4])


@gluon.jit
def add_registers(part, sums_ptr, tile, INDEX: gl.constexpr):
    """Add a consumer's part to a tile of sums, BY_LANE: (consumer, fours)."""
    x = _in_fours(part)
    FOURS: gl.constexpr = x.shape[0]
    layout: gl.constexpr = x.type.layout
    i = gl.expand_dims(gl.arange(0, FOURS, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
    to = sums_ptr + (tile * 2 + INDEX).to(gl.int64) * (FOURS * 4)
    gl.atomic_add(to + i * 4 + j, x, sem="relaxed")


@gluon.jit
def leave_part(part, n, sums, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Part number n of a consumer on its way out, BY_BOX. `sums` has the slots of all consumers one
    after the other."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    slot = INDEX * OPTIONS.SLOTS + n % OPTIONS.SLOTS
    mbarrier.wait(sums.empty.index(slot), ((n // OPTIONS.SLOTS) & 1) ^ 1)
    x = _in_fours(part)
    seen_as(sums.tiles.index(slot), x.shape, plain).store(x)
    fence_async_shared()
    mbarrier.arrive(sums.full.index(slot), count=1)


@gluon.jit
def add_part(params, sums, n, tile, OPTIONS: gl.constexpr):
    """Have parts number n of all consumers added to a tile of all heads' sums, as the warp that
    does so."""
    SLOTS: gl.constexpr = OPTIONS.SLOTS
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    for i in gl.static_range(CONSUMERS):
        slot = i * SLOTS + n % SLOTS
        mbarrier.wait(sums.full.index(slot), (n // SLOTS) & 1)
        part = sums.tiles.index(slot)
        add_box(params.sums_desc, (tile * CONSUMERS + i) * part.shape[0], part)
    # as many may be on their way as there are slots, less the one that is filled next
    tma.store_wait(CONSUMERS * (SLOTS - 1))
    if n >= SLOTS - 1:
        for i in gl.static_range(CONSUMERS):
            mbarrier.arrive(sums.empty.index(i * SLOTS + (n + 1) % SLOTS), count=1)


@triton.jit(do_not_specialize=("batch", "total_q"))
def _finish_sums_kernel(
    sums_ptr,
    dq_ptr,
    cu_seqlens_q_ptr,
    batch,
    total_q,
    scale,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program finishes the columns of one consumer, of a tile of queries of a head."""
    number, part, head = tl.program_id(0) // 2, tl.program_id(0) % 2, tl.program_id(1)
    tiles = tl.num_programs(0) // 2
    b, place = find_tile(number, cu_seqlens_q_ptr, batch, ROWS, 1)
    start, stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    row = start + place * ROWS + tl.arange(0, ROWS)
    sums_ptr += ((head.to(tl.int64) * tiles + number) * 2 + part) * (ROWS * COLUMNS)
    x = tl.load(sums_ptr + tl.arange(0, ROWS * COLUMNS)) * scale
    x = tl.permute(tl.reshape(x, [COLUMNS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [ROWS, COLUMNS]).to(dq_ptr.dtype.element_ty)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    heads = tl.num_programs(1)
    to = dq_ptr + (row.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    exists = (row < tl.minimum(stop, total_q))[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(to, x, mask=exists)
