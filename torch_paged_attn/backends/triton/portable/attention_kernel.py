"""Attention forward for every GPU that Triton knows: packed or paged keys, prefill, decode and
mixes.

FlashAttention-2's loop (arXiv 2307.08691) over one tile of queries at a time, see `query_tile.py`.
The keys come in tiles of BLOCK_N; those that every row sees need no mask and go first through the
middle phase. With IS_SPLIT the keys of all tiles are dealt out evenly, see `work_info.py`, and
programs that share a tile merge what each has found, see `combine.py`. With a layout, a tile's keys
are the listed blocks of its row.

Scores and sums are float32; probabilities are rounded to DTYPE, the type of the products.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.combine import is_last_arrival, merge_parts, part_of
from torch_paged_attn.backends.triton.portable.query_tile import attend_tile, first_query
from torch_paged_attn.backends.triton.portable.work_info import find_work, sequence_of
from torch_paged_attn.backends.triton.runtime.launch import follow
from torch_paged_attn.backends.triton.seqlen_info import find_tile, key_span, query_span

# sizes that differ from call to call: a kernel is not compiled anew for each of their divisors
VARYING = (
    "stride_table",
    "stride_crow_batch",
    "stride_crow_head",
    "stride_col_batch",
    "stride_col_head",
    "total_q",
    "max_keys",
    "num_pages",
    "batch",
    "layout_rows",
    "nnz",
    "left",
    "right",
    "dropout_threshold",
    "min_units",
)


@triton.jit(do_not_specialize=VARYING)
def _attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    counters_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    block_table_ptr,
    crow_ptr,
    col_ptr,
    bias_ptr,
    alibi_ptr,
    sinks_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    out_scale_ptr,
    rng_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_table,
    stride_crow_batch,
    stride_crow_head,
    stride_crow,
    stride_col_batch,
    stride_col_head,
    stride_col,
    stride_bias_head,
    stride_bias_token,
    stride_bias_key,
    bias_width,
    stride_alibi_batch,
    stride_alibi_head,
    stride_q_descale_batch,
    stride_q_descale_head,
    stride_k_descale_batch,
    stride_k_descale_head,
    stride_v_descale_batch,
    stride_v_descale_head,
    total_q,
    max_keys,
    num_pages,
    batch,
    num_heads,
    layout_rows,
    nnz,
    left,
    right,
    scale,
    factor,
    softcap,
    dropout_threshold,
    dropout_scale,
    min_units,
    HEAD_DIM: tl.constexpr,
    K_LOW: tl.constexpr,
    K_HIGH: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    TOKENS: tl.constexpr,
    SLACK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAYOUT_GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    RAW_SCORES: tl.constexpr,
    CHAIN: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_MERGED: tl.constexpr,
    FIXED_UNITS: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
    IS_ONE_LOOK: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    IS_V_LIKE_K: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_PTX: tl.constexpr,
    IS_Q_NORMED: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    HAS_LAYOUT: tl.constexpr = K_BLOCK > 0
    IS_PAGED: tl.constexpr = PAGE_SIZE > 0
    follow(IS_DEPENDENT)
    if IS_SPLIT:
        # heads are neighbours: together they read whole tokens of a cache
        head_program = tl.program_id(0)
        heads = tl.num_programs(0)
        program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        programs = tl.num_programs(1) * tl.num_programs(2)
        piece, at, stop, b, first = find_work(
            program, programs, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q,
            max_keys, left, min_units, FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            SEARCH_WIDTH, IS_ONE_LOOK,
        )  # fmt: skip
        # a loop that surely begins needs no branch before it: addresses are computed while the
        # lengths are on their way
        goes_on = tl.full([], 1, tl.int1)
        while goes_on:
            q_start, query_len, k_start, key_len, tiles, units = sequence_of(
                b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, total_q, max_keys,
                left, FIXED_UNITS, IS_PAGED, HAS_LEFT, TOKENS, HAS_LAYOUT, BLOCK_N,
            )  # fmt: skip
            if at >= first + tiles * units:
                first += tiles * units
                b += 1
            else:
                tile = 0
                if tiles > 1:
                    tile = (at - first) // units
                tile_start = first + tile * units
                unit = at - tile_start
                taken = tl.minimum(stop - at, units - unit)
                is_shared = taken < units
                part = part_of(program, unit == 0, heads, head_program)
                first_token = first_query(tile, query_len, key_len, TOKENS, HAS_LAYOUT)
                attend_tile(
                    b, head_program, first_token, unit, taken, units, is_shared, part, q_start,
                    query_len, k_start, key_len, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr,
                    block_table_ptr, crow_ptr, col_ptr, bias_ptr, alibi_ptr, sinks_ptr,
                    q_descale_ptr, k_descale_ptr, v_descale_ptr, out_scale_ptr, rng_ptr,
                    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_slot,
                    stride_v_page, stride_v_head, stride_v_slot, stride_table, stride_crow_batch,
                    stride_crow_head, stride_crow, stride_col_batch, stride_col_head, stride_col,
                    stride_bias_head, stride_bias_token, stride_bias_key, bias_width,
                    stride_alibi_batch, stride_alibi_head, stride_q_descale_batch,
                    stride_q_descale_head, stride_k_descale_batch, stride_k_descale_head,
                    stride_v_descale_batch, stride_v_descale_head, total_q, num_pages, batch,
                    num_heads, layout_rows, nnz, left, right, scale, factor, softcap,
                    dropout_threshold, dropout_scale, HEAD_DIM, K_LOW, K_HIGH, HEAD_DIM_V, V_LOW,
                    V_HIGH, GROUP_SIZE, PACK, TOKENS, PAGE_SIZE, Q_BLOCK, K_BLOCK, LAYOUT_GROUP,
                    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS, RAW_SCORES, CHAIN, FIRST_PHASE,
                    IS_SPLIT, ROWS, Q_FORMAT, K_FORMAT, IS_V_LIKE_K, IS_PAIRED, HAS_PTX,
                    IS_Q_NORMED, OUT_FORMAT, DTYPE, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                if is_shared:
                    # the programs that share the tile, one after another
                    first_program = tile_start // piece
                    parts = (tile_start + units - 1) // piece - first_program + 1
                    counter = counters_ptr + first_program * heads + head_program
                    if is_last_arrival(counter, parts):
                        merge_parts(
                            parts_ptr, first_program, parts, heads, head_program, b,
                            first_token, q_start, query_len, out_ptr, lse_ptr, sinks_ptr,
                            out_scale_ptr, total_q, batch, num_heads, HEAD_DIM_V, GROUP_SIZE, PACK,
                            TOKENS, ROWS, OUT_FORMAT, BLOCK_MERGED,
                        )  # fmt: skip
                at += taken
            goes_on = at < stop
    else:
        # the last tiles of a causal sequence see the most keys: they start first
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        b, tile = find_tile(number, cu_seqlens_q_ptr, batch, TOKENS, SLACK)
        q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
        k_start, key_len = key_span(
            b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, IS_PAGED
        )
        query_len = q_stop - q_start
        first_token = first_query(tile, query_len, key_len, TOKENS, HAS_LAYOUT)
        if first_token < query_len:
            attend_tile(
                b, tl.program_id(1), first_token, 0, 1, 1, False, 0, q_start, query_len, k_start,
                key_len, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, block_table_ptr,
                crow_ptr, col_ptr, bias_ptr, alibi_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                v_descale_ptr, out_scale_ptr, rng_ptr, stride_q_token, stride_q_head, stride_k_page,
                stride_k_head, stride_k_slot, stride_v_page, stride_v_head, stride_v_slot,
                stride_table, stride_crow_batch, stride_crow_head, stride_crow, stride_col_batch,
                stride_col_head, stride_col, stride_bias_head, stride_bias_token, stride_bias_key,
                bias_width, stride_alibi_batch, stride_alibi_head, stride_q_descale_batch,
                stride_q_descale_head, stride_k_descale_batch, stride_k_descale_head,
                stride_v_descale_batch, stride_v_descale_head, total_q, num_pages, batch, num_heads,
                layout_rows, nnz, left, right, scale, factor, softcap, dropout_threshold,
                dropout_scale, HEAD_DIM, K_LOW, K_HIGH, HEAD_DIM_V, V_LOW, V_HIGH, GROUP_SIZE, PACK,
                TOKENS, PAGE_SIZE, Q_BLOCK, K_BLOCK, LAYOUT_GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                BIAS, RAW_SCORES, CHAIN, FIRST_PHASE, IS_SPLIT, ROWS, Q_FORMAT, K_FORMAT,
                IS_V_LIKE_K, IS_PAIRED, HAS_PTX, IS_Q_NORMED, OUT_FORMAT, DTYPE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
