"""Scores of index queries on index keys, for `select_keys`.

A program has a tile of keys and some tokens: the keys of a sequence are read once for all of them.
Keys are the rows of its products and heads the columns, so that the sum over heads is mostly one of
a thread's own numbers.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_chunks
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import chunk_scores
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_token,
    load_keys,
    score_descales,
)


@triton.jit
def stop_of(token, sizes, OPTIONS: tl.constexpr):
    """One past the last key that a token sees."""
    stop = token.key_len
    if OPTIONS.HAS_RIGHT:
        stop = tl.minimum(stop, token.position + 1)
    # unchecked lengths must not lead outside the keys or the table
    if OPTIONS.PAGE_SIZE == 0:
        stop = tl.where(token.k_first >= 0, tl.minimum(stop, sizes.num_rows - token.k_first), 0)
    else:
        stop = tl.minimum(stop, tl.cast(sizes.max_pages, tl.int64) * OPTIONS.PAGE_SIZE)
    return tl.where(token.exists, stop, 0)


@triton.jit(
    do_not_specialize=("first_row", "stop_row", "tokens", "num_keys", *SelectedSizes._fields)
)
def _index_scores_kernel(
    pointers, weights_ptr, scores_ptr, first_row, stop_row, tokens, num_keys,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides,
    IS_RELU: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """scores_ptr: (rows, G, num_keys), of which only what a token sees is written. weights_ptr:
    contiguous (total_q, num_heads), or None. A program has `tokens` rows, AT_ONCE at a time.
    """
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PAGE_SIZE: tl.constexpr = OPTIONS.PAGE_SIZE
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    columns = tl.arange(0, AT_ONCE * BLOCK_M)
    t = columns // BLOCK_M
    group = tl.program_id(1)
    n0 = tl.program_id(2) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    key = n.to(tl.int64)
    row = first_row + tl.program_id(0) * tokens
    stop_row = tl.minimum(stop_row, row + tokens)
    while row < stop_row:
        # the rows of one sequence
        token = find_token(row, group, pointers, strides, sizes, OPTIONS)
        last = tl.load(pointers.cu_seqlens_q + token.b + 1)
        last = tl.where(token.exists, tl.minimum(last, stop_row), stop_row)
        begin = row
        if OPTIONS.HAS_RIGHT:
            # earlier ones see no key of the tile
            begin += tl.maximum(n0 - token.position, 0).to(tl.int32)
        stop = token.key_len
        if PAGE_SIZE == 0:
            page, slot = tl.zeros([BLOCK_N], tl.int64), token.k_first + key
            is_key = (key < stop) & (slot >= 0) & (slot < sizes.num_rows)
        else:
            column, slot = key // PAGE_SIZE, key % PAGE_SIZE
            is_key = (key < stop) & (column < sizes.max_pages)
            table_ptr = pointers.block_table + tl.cast(token.b, tl.int64) * sizes.stride_table
            page = tl.load(table_ptr + column, mask=is_key, other=0).to(tl.uint32)
            page = tl.minimum(page, tl.cast(sizes.num_rows - 1, tl.uint32)).to(tl.int64)
        if (n0 < stop) & token.exists:
            k, _ = load_keys(page, slot, is_key, group, pointers, strides, OPTIONS)
            _, factor = score_descales(token, group, pointers, strides)
            for i in tl.range(begin, last, AT_ONCE, num_stages=STAGES):
                total = tl.zeros([BLOCK_N, AT_ONCE], tl.float32)
                for head_tile in tl.static_range(HEAD_TILES):
                    r = head_tile * BLOCK_M + columns % BLOCK_M
                    exists = (r < OPTIONS.GROUP_SIZE) & (i + t < last)
                    head = group * OPTIONS.GROUP_SIZE + tl.minimum(r, OPTIONS.GROUP_SIZE - 1)
                    at = (i + t).to(tl.int64)
                    q = load_chunks(
                        pointers.q, at * strides.q_token + head.to(tl.int64) * strides.q_head,
                        exists, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
                        Q_FORMAT, type_of(OPTIONS.DTYPE),
                    )  # fmt: skip
                    s = chunk_scores(k, q, OPTIONS.K_HIGH, OPTIONS.CHAIN) * factor
                    if IS_RELU:
                        s = tl.maximum(s, 0.0)
                    weight = tl.where(exists, 1.0, 0.0)
                    if weights_ptr is not None:
                        at = at * OPTIONS.NUM_HEADS + head
                        weight = tl.load(weights_ptr + at, mask=exists, other=0.0)
                    s = tl.reshape(s * weight[None, :], [BLOCK_N, AT_ONCE, BLOCK_M])
                    total += tl.sum(s, 2)
                some = i + tl.arange(0, AT_ONCE)
                is_seen = is_key[:, None] & (some < last)[None, :]
                if OPTIONS.HAS_RIGHT:
                    is_seen = is_seen & (key[:, None] <= token.position + (some - row)[None, :])
                at = ((some - first_row) * tl.num_programs(1) + group).to(tl.int64) * num_keys
                tl.store(scores_ptr + at[None, :] + n[:, None], total, mask=is_seen)
        row = last


@triton.jit(do_not_specialize=("first_row", "num_keys", "num_units", *SelectedSizes._fields))
def _pool_units_kernel(
    pointers, scores_ptr, pooled_ptr, first_row, num_keys, num_units,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides,
    POOL: tl.constexpr, UNITS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Scores of units, (rows, G, num_units), from those of their keys."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    SIZE: tl.constexpr = OPTIONS.SELECT_SIZE
    group = tl.program_id(1)
    token = find_token(first_row + tl.program_id(0), group, pointers, strides, sizes, OPTIONS)
    stop = stop_of(token, sizes, OPTIONS)
    unit = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
    key = unit[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    row = (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64)
    scores_ptr += row * num_keys
    scores = tl.load(scores_ptr + key, mask=key < stop, other=float("-inf"))
    is_seen = scores > float("-inf")
    count = tl.sum(is_seen.to(tl.int32), 1)
    if POOL == "max":
        pooled = tl.max(scores, 1)
    else:
        pooled = tl.sum(tl.where(is_seen, scores, 0.0), 1)
        if POOL == "mean":
            pooled = pooled / tl.maximum(count, 1).to(tl.float32)
    pooled = tl.where(count > 0, pooled, float("-inf"))
    tl.store(pooled_ptr + row * num_units + unit, pooled, mask=unit < num_units)
