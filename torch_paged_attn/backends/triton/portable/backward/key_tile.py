"""dK and dV of a tile of keys from the queries of one sequence: a loop over the heads of the group,
and over tiles of queries. Tiles are (keys, queries) here, so that P and dX need not be transposed
for the products that follow. Under a block layout, the queries are those of the rows that list the
tile's column, in the lists of `common/transposed_lists.py`.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.backward_preprocess import (
    load_statistics,
    load_statistics_of_tile,
    statistics_of,
)
from torch_paged_attn.backends.triton.common.seqlen_info import position_of_first, query_span
from torch_paged_attn.backends.triton.common.transposed_lists import COMPARED
from torch_paged_attn.backends.triton.portable.backward.gradients import (
    dropped,
    gradient_of_scores,
    probabilities,
    survivors,
)
from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    load_chunks,
    zero_chunks_unless,
)
from torch_paged_attn.backends.triton.portable.common.key_positions import key_position
from torch_paged_attn.backends.triton.portable.common.logits import load_bias, logits, scaled
from torch_paged_attn.backends.triton.portable.common.mask import (
    full_range,
    key_range,
    load_tail,
    tiles_of_phase,
    visible,
    whole_tiles,
)
from torch_paged_attn.backends.triton.portable.common.named import named, type_of
from torch_paged_attn.backends.triton.portable.common.products import (
    add_chunk_products,
    chunk_scores,
)
from torch_paged_attn.backends.triton.portable.common.seen_tiles import queries_of_tile


@triton.jit
def listing_rows(keys, queries, head, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """The list of the column of a tile of keys, and the range of its entries whose rows contain
    queries that may see the tile.
    """
    nnz = tl.cast(sizes.nnz, tl.int64)
    last = key_position(sizes.max_keys - 1, scalars, OPTIONS)
    columns = tl.cast(last // OPTIONS.K_BLOCK + 1, tl.int64)
    layout_head = head // OPTIONS.LAYOUT_GROUP
    if OPTIONS.LAYOUT_PER_SEQUENCE:
        layout_head += keys.b * OPTIONS.LAYOUT_HEADS
    layout_head = layout_head.to(tl.int64)
    is_seen = (keys.b < sizes.batch) & (queries.start < queries.stop)
    column = key_position(keys.low, scalars, OPTIONS) // OPTIONS.K_BLOCK
    at = layout_head * columns + column
    start = tl.load(pointers.listing_starts + at, mask=is_seen, other=0)
    count = tl.load(pointers.listing_counts + at, mask=is_seen, other=0)
    rows_ptr = pointers.listing_rows + (layout_head * nnz + start)
    count = tl.minimum(count, sizes.nnz - start)
    first_row = tl.maximum(queries.past + queries.start, 0) // OPTIONS.Q_BLOCK
    stop_row = tl.cdiv(tl.maximum(queries.past + queries.stop, 0), OPTIONS.Q_BLOCK)
    first_entry, stop_entry = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for i0 in tl.range(0, count, COMPARED):
        i = i0 + tl.arange(0, COMPARED)
        row = tl.load(rows_ptr + i, mask=i < count, other=2147483647)
        first_entry += tl.sum((row < first_row).to(tl.int32), 0)
        stop_entry += tl.sum((row < stop_row).to(tl.int32), 0)
    return rows_ptr, first_entry, stop_entry


@triton.jit
def _queries_of(span, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """The queries of a sequence: the range of those that see some key of `span`, and of those that
    see all of them. These are the forward's masks with queries and keys exchanged.
    """
    HAS_LEFT: tl.constexpr = OPTIONS.HAS_LEFT
    HAS_RIGHT: tl.constexpr = OPTIONS.HAS_RIGHT
    q_start, q_stop = query_span(span.b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    query_len = tl.maximum(tl.minimum(q_stop, sizes.total_q) - q_start, 0)
    past = position_of_first(span.b, query_len, span.key_len, pointers.q_position, sizes.batch)
    first = key_position(span.low, scalars, OPTIONS) - past
    last = key_position(span.high - 1, scalars, OPTIONS) - past
    start, stop = key_range(
        first, last, query_len, scalars.right, scalars.left, HAS_RIGHT, HAS_LEFT
    )
    full_start, full_stop = full_range(
        first, last, query_len, scalars.right, scalars.left, HAS_RIGHT, HAS_LEFT
    )
    # keys past the end are seen by nobody
    stop = tl.where(span.low < span.high, stop, start)
    if OPTIONS.IS_SHARED:
        # a tile that contains other sequences' keys needs a mask
        full_start = tl.where(span.high - span.low < OPTIONS.BLOCK_N, stop, full_start)
    return named("q_start query_len past start stop full_start full_stop")(
        q_start, query_len, past, start, stop, full_start, full_stop
    )


@triton.jit
def _load_keys(rows, exists, pointers, strides, OPTIONS: tl.constexpr):
    """The program's tile of keys and values; rows that do not exist are 0."""
    row = rows.row.to(tl.int64)
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    k = load_chunks(
        pointers.k, row * strides.k_slot + rows.head * strides.k_head, exists, OPTIONS.K_LOW,
        OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True, FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    v = load_chunks(
        pointers.v, row * strides.v_slot + rows.head * strides.v_head, exists, OPTIONS.V_LOW,
        OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True, FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    return k, v


@triton.jit
def load_keys_once(rows, pointers, strides, OPTIONS: tl.constexpr):
    """Keys and values for all tiles of queries, unless registers do not hold them."""
    if OPTIONS.RELOADS_KEYS:
        return 0, 0
    else:
        return _load_keys(rows, rows.exists, pointers, strides, OPTIONS)


@triton.jit
def _add_query_tile(
    sums, first_token, memory, keys, queries, pointers, strides, scalars, OPTIONS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the BLOCK_M queries from `first_token` on to dK (without the scale)
    and dV, which are `sums`.
    """
    dk, dv = sums
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    IS_PRECISE: tl.constexpr = OPTIONS.IS_PRECISE
    # with a layout, tiles begin at positions
    IS_ALIGNED: tl.constexpr = BLOCK_M <= 64 and not OPTIONS.HAS_LAYOUT
    token = first_token + tl.arange(0, BLOCK_M)
    exists = token < queries.query_len
    # instead of a query outside the range, one inside is loaded, so that loads need no mask
    near = tl.minimum(token, queries.stop - 1)
    if IS_MASKED:
        exists = exists & (token >= 0)
        near = tl.maximum(near, queries.start)
    near = near.to(tl.int64)
    k, v = keys.k, keys.v
    if OPTIONS.RELOADS_KEYS:
        # a mask that depends on the loop: the compiler would load them before it
        exist = keys.rows.exists & (first_token < queries.stop)
        k, v = _load_keys(keys.rows, exist, pointers, strides, OPTIONS)
    q = load_chunks(
        memory.q, near * strides.q_token, None, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM,
        False, FORMAT, DTYPE,
    )  # fmt: skip
    s = chunk_scores(k, q, OPTIONS.K_HIGH, OPTIONS.CHAIN)
    # lse is +inf where there is no query: its probabilities are 0
    if IS_ALIGNED:
        lse = load_statistics_of_tile(memory.statistics, first_token, BLOCK_M, False)
    else:
        lse, far_delta = load_statistics(memory.statistics, token, exists)
    position, keys_of_tile = (queries.past + token)[None, :], keys.j[:, None]
    key_at = key_position(keys_of_tile, scalars, OPTIONS)
    seen = exists[None, :]
    if IS_MASKED:
        in_range = (token >= queries.start) & (token < queries.stop)
        seen = visible(
            position, key_at, in_range[None, :], scalars.left, scalars.right,
            OPTIONS.HAS_LEFT, OPTIONS.HAS_RIGHT,
        )  # fmt: skip
        if OPTIONS.IS_SHARED:
            seen = seen & ((keys.j >= keys.span.low) & (keys.j < keys.span.high))[:, None]
    if pointers.tail_mask is not None:
        tail_rows = memory.tail + near * strides.tail_token
        seen = seen & load_tail(
            tail_rows[None, :], exists[None, :], keys_of_tile, keys.span, strides
        )
    bias = 0.0
    if OPTIONS.BIAS != "":
        bias_rows = memory.bias + near * strides.bias_token
        has_bias = exists[None, :]
        if OPTIONS.IS_SHARED:
            has_bias = has_bias & (keys_of_tile >= 0)
        bias, allowed = load_bias(
            bias_rows[None, :], has_bias, keys_of_tile, strides, OPTIONS, False
        )
        seen = seen & allowed & (keys.j < keys.span.key_len)[:, None]
    s = scaled(s, scalars.scale, 0.0, OPTIONS)
    s, capped = logits(s, bias, memory.slope, position, key_at, pointers, scalars, OPTIONS)
    p = probabilities(s, lse[None, :], seen, scalars.factor, OPTIONS, IS_MASKED)
    survives = survivors(
        keys.span.b, memory.head, token, keys.span.first, pointers, scalars, OPTIONS, True
    )
    dout = load_chunks(
        memory.dout, near * strides.dout_token, None, OPTIONS.V_LOW, OPTIONS.V_HIGH,
        OPTIONS.HEAD_DIM_V, False, FORMAT, DTYPE,
    )  # fmt: skip
    # a window may fall between two keys of a rank, so that a query sees none of them
    HAS_GAPS: tl.constexpr = OPTIONS.KEY_RANKS > 1 and OPTIONS.HAS_LEFT and IS_MASKED
    if OPTIONS.BIAS != "" or pointers.tail_mask is not None or HAS_GAPS:
        # a query in the middle may see no key, and then its rows may contain NaN
        has_seen = tl.max(seen.to(tl.int32), 0) > 0
        q = zero_chunks_unless(has_seen, q, OPTIONS.K_HIGH)
        dout = zero_chunks_unless(has_seen, dout, OPTIONS.V_HIGH)
    kept = dropped(p, survives, pointers, scalars).to(DTYPE)
    dv = add_chunk_products(dv, kept, dout, OPTIONS.V_HIGH, IS_PRECISE)
    if IS_ALIGNED:
        delta = load_statistics_of_tile(memory.statistics, first_token, BLOCK_M, True)
    else:
        delta = far_delta
    dp = chunk_scores(v, dout, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    dp = dropped(dp, survives, pointers, scalars)
    _, dx = gradient_of_scores(
        p, dp, delta[None, :], seen, capped, scalars.softcap, OPTIONS, IS_MASKED
    )
    dk = add_chunk_products(dk, dx.to(DTYPE), q, OPTIONS.K_HIGH, IS_PRECISE)
    return dk, dv


@triton.jit
def _query_memory(head, b, queries, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """A head's number, ALiBi slope, and pointers to its queries, dout, statistics, and rows of bias
    and tail mask.
    """
    number = head
    q_start, head = tl.cast(queries.q_start, tl.int64), tl.cast(head, tl.int64)
    # Triton functions cannot return None, so 0 stands for a missing pointer
    bias_ptr = 0
    tail_ptr = 0
    slope = 0.0
    if OPTIONS.BIAS != "":
        bias_ptr = pointers.bias + (q_start * strides.bias_token + head * strides.bias_head)
    if pointers.tail_mask is not None:
        tail_ptr = pointers.tail_mask + q_start * strides.tail_token
    if pointers.alibi is not None:
        at = b * strides.alibi_batch + head * strides.alibi_head
        slope = tl.load(pointers.alibi + at, mask=b < sizes.batch, other=0.0)
    return named("head q dout statistics bias tail slope")(
        head=number,
        q=pointers.q + (q_start * strides.q_token + head * strides.q_head),
        dout=pointers.dout + (q_start * strides.dout_token + head * strides.dout_head),
        statistics=statistics_of(pointers.statistics, head, queries.q_start // 64 + b, sizes),
        bias=bias_ptr,
        tail=tail_ptr,
        slope=slope,
    )


@triton.jit
def add_sequence(
    dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr
):  # fmt: skip
    """Add the contribution of a sequence's queries to dK (without the scale) and dV of a tile."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    FIRST_PHASE: tl.constexpr = OPTIONS.FIRST_PHASE
    LAST_PHASE: tl.constexpr = OPTIONS.LAST_PHASE
    queries = _queries_of(keys.span, pointers, sizes, scalars, OPTIONS)
    for in_group in tl.range(0, OPTIONS.GROUP_SIZE):
        head = kv_head * OPTIONS.GROUP_SIZE + in_group
        memory = _query_memory(head, keys.span.b, queries, pointers, strides, sizes, OPTIONS)
        i_start = queries.start // BLOCK_M
        i_stop = tl.where(queries.start < queries.stop, tl.cdiv(queries.stop, BLOCK_M), i_start)
        rows_ptr = pointers.listing_rows
        if OPTIONS.HAS_LAYOUT:
            PER_BLOCK: tl.constexpr = OPTIONS.Q_BLOCK // BLOCK_M
            rows_ptr, first_entry, stop_entry = listing_rows(
                keys.span, queries, head, pointers, sizes, scalars, OPTIONS
            )
            i_start = first_entry * PER_BLOCK
            i_stop = stop_entry * PER_BLOCK
        if pointers.seen_tiles is not None:
            i_start, i_stop = queries_of_tile(
                i_start, i_stop, keys.span, queries, head, pointers, strides, sizes, OPTIONS
            )
        # phases: 0 from the causal edge, 1 tiles that see all keys, 2 up to a window's left edge
        i_full, i_tail = whole_tiles(
            i_start, i_stop, queries.full_start, queries.full_stop, BLOCK_M, FIRST_PHASE, LAST_PHASE
        )
        for phase in tl.static_range(FIRST_PHASE, LAST_PHASE + 1):
            i_first, i_last = tiles_of_phase(phase, i_start, i_full, i_tail, i_stop)
            for i in tl.range(i_first, i_last):
                first_token = i * BLOCK_M
                if OPTIONS.HAS_LAYOUT:
                    row = tl.load(rows_ptr + i // PER_BLOCK)
                    first_token = row * OPTIONS.Q_BLOCK + i % PER_BLOCK * BLOCK_M - queries.past
                dk, dv = _add_query_tile(
                    (dk, dv), first_token, memory, keys, queries, pointers, strides, scalars,
                    OPTIONS, phase != 1,
                )  # fmt: skip
    return dk, dv
