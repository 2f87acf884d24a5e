"""dK and dV: a program has a tile of keys of one KV head and loops over queries.

It adds up the contributions of all query heads of the group, head after head, and of all queries
that see the tile. So the sums have a fixed order and need no atomics.

With `k_start` sequences may share keys. A tile then consists of rows of k, whichever sequences they
belong to, and the program visits, in order, all sequences that have some of these rows.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import find_tile, key_span, query_span
from torch_paged_attn.backends.triton.portable.backward.key_tile import add_sequence, load_keys_once
from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    store_chunks,
    zero_chunks,
)
from torch_paged_attn.backends.triton.portable.common.groups import Sizes
from torch_paged_attn.backends.triton.portable.common.key_positions import key_position, keys_before
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.runtime.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _store_sums(dk, dv, row, exists, kv_head, pointers, scalars, OPTIONS: tl.constexpr):
    """Write dK and dV of these rows."""
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    at = row.to(tl.int64) * (scalars.num_heads // OPTIONS.GROUP_SIZE) + kv_head
    store_chunks(
        pointers.dk + at * OPTIONS.HEAD_DIM, dk, exists, OPTIONS.K_LOW, OPTIONS.K_HIGH,
        OPTIONS.HEAD_DIM, FORMAT,
    )  # fmt: skip
    store_chunks(
        pointers.dv + at * OPTIONS.HEAD_DIM_V, dv, exists, OPTIONS.V_LOW, OPTIONS.V_HIGH,
        OPTIONS.HEAD_DIM_V, FORMAT,
    )  # fmt: skip


@triton.jit
def _own_tile(pointers, strides, sizes, total_k, scalars, OPTIONS: tl.constexpr):
    """The program has a tile of keys of one sequence."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    batch = sizes.batch
    # the first keys of a causal sequence are seen by the most queries: they start first
    number, kv_head = tl.program_id(0), tl.program_id(1)
    bounds = pointers.cu_seqlens_k
    if bounds is None:
        bounds = pointers.cu_seqlens_q
    # rows after the last sequence count as one more sequence, without queries
    b, place = find_tile(number, bounds, batch, BLOCK_N, 1)
    row_start, row_stop = query_span(b, bounds, batch, total_k)
    first_key = place * BLOCK_N
    if first_key < row_stop - row_start:
        _, key_len = key_span(
            b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, batch,
            sizes.max_keys, False,
        )  # fmt: skip
        j = first_key + tl.arange(0, BLOCK_N)
        head = kv_head.to(tl.int64)
        high = tl.minimum(first_key + BLOCK_N, key_len)
        span = _span(b, first_key, first_key, high, key_len, pointers, sizes)
        row = row_start + j
        rows = named("row exists head")(row=row, exists=j < key_len, head=head)
        k, v = load_keys_once(rows, pointers, strides, OPTIONS)
        keys = named("span j rows k v")(span=span, j=j, rows=rows, k=k, v=v)
        dk = zero_chunks(BLOCK_N, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        dv = zero_chunks(BLOCK_N, OPTIONS.V_LOW, OPTIONS.V_HIGH)
        dk, dv = add_sequence(
            dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS
        )  # fmt: skip

        # rows past the sequence's last key have gradient 0, whatever they contain
        exists = (j < row_stop - row_start) & (row >= 0) & (row < total_k)
        is_key = (j < key_len)[:, None]
        scale = scalars.scale
        dk = tl.where(is_key, dk[0] * scale, 0.0), tl.where(is_key, dk[1] * scale, 0.0)
        dv = tl.where(is_key, dv[0], 0.0), tl.where(is_key, dv[1], 0.0)
        _store_sums(dk, dv, row, exists, head, pointers, scalars, OPTIONS)


@triton.jit
def _shared_tile(pointers, strides, sizes, total_k, scalars, OPTIONS: tl.constexpr):
    """The program has a tile of rows of k, and visits every sequence that has some of them."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    kv_head = tl.program_id(1)
    head = kv_head.to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    exists = row < total_k
    rows = named("row exists head")(row=row, exists=exists, head=head)
    k, v = load_keys_once(rows, pointers, strides, OPTIONS)
    dk = zero_chunks(BLOCK_N, OPTIONS.K_LOW, OPTIONS.K_HIGH)
    dv = zero_chunks(BLOCK_N, OPTIONS.V_LOW, OPTIONS.V_HIGH)
    for b in tl.range(0, sizes.batch):
        k_start, key_len = key_span(
            b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, sizes.batch,
            sizes.max_keys, False, pointers.k_start,
        )  # fmt: skip
        first_key = first_row - k_start
        j = first_key + tl.arange(0, BLOCK_N)
        low, high = tl.maximum(first_key, 0), tl.minimum(first_key + BLOCK_N, key_len)
        first_block, blocks = 0, 1
        if OPTIONS.HAS_LAYOUT:
            first_block = key_position(low, scalars, OPTIONS) // OPTIONS.K_BLOCK
            blocks = key_position(high - 1, scalars, OPTIONS) // OPTIONS.K_BLOCK + 1 - first_block
        if low < high:
            for block in tl.range(0, blocks):
                low_of_block, high_of_block = low, high
                if OPTIONS.HAS_LAYOUT:
                    border = (first_block + block) * OPTIONS.K_BLOCK
                    low_of_block = tl.maximum(low, keys_before(border, scalars, OPTIONS))
                    border += OPTIONS.K_BLOCK
                    high_of_block = tl.minimum(high, keys_before(border, scalars, OPTIONS))
                span = _span(b, first_key, low_of_block, high_of_block, key_len, pointers, sizes)
                keys = named("span j rows k v")(span=span, j=j, rows=rows, k=k, v=v)
                dk, dv = add_sequence(
                    dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS
                )  # fmt: skip
    dk = dk[0] * scalars.scale, dk[1] * scalars.scale
    _store_sums(dk, dv, row, exists, head, pointers, scalars, OPTIONS)


@triton.jit
def _span(b, first, low, high, key_len, pointers, sizes):
    """Keys `low` to `high` - 1 of a sequence, in a tile that begins at key `first`; and the first
    key that tail_mask has a column for."""
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    tail_start = key_len - tl.maximum(q_stop - q_start, 0)
    return named("b first low high key_len tail_start")(b, first, low, high, key_len, tail_start)


@triton.jit(do_not_specialize=[*Sizes._fields, "total_k"])
def _attention_dkdv_kernel(
    pointers, strides,
    stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head, total_q,
    max_keys, num_pages, batch, layout_rows, nnz,
    total_k, scalars,
    OPTIONS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    gdc_wait(IS_DEPENDENT)
    gdc_launch_dependents(IS_DEPENDENT)
    sizes = Sizes(
        stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head,
        total_q, max_keys, num_pages, batch, layout_rows, nnz,
    )  # fmt: skip
    if OPTIONS.IS_SHARED:
        _shared_tile(pointers, strides, sizes, total_k, scalars, OPTIONS)
    else:
        _own_tile(pointers, strides, sizes, total_k, scalars, OPTIONS)
