"""The backward of `selected_attention` for lists of single keys.

A tile of keys that the same tokens name has one key, and products for it would compute mostly
nothing. So a program has a token, as in the forward. It leaves what the token adds to the gradients
of each key of its list as a *part*; a second kernel adds up the parts of each key in the order of
the tokens, so that the bits are the same every time. Parts lie in that order (`ranks.py`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import encode
from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_rows, zero_chunks
from torch_paged_attn.backends.triton.portable.common.named import named, type_of
from torch_paged_attn.backends.triton.portable.common.products import (
    add_chunk_products,
    add_product,
)
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    gradients_by_key,
    load_row_gradients,
    store_dq,
)
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_token,
    find_units,
    load_keys,
    load_queries,
    place_keys,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import (
    load_part,
    part_width,
    put_part,
)
from torch_paged_attn.backends.triton.portable.selected.ranks import places_of


class Parts(NamedTuple):
    """Memory that the two kernels share. Parts lie in the order of `ranks`; if KV heads share
    lists, one KV head after the other."""

    k: Any  # (entries, head_dim) float32 or float16
    v: Any  # (entries, head_dim_v)
    scale_k: Any  # (entries, scales of a row) float32, of rows in float16
    scale_v: Any
    ranks: Any


class PartSums(NamedTuple):
    """Sums of parts, and where they go: `(total_k, num_kv_heads, ...)`."""

    k: Any
    v: Any
    # float32 sums of the tokens before; None if there are none
    before_k: Any
    before_v: Any


@triton.jit
def _leave_parts(
    a, x, rows, to, at, is_seen, is_added, DIM: tl.constexpr, ADDS: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Parts `a @ x`. a: (BLOCK_N, BLOCK_M); x: queries or dout in two chunks. rows: where
    they are, and which exist: wide ones are read again, so that no part fills the registers. to:
    parts and their scales."""
    rows_ptr, offsets, exists = rows
    WIDTH: tl.constexpr = part_width(DIM, x[0].shape[1])
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    zeros = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for start in tl.static_range(0, DIM, WIDTH):
        if DIM <= WIDTH and x[0].shape[1] == WIDTH:
            columns = x[0]
        else:
            columns = load_rows(
                rows_ptr, offsets, exists, start, WIDTH, DIM, True, Q_FORMAT,
                type_of(OPTIONS.DTYPE),
            )  # fmt: skip
        part = add_product(zeros, a, columns, OPTIONS.IS_PRECISE)
        put_part(to[0], to[1], part, at, is_seen, is_added, start, DIM, ADDS)


@triton.jit(do_not_specialize=("first_row", "num_words", "each_head", *SelectedSizes._fields))
def _selected_parts_kernel(
    pointers, gradients, parts, first_row, num_words, each_head,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, more_strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq of a token and a KV head's group of heads, and the parts of its list's keys. each_head:
    parts of a KV head, if KV heads share lists; else 0."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    local, kv_head = tl.program_id(0), tl.program_id(1)
    # of strides, index_group is 0 if all KV heads share a list
    group = tl.where(strides.index_group == 0, 0, kv_head).to(tl.int64)
    token = find_token(first_row + local, kv_head, pointers, strides, sizes, OPTIONS)
    first = kv_head.to(tl.int64) * each_head
    for head_tile in tl.range(0, HEAD_TILES):
        queries = load_queries(token, kv_head, head_tile, pointers, strides, OPTIONS)
        q = (queries.low, queries.high)
        rows = load_row_gradients(token, queries, gradients, more_strides, sizes, OPTIONS)
        q_offsets = token.row * strides.q_token + queries.head.to(tl.int64) * strides.q_head
        dq = zero_chunks(BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        unit = find_units(0, token, strides, OPTIONS)
        for n0 in tl.range(0, token.count, BLOCK_N):
            page, slot, is_seen = place_keys(n0, unit, token, pointers, sizes, scalars, OPTIONS)
            # on its way while this tile is multiplied
            unit = find_units(n0 + BLOCK_N, token, strides, OPTIONS)
            at = places_of(slot, is_seen, local, group, parts.ranks, num_words, num_rows)
            at = first + at
            k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
            sees = is_seen[:, None] & rows.sees[None, :]
            p, ds = gradients_by_key(k, v, q, rows.dout, rows.lse, rows.d, sees, scalars, OPTIONS)
            if parts.v is not None:
                _leave_parts(
                    p, rows.dout, (gradients.dout, rows.offsets, rows.sees),
                    (parts.v, parts.scale_v), at, is_seen, head_tile > 0, OPTIONS.HEAD_DIM_V,
                    HEAD_TILES > 1, OPTIONS,
                )  # fmt: skip
            if parts.k is not None:
                _leave_parts(
                    ds, q, (pointers.q, q_offsets, queries.exists), (parts.k, parts.scale_k), at,
                    is_seen, head_tile > 0, OPTIONS.HEAD_DIM, HEAD_TILES > 1,
                    OPTIONS,
                )  # fmt: skip
            dq = add_chunk_products(dq, tl.trans(ds), k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
        if gradients.dq is not None:
            store_dq(dq, token, queries, head_tile, gradients, scalars, OPTIONS)


@triton.jit(do_not_specialize=("own_lists", "each_head"))
def _add_parts_kernel(
    parts, sums, own_lists, each_head, scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    ENTRIES: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Add up a block of columns of the parts of a key and a KV head: of dk's, or else of dv's.
    own_lists: 0 if all KV heads share lists, else 1."""
    key, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    starts_ptr = parts.ranks.starts + kv_head * own_lists * tl.num_programs(0) + key
    own = named("begin stop first row")(
        begin=tl.load(starts_ptr),
        stop=tl.load(starts_ptr + 1),
        first=kv_head.to(tl.int64) * each_head,
        row=key.to(tl.int64) * tl.num_programs(1) + kv_head,
    )
    BLOCKS: tl.constexpr = 0 if parts.k is None else (HEAD_DIM + WIDTH - 1) // WIDTH
    if block < BLOCKS:
        if parts.k is not None:
            _add_sum(
                (parts.k, parts.scale_k), (sums.k, sums.before_k), scale, own, block, HEAD_DIM,
                WIDTH, ENTRIES, FORMAT,
            )  # fmt: skip
    elif parts.v is not None:
        _add_sum(
            (parts.v, parts.scale_v), (sums.v, sums.before_v), 1.0, own, block - BLOCKS,
            HEAD_DIM_V, WIDTH_V, ENTRIES, FORMAT,
        )  # fmt: skip


@triton.jit
def _add_sum(
    parts, to, factor, own, block, DIM: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """The sum of a key's parts, numbers own.begin to own.stop - 1, and of those before. parts: rows
    and their scales; to: where the sum goes, and the sums before."""
    to_ptr, before_ptr = to
    acc = tl.zeros([ENTRIES, WIDTH], tl.float32)
    for i in tl.range(own.begin, own.stop, ENTRIES, loop_unroll_factor=4):
        at = i + tl.arange(0, ENTRIES)
        acc += load_part(parts[0], parts[1], own.first + at, at < own.stop, block, DIM, WIDTH)
    total = tl.sum(acc, 0) * factor
    d = block * WIDTH + tl.arange(0, WIDTH)
    if before_ptr is not None:
        total += tl.load(before_ptr + own.row * DIM + d, mask=d < DIM, other=0.0)
    stored = encode(total, to_ptr.dtype.element_ty, FORMAT)
    tl.store(to_ptr + own.row * DIM + d, stored, mask=d < DIM)
