"""Merging the partial results of split keys, in the splits' order: the same bits every time."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.formats import encode
from torch_paged_attn.backends.triton.softmax import LOG2E, finite_or_zero, with_sink


@triton.jit(do_not_specialize=("total_q", "batch"))
def _combine_kernel(
    parts_ptr,
    part_lse_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    sinks_ptr,
    out_scale_ptr,
    total_q,
    batch,
    num_heads,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program merges one query row of one head, BLOCK_S splits at a time."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.load(plan_ptr + 2 * row + 1)
    if splits == 1:
        return  # written whole
    begin = tl.load(plan_ptr + 2 * row)
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    in_group = head % GROUP_SIZE
    head_tile = head // GROUP_SIZE * HEAD_TILES + in_group // PACK
    tile_row = begin % BLOCK_M + in_group % PACK
    dims = tl.arange(0, WIDTH)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for s0 in tl.range(0, splits, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        number = (begin // BLOCK_M + s).to(tl.int64)
        heads = num_heads // GROUP_SIZE * HEAD_TILES
        part = (number * heads + head_tile) * BLOCK_M + tile_row
        lse = tl.load(part_lse_ptr + part, mask=s < splits, other=float("-inf"))
        holds = lse > float("-inf")
        values = tl.load(
            parts_ptr + (part * HEAD_DIM_V)[:, None] + dims[None, :],
            mask=holds[:, None] & (dims < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = finite_or_zero(m_new)
        weight = tl.exp2((lse - shift) * LOG2E)
        shrink = tl.exp2((m - shift) * LOG2E)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        m = m_new

    if sinks_ptr is not None:
        # padding rows belong to no sequence and have no sink
        is_query = row < tl.load(cu_seqlens_q_ptr + batch)
        sink = tl.load(sinks_ptr + head, mask=is_query, other=float("-inf"))
        m, total, shrink = with_sink(m, total, sink)
        acc = acc * shrink
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
    if out_scale_ptr is not None:
        divisor = divisor * tl.load(out_scale_ptr)
    tl.store(lse_ptr + tl.cast(head, tl.int64) * total_q + row, lse)
    tl.store(
        out_ptr + (row * num_heads + head) * HEAD_DIM_V + dims,
        encode(acc / divisor, out_ptr.dtype.element_ty, OUT_FORMAT),
        mask=dims < HEAD_DIM_V,
    )
