"""Attention of one tile of queries: loads, the loop over keys, results.

A tile has BLOCK_M rows: up to TOKENS neighbouring queries of one sequence times PACK query heads
that share a KV head. So decode with grouped heads fills a matrix instruction, and each key is
loaded once for all these heads.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import quotient, with_sink
from torch_paged_attn.backends.triton.portable.common.gather_scatter import page_at, store_rows
from torch_paged_attn.backends.triton.portable.common.key_positions import (
    key_position,
    keys_before,
    tiles_of_block,
)
from torch_paged_attn.backends.triton.portable.common.mask import full_range, key_range
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.portable.common.seen_tiles import keys_of_tile
from torch_paged_attn.backends.triton.portable.common.token_scales import scales_of_head
from torch_paged_attn.backends.triton.portable.forward.combine import part_weights
from torch_paged_attn.backends.triton.portable.forward.key_loop import attend_keys
from torch_paged_attn.backends.triton.portable.forward.queries import load_queries


@triton.jit
def tile_at(place, head_program, sequence, OPTIONS: tl.constexpr):
    """Tile `place` of a sequence, for the heads of `head_program`. `first_token` counts from the
    sequence's first query.
    """
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    first_token = place * TOKENS
    past = sequence.past
    if OPTIONS.HAS_LAYOUT:
        # tiles start at positions that are multiples of TOKENS, so that a tile is in one layout row
        first_token += (past & -TOKENS) - past
    return named("b head_program first_token past q_start query_len k_start key_len")(
        sequence.b, head_program, first_token, past, sequence.q_start, sequence.query_len,
        sequence.k_start, sequence.key_len,
    )  # fmt: skip


@triton.jit
def rows_of(tile, sizes, OPTIONS: tl.constexpr):
    """The rows of a tile: token in the sequence, query head, row of q, and position, for each."""
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    PACK: tl.constexpr = OPTIONS.PACK
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    kv_head = tile.head_program // HEAD_TILES
    head_tile = tile.head_program % HEAD_TILES
    r = tl.arange(0, OPTIONS.BLOCK_M)
    token = tile.first_token + r // PACK
    in_group = head_tile * PACK + r % PACK
    row = tile.q_start + token
    exists = (r < OPTIONS.TOKENS * PACK) & (token >= 0) & (token < tile.query_len)
    exists = exists & (in_group < GROUP_SIZE) & (row >= 0) & (row < sizes.total_q)
    return named("b kv_head first_head head token position row exists")(
        b=tile.b,
        kv_head=kv_head,
        first_head=head_tile * PACK + kv_head * GROUP_SIZE,
        head=kv_head * GROUP_SIZE + tl.minimum(in_group, GROUP_SIZE - 1),
        token=token,
        position=tile.past + token,
        row=row.to(tl.int64),
        exists=exists,
    )


@triton.jit
def _listed_blocks(rows, first_position, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """The range of entries of the layout that list the tile's blocks, and the offset of entry 0 in
    `col`.
    """
    layout_head = rows.first_head // OPTIONS.LAYOUT_GROUP
    layout_row = first_position // OPTIONS.Q_BLOCK
    is_listed = (first_position >= 0) & (layout_row < sizes.layout_rows) & (rows.b < sizes.batch)
    b = tl.cast(rows.b, tl.int64)
    crow_ptr = pointers.crow + (b * sizes.stride_crow_batch + layout_head * sizes.stride_crow_head)
    crow_ptr += layout_row * strides.crow
    first = tl.maximum(tl.load(crow_ptr, mask=is_listed, other=0), 0)
    stop = tl.minimum(tl.load(crow_ptr + strides.crow, mask=is_listed, other=0), sizes.nnz)
    return first, stop, b * sizes.stride_col_batch + layout_head * sizes.stride_col_head


@triton.jit
def find_keys(tile, share, rows, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The keys that a program visits: tiles `i_start` to `i_stop` - 1 of BLOCK_N keys (with a
    layout, tiles of the blocks listed from `col_start` on), the range `start` to `stop` of keys
    that some row sees, and the range `full_start` to `full_stop` of keys that every row sees.
    """
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    HAS_LEFT: tl.constexpr = OPTIONS.HAS_LEFT
    HAS_RIGHT: tl.constexpr = OPTIONS.HAS_RIGHT
    query_len, key_len, past = tile.query_len, tile.key_len, tile.past
    first_position = past + tl.maximum(tile.first_token, 0)
    last_position = past + tl.minimum(tile.first_token + OPTIONS.TOKENS, query_len) - 1
    end = key_position(key_len, scalars, OPTIONS)
    start, stop = key_range(
        first_position, last_position, end, scalars.left, scalars.right, HAS_LEFT, HAS_RIGHT
    )
    full_start, full_stop = full_range(
        first_position, last_position, end, scalars.left, scalars.right, HAS_LEFT, HAS_RIGHT
    )
    if OPTIONS.KEY_RANKS > 1:
        start, stop = keys_before(start, scalars, OPTIONS), keys_before(stop, scalars, OPTIONS)
        full_start = keys_before(full_start, scalars, OPTIONS)
        full_stop = keys_before(full_stop, scalars, OPTIONS)
    if pointers.tail_mask is not None:
        full_stop = tl.maximum(tl.minimum(full_stop, key_len - query_len), 0)
    col_start = 0
    if OPTIONS.HAS_LAYOUT:
        PER_BLOCK: tl.constexpr = tiles_of_block(
            OPTIONS.K_BLOCK, OPTIONS.KEY_RANKS, OPTIONS.KEY_INTERLEAVE, OPTIONS.BLOCK_N
        )
        first_col, last_col, col_start = _listed_blocks(
            rows, first_position, pointers, strides, sizes, OPTIONS
        )
        i_start = first_col * PER_BLOCK
        i_stop = tl.where(start < stop, tl.maximum(last_col * PER_BLOCK, i_start), i_start)
    else:
        i_start = start // BLOCK_N
        i_stop = tl.where(start < stop, tl.cdiv(stop, BLOCK_N), i_start)
    if OPTIONS.FIXED_UNITS > 0:
        # pieces start at multiples of their size, wherever the keys start
        first = i_start
        if not OPTIONS.HAS_LAYOUT:
            first = i_start // OPTIONS.FIXED_UNITS * OPTIONS.FIXED_UNITS
        first += share.unit
        if share.unit + share.taken < share.units:
            i_stop = tl.minimum(i_stop, first + share.taken)
        i_start = tl.minimum(tl.maximum(i_start, first), i_stop)
    elif OPTIONS.IS_SPLIT:
        # a layout row or a window may have fewer tiles than `units`: they are divided in proportion
        visits = i_stop - i_start
        unit, unit_stop = share.unit, share.unit + share.taken
        if visits != share.units:
            unit_stop = (visits.to(tl.int64) * unit_stop // share.units).to(tl.int32)
            unit = (visits.to(tl.int64) * unit // share.units).to(tl.int32)
        i_stop = i_start + unit_stop
        i_start += unit
    if pointers.seen_tiles is not None:
        i_start, i_stop = keys_of_tile(
            i_start, i_stop, tile, rows.first_head, pointers, strides, sizes, OPTIONS
        )
    return named("i_start i_stop start stop full_start full_stop key_len tail_start col_start")(
        i_start, i_stop, start, stop, full_start, full_stop, key_len, key_len - query_len, col_start
    )


@triton.jit
def _as_one_part(state, OPTIONS: tl.constexpr):
    """The state that `combine.py` computes, before the sink, for a tile that has only one part."""
    total = tl.where(state.l == 0.0, 1.0, state.l)
    if OPTIONS.BIAS == "float":
        m, weight = state.m, state.l
    else:
        m = tl.where(state.l == 0.0, float("-inf"), state.m + tl.log(total))
        weight = tl.where(state.l == 0.0, 0.0, 1.0)
    chunks = ()
    for c in tl.static_range((OPTIONS.HEAD_DIM_V - 1) // OPTIONS.OUT_LOW + 1):
        x = quotient(state.chunks[c] * state.gain[:, None], total, OPTIONS.IS_PRECISE)
        chunks = chunks + (x * weight[:, None],)  # type: ignore[assignment]  # noqa: RUF005
    return named("m l chunks gain")(
        m=m, l=weight, chunks=chunks, gain=tl.full([OPTIONS.BLOCK_M], 1.0, tl.float32)
    )


@triton.jit
def _store_values(
    ptr, state, gain, total, exists, scale_ptr, FORMAT: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """Write rows of values, times `gain` and over `total`, at these pointers."""
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    LOW: tl.constexpr = OPTIONS.OUT_LOW
    for c in tl.static_range((HEAD_DIM_V - 1) // LOW + 1):
        out = quotient(state.chunks[c] * gain[:, None], total, OPTIONS.IS_PRECISE)
        store_rows(ptr, out, exists, c * LOW, out.shape[1], HEAD_DIM_V, scale_ptr, FORMAT)


@triton.jit
def _write_part(state, rows, keys, part, pointers, OPTIONS: tl.constexpr):
    """Write partial result number `part`."""
    row = part * OPTIONS.PART_ROWS + tl.arange(0, OPTIONS.BLOCK_M)
    m_i, l_i, gain, exists = state.m, state.l, state.gain, rows.exists
    total = tl.where(l_i == 0.0, 1.0, l_i)
    if OPTIONS.BIAS != "float":
        m_i = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(total))
    maxima_ptr, sums_ptr = part_weights(pointers.parts, OPTIONS)
    tl.store(maxima_ptr + row, m_i, mask=exists)
    if OPTIONS.BIAS == "float":
        tl.store(sums_ptr + row, l_i, mask=exists)
    # a part without keys writes no values; its lse of -inf says so
    exists = exists & (keys.i_start < keys.i_stop)
    values = pointers.parts + row * OPTIONS.HEAD_DIM_V
    _store_values(values, state, gain, total, exists, None, "NATIVE", OPTIONS)


@triton.jit
def _write_rows(state, rows, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """Write the rows of `out` and `softmax_lse`."""
    FORMAT: tl.constexpr = OPTIONS.OUT_FORMAT
    m_i, l_i, gain, exists = state.m, state.l, state.gain, rows.exists
    if pointers.sinks is not None:
        is_sequence = exists & (rows.b < sizes.batch)
        sink = tl.load(pointers.sinks + rows.head, mask=is_sequence, other=float("-inf"))
        m_i, l_i, shrink = with_sink(m_i, l_i, sink)
        gain = gain * shrink
    total = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log(total))
    lse_at = pointers.lse + rows.head.to(tl.int64) * sizes.total_q + rows.row
    tl.store(lse_at, lse, mask=exists)
    out_rows = pointers.out + (rows.row * scalars.num_heads + rows.head) * OPTIONS.HEAD_DIM_V
    _store_values(out_rows, state, gain, total, exists, pointers.out_scale, FORMAT, OPTIONS)


@triton.jit
def attend_tile(tile, share, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """Attention to the units `unit` to `unit + taken` - 1 of the tile's `units` (`work_info.py`),
    which `share` holds. Writes the results, or with `is_part` the partial result number `part`.
    """
    rows = rows_of(tile, sizes, OPTIONS)
    keys = find_keys(tile, share, rows, pointers, strides, sizes, scalars, OPTIONS)
    queries = load_queries(rows, pointers, strides, sizes, scalars, OPTIONS)
    # pointers for the loop over keys
    kv_head = tl.cast(rows.kv_head, tl.int64)
    table_ptr, col_ptr, bias_rows = pointers.block_table, pointers.col, pointers.bias
    tail_rows = pointers.tail_mask
    if OPTIONS.HAS_LAYOUT:
        col_ptr += keys.col_start
    if OPTIONS.BIAS != "":
        bias_rows += rows.row * strides.bias_token + rows.head.to(tl.int64) * strides.bias_head
    if pointers.tail_mask is not None:
        tail_rows += rows.row * strides.tail_token
    if OPTIONS.IS_PAGED:
        table_ptr += tl.cast(tile.b, tl.int64) * sizes.stride_table
        k_ptr = pointers.k + kv_head * strides.k_head
        v_ptr = pointers.v + kv_head * strides.v_head
        if OPTIONS.PAGE_SIZE == 0:
            # the sequence's only page; padding rows have none
            page = page_at(table_ptr, sizes.num_pages, tile.b < sizes.batch).to(tl.int64)
            k_ptr += page * strides.k_page
            v_ptr += page * strides.v_page
    else:
        k_start = tl.cast(tile.k_start, tl.int64)
        k_ptr = pointers.k + (k_start * strides.k_slot + kv_head * strides.k_head)
        v_ptr = pointers.v + (k_start * strides.v_slot + kv_head * strides.v_head)
    # in the function that computes them: Triton would forget it of a function's argument
    K_ALIGNED: tl.constexpr = OPTIONS.K_ALIGNED
    V_ALIGNED: tl.constexpr = OPTIONS.V_ALIGNED
    if K_ALIGNED > 0:
        k_ptr = tl.multiple_of(k_ptr, K_ALIGNED)
    if V_ALIGNED > 0:
        v_ptr = tl.multiple_of(v_ptr, V_ALIGNED)
    k_scales, v_scales = scales_of_head(tile, kv_head, pointers, strides, sizes, OPTIONS)
    memory = named("block_table col k v k_scales v_scales bias_rows tail_rows")(
        table_ptr, col_ptr, k_ptr, v_ptr, k_scales, v_scales, bias_rows, tail_rows
    )
    m_i, l_i, chunks, gain = attend_keys(
        rows, queries, keys, memory, pointers, strides, sizes, scalars, OPTIONS
    )

    # `factor` is for exp2; times ln 2 it is for exp
    m = m_i * (scalars.factor * 0.6931471805599453)
    if pointers.v_descale is not None and not OPTIONS.V_BY_TOKEN:
        at = rows.b * strides.v_descale_batch + rows.kv_head * strides.v_descale_head
        gain = gain * tl.load(pointers.v_descale + at, mask=rows.b < sizes.batch, other=0.0)
    state = named("m l chunks gain")(m=m, l=l_i, chunks=chunks, gain=gain)
    if share.is_part:
        _write_part(state, rows, keys, share.part, pointers, OPTIONS)
    elif OPTIONS.FIXED_UNITS > 0 and (pointers.sinks is not None or OPTIONS.BIAS == "float"):
        # with more keys the tile would have several parts: the bits have to be the same
        one = _as_one_part(state, OPTIONS)
        _write_rows(one, rows, pointers, sizes, scalars, OPTIONS)
    else:
        _write_rows(state, rows, pointers, sizes, scalars, OPTIONS)
