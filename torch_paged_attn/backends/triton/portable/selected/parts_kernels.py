"""The backward of `selected_attention` for lists of single keys.

A tile of keys that the same tokens name has one key, and products for it would compute mostly
nothing. So a program has a token, as in the forward. It leaves what the token adds to the gradients
of each key of its list as a *part*, in float32; a second kernel adds up the parts of each key in
the order of the tokens, so that the bits are the same every time.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    load_chunks,
    store_chunks,
    zero_chunks,
)
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.portable.common.products import add_chunk_products
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    key_gradients,
    load_rows,
    store_dq,
)
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_keys,
    find_token,
    load_keys,
    load_queries,
)


class Parts(NamedTuple):
    """Memory that the two kernels share."""

    k: Any  # (tokens, num_kv_heads, entries, head_dim) float32
    v: Any  # (tokens, num_kv_heads, entries, head_dim_v) float32
    sum_k: Any  # (total_k, num_kv_heads, head_dim) float32, of the parts before
    sum_v: Any
    # of `InverseLists`
    bounds: Any
    places: Any


@triton.jit
def _part_of(a, b, HIGH: tl.constexpr, IS_PRECISE: tl.constexpr):
    """`a.T @ b`, of rows of b in two chunks."""
    zeros = zero_chunks(a.shape[1], b[0].shape[1], HIGH)
    return add_chunk_products(zeros, tl.trans(a), b, HIGH, IS_PRECISE)


@triton.jit
def _put(ptr, part, at, exists, is_added, LOW: tl.constexpr, HIGH: tl.constexpr,
         DIM: tl.constexpr, ADDS: tl.constexpr):  # fmt: skip
    """Write rows of a part, or add to them what other heads of the same token give."""
    offsets = at * DIM
    if ADDS:
        keep = exists & is_added
        before = load_chunks(ptr, offsets, keep, LOW, HIGH, DIM, True, "RAW", tl.float32)
        part = (part[0] + before[0], part[1] + before[1])
    store_chunks(ptr + offsets, part, exists, LOW, HIGH, DIM, "RAW")


@triton.jit(do_not_specialize=("first_row", *SelectedSizes._fields))
def _selected_parts_kernel(
    pointers, gradients, parts, first_row,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, more_strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq of a token and a KV head's group of heads, and the parts of its list's keys."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1)
    token = find_token(first_row + tl.program_id(0), kv_head, pointers, strides, sizes, OPTIONS)
    first = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * sizes.entries
    for head_tile in tl.range(0, HEAD_TILES):
        queries = load_queries(token, kv_head, head_tile, pointers, strides, OPTIONS)
        q = (queries.low, queries.high)
        rows = load_rows(token, queries, gradients, more_strides, sizes, OPTIONS)
        dq = zero_chunks(BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        for n0 in tl.range(0, token.count, BLOCK_N):
            page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
            k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
            p, ds = key_gradients(queries, rows, k, v, is_seen, pointers, scalars, OPTIONS)
            dq = add_chunk_products(dq, ds, k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
            entry = n0 + tl.arange(0, BLOCK_N)
            exists = entry < token.count
            if parts.k is not None:
                part = _part_of(ds, q, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
                _put(
                    parts.k, part, first + entry, exists, head_tile > 0, OPTIONS.K_LOW,
                    OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, HEAD_TILES > 1,
                )  # fmt: skip
            if parts.v is not None:
                part = _part_of(p.to(ds.dtype), rows.dout, OPTIONS.V_HIGH, OPTIONS.IS_PRECISE)
                _put(
                    parts.v, part, first + entry, exists, head_tile > 0, OPTIONS.V_LOW,
                    OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, HEAD_TILES > 1,
                )  # fmt: skip
        if gradients.dq is not None:
            store_dq(dq, token, queries, head_tile, gradients, scalars, OPTIONS)


@triton.jit
def _add_sum(
    ptr, sum_ptr, factor, own, parts, entries, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Add to a key's row the parts that tokens have left. `own`: entries begin to stop - 1 of an
    inverse list, of `count` tokens from `first_row` on."""
    d = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for i in tl.range(own.begin, own.stop, ENTRIES):
        at = i + tl.arange(0, ENTRIES)
        place = tl.load(parts.places + own.list + at, mask=at < own.stop, other=0)
        token = place // entries - own.first_row
        exists = (at < own.stop) & (token >= 0) & (token < own.count)
        part = (token * own.heads + own.kv_head) * entries + place % entries
        mask = exists[:, None] & (d < DIM)[None, :]
        total += tl.sum(tl.load(ptr + part[:, None] * DIM + d[None, :], mask=mask, other=0.0), 0)
    sum_ptr += own.row * DIM + d
    before = tl.load(sum_ptr, mask=d < DIM, other=0.0)
    tl.store(sum_ptr, before + total * factor, mask=d < DIM)


@triton.jit(
    do_not_specialize=("first_row", "count", "entries", "num_bounds", "num_listed", "own_lists")
)
def _add_parts_kernel(
    parts, first_row, count, entries, num_bounds, num_listed, own_lists, scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a key and a KV head. own_lists: 0 if all KV heads share lists, else 1."""
    key, kv_head = tl.program_id(0), tl.program_id(1)
    group = (kv_head * own_lists).to(tl.int64)
    bounds_ptr = parts.bounds + group * num_bounds + key
    begin, stop = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    if begin < stop:
        own = named("begin stop list first_row count heads kv_head row")(
            begin=begin,
            stop=stop,
            list=group * num_listed,
            first_row=first_row,
            count=count,
            heads=tl.num_programs(1),
            kv_head=kv_head,
            row=key.to(tl.int64) * tl.num_programs(1) + kv_head,
        )
        if parts.k is not None:
            _add_sum(parts.k, parts.sum_k, scale, own, parts, entries, HEAD_DIM, WIDTH, ENTRIES)
        if parts.v is not None:
            _add_sum(parts.v, parts.sum_v, 1.0, own, parts, entries, HEAD_DIM_V, WIDTH_V, ENTRIES)
