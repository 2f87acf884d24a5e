"""dQ of its sums (`sums.py`): put in rows, scaled and rounded."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import find_tile, query_span


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
