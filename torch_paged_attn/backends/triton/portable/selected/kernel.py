"""`selected_attention`: one program per query token, tile of heads, and split of the list.

With one list for all heads (MLA) a tile of up to 64 heads shares the gathered rows; with a list for
each KV head, the heads of its group. Where tokens are too few to fill the GPU, programs share a
list, and `_merge_selected_kernel` merges their partial results in the order of the list.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import encode
from torch_paged_attn.backends.triton.common.softmax import (
    LOG2E,
    finite_or_zero,
    fold_scores,
    quotient,
    with_sink,
)
from torch_paged_attn.backends.triton.portable.common.gather_scatter import store_rows, zero_chunks
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import add_chunk_products
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_keys,
    find_split,
    find_units,
    list_logits,
    load_keys,
    place_keys,
    range_of_split,
)


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _selected_fwd_kernel(
    pointers, results,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """`results`: out, lse and out_scale; if IS_SPLIT, values, maxima and sums of partial results,
    each with the number of a split first.
    """
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    split, kv_head, head_tile, token, queries = find_split(pointers, strides, sizes, OPTIONS)
    begin, stop = range_of_split(split, token, sizes, OPTIONS)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_chunks(OPTIONS.BLOCK_M, OPTIONS.V_LOW, OPTIONS.V_HIGH)
    # units are found two tiles ahead, and pages one: the compiler would else spend its stages on
    # these loads, and have the keys of one tile at a time on their way
    if OPTIONS.FINDS_AHEAD:
        page, slot, is_seen = find_keys(begin, token, pointers, strides, sizes, scalars, OPTIONS)
        unit = find_units(begin + OPTIONS.BLOCK_N, token, strides, OPTIONS)
    for n0 in tl.range(begin, stop, OPTIONS.BLOCK_N):
        if not OPTIONS.FINDS_AHEAD:
            page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
        k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
        was_seen = is_seen
        if OPTIONS.FINDS_AHEAD:
            n1 = n0 + OPTIONS.BLOCK_N
            page, slot, is_seen = place_keys(n1, unit, token, pointers, sizes, scalars, OPTIONS)
            unit = find_units(n1 + OPTIONS.BLOCK_N, token, strides, OPTIONS)
        s = list_logits(queries, k, v, pointers, scalars, OPTIONS)
        s = tl.where(was_seen[None, :], s, float("-inf"))
        p, m_i, l_i, shrink = fold_scores(
            m_i, l_i, s, LOG2E, OPTIONS.IS_PRECISE, False, IS_FUSED=True
        )
        acc = (acc[0] * shrink[:, None], acc[1] * shrink[:, None])
        p = p.to(type_of(OPTIONS.DTYPE))
        acc = add_chunk_products(acc, p, v, OPTIONS.V_HIGH, OPTIONS.IS_PRECISE)

    OUT_FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    r = head_tile * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    is_stored = r < OPTIONS.GROUP_SIZE
    low, high = acc[0] * queries.v_scale, acc[1] * queries.v_scale
    if OPTIONS.IS_SPLIT:
        at = (split * tl.cast(sizes.total_q, tl.int64) + token.row) * OPTIONS.NUM_HEADS
        at += queries.head
        _store(results.out, at, low, high, is_stored, None, "NATIVE", OPTIONS)
        tl.store(results.lse + at, m_i, mask=is_stored)
        tl.store(results.sums + at, l_i, mask=is_stored)
    else:
        if pointers.sinks is not None:
            # rows of padding belong to no sequence and get no sink
            sink = tl.load(pointers.sinks + queries.head, mask=queries.exists, other=float("-inf"))
            m_i, l_i, shrink = with_sink(m_i, l_i, sink)
            low, high = low * shrink[:, None], high * shrink[:, None]
        divisor = store_lse(m_i, l_i, token, queries, is_stored, results, sizes)
        low = quotient(low, divisor, OPTIONS.IS_PRECISE)
        high = quotient(high, divisor, OPTIONS.IS_PRECISE)
        at = token.row * OPTIONS.NUM_HEADS + queries.head
        _store(results.out, at, low, high, is_stored, results.out_scale, OUT_FORMAT, OPTIONS)


@triton.jit
def store_lse(m_i, l_i, token, queries, is_stored, results, sizes):
    """Write the lse of rows. Returns what their sums of values are divided by."""
    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(divisor))
    lse_ptr = results.lse + queries.head.to(tl.int64) * sizes.total_q + token.row
    tl.store(lse_ptr, lse, mask=is_stored)
    return divisor


@triton.jit
def _store(
    ptr, at, low, high, keep, out_scale, FORMAT: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """Write rows of values, contiguous in memory, whose numbers are `at`."""
    pointers = ptr + at.to(tl.int64) * OPTIONS.HEAD_DIM_V
    STOP: tl.constexpr = OPTIONS.HEAD_DIM_V
    store_rows(pointers, low, keep, 0, OPTIONS.V_LOW, STOP, out_scale, FORMAT)
    if OPTIONS.V_HIGH > 0:
        store_rows(pointers, high, keep, OPTIONS.V_LOW, OPTIONS.V_HIGH, STOP, out_scale, FORMAT)


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _merge_selected_kernel(
    parts, results, sinks, cu_seqlens_q,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    WIDTH: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one token and head, split by split."""
    row = tl.program_id(0).to(tl.int64)  # token and head
    token, head = row // OPTIONS.NUM_HEADS, row % OPTIONS.NUM_HEADS
    dims = tl.arange(0, WIDTH)
    inside = dims < OPTIONS.HEAD_DIM_V
    rows = tl.cast(total_q, tl.int64) * OPTIONS.NUM_HEADS
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for split in tl.range(0, splits):
        at = split * rows + row
        part_m = tl.load(parts.lse + at)
        part = tl.load(parts.out + at * OPTIONS.HEAD_DIM_V + dims, mask=inside, other=0.0)
        m_new = tl.maximum(m, part_m)
        shift = finite_or_zero(m_new)
        weight, shrink = tl.exp2((part_m - shift) * LOG2E), tl.exp2((m - shift) * LOG2E)
        acc = acc * shrink + part * weight
        total = total * shrink + tl.load(parts.sums + at) * weight
        m = m_new
    if sinks is not None:
        last = tl.load(cu_seqlens_q + batch)
        sink = tl.load(sinks + head, mask=token < last, other=float("-inf"))
        m, total, shrink = with_sink(m, total, sink)
        acc = acc * shrink
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(divisor))
    at = head * total_q + token + tl.arange(0, 1)
    tl.store(results.lse + at, lse)
    out = acc / divisor
    if results.out_scale is not None:
        out = out / tl.load(results.out_scale)
    OUT_FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    stored = encode(out, results.out.dtype.element_ty, OUT_FORMAT)
    tl.store(results.out + row * OPTIONS.HEAD_DIM_V + dims, stored, mask=inside)
