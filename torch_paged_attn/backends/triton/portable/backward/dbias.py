"""dbias of a bias with one head for all.

A program has a tile of queries and a tile of keys, and adds up dS of all heads in order. So it
needs no atomics and no (heads, queries, keys) tensor, but has to compute the scores once more.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.backward.dq import (
    key_memory,
    key_tile_gradients,
    load_query_tile,
    query_tile_of_program,
    store_dbias,
)
from torch_paged_attn.backends.triton.portable.common.groups import Sizes
from torch_paged_attn.backends.triton.portable.common.key_positions import tiles_of_block
from torch_paged_attn.backends.triton.portable.forward.query_tile import find_keys
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait


@triton.jit
def _is_listed(keys, n0, memory, strides, OPTIONS: tl.constexpr):
    """Whether the layout lists the block with key n0 for a tile of queries of one head."""
    WIDTH: tl.constexpr = 64
    PER_BLOCK: tl.constexpr = tiles_of_block(
        OPTIONS.K_BLOCK, OPTIONS.KEY_RANKS, OPTIONS.KEY_INTERLEAVE, OPTIONS.BLOCK_N
    )
    column = n0 // OPTIONS.K_BLOCK
    found = tl.full([], 0, tl.int32)
    stop = keys.i_stop // PER_BLOCK
    for i0 in tl.range(keys.i_start // PER_BLOCK, stop, WIDTH):
        i = i0 + tl.arange(0, WIDTH)
        listed = tl.load(memory.col + i.to(tl.int64) * strides.col, mask=i < stop, other=-1)
        found += tl.sum((listed == column).to(tl.int32), 0)
    return found > 0


@triton.jit(do_not_specialize=Sizes._fields)
def _attention_dbias_kernel(
    pointers, strides,
    stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head, total_q,
    max_keys, num_pages, batch, layout_rows, nnz,
    scalars,
    OPTIONS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    gdc_wait(IS_DEPENDENT)
    sizes = Sizes(
        stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head,
        total_q, max_keys, num_pages, batch, layout_rows, nnz,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    n0 = tl.program_id(1) * BLOCK_N
    first = query_tile_of_program(tl.program_id(0), 0, pointers, sizes, OPTIONS)
    if first.first_token < first.query_len:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for head in tl.range(0, scalars.num_heads):
            tile = query_tile_of_program(tl.program_id(0), head, pointers, sizes, OPTIONS)
            rows, queries, statistics = load_query_tile(
                tile, pointers, strides, sizes, scalars, OPTIONS
            )
            keys = find_keys(tile, None, rows, pointers, strides, sizes, scalars, OPTIONS)
            memory = key_memory(tile, rows, keys, pointers, strides, OPTIONS)
            is_seen = (n0 < keys.stop) & (n0 + BLOCK_N > keys.start)
            if OPTIONS.HAS_LAYOUT:
                is_seen = is_seen & _is_listed(keys, n0, memory, strides, OPTIONS)
            if is_seen:
                ds, _, _ = key_tile_gradients(
                    (n0, keys.stop), (rows, queries, statistics), keys, memory, pointers, strides,
                    scalars, OPTIONS, True,
                )  # fmt: skip
                total += ds
        rows, _, _ = load_query_tile(first, pointers, strides, sizes, scalars, OPTIONS)
        j = n0 + tl.arange(0, BLOCK_N)
        one = tl.full([], 0, tl.int64)
        store_dbias(total, j, rows, one, pointers, strides, sizes, OPTIONS)
