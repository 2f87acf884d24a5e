"""dK and dV: keys stay, queries pass by.

One program has a tile of keys of one KV head, and adds up what all query heads of its group and
all queries that see the tile have to say: head after head, so that the sums have one order and need
no atomic. Scores are (keys, queries) here: probabilities and dX are operands of their products as
they come.

With `k_start`, sequences may share keys: tiles are of rows of k, whoever they belong to, and a
program visits all sequences that hold some of its rows, in their order.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.backward_statistics import (
    load_statistics,
    load_statistics_of_tile,
    statistics_of,
)
from torch_paged_attn.backends.triton.portable.arguments import Sizes
from torch_paged_attn.backends.triton.portable.gather_scatter import (
    load_chunks,
    store_chunks,
    zero_chunks,
    zero_chunks_unless,
)
from torch_paged_attn.backends.triton.portable.gradients import (
    dropped,
    gradient_of_scores,
    probabilities,
    survivors,
)
from torch_paged_attn.backends.triton.portable.key_positions import key_position, keys_before
from torch_paged_attn.backends.triton.portable.logits import load_bias, logits, scaled
from torch_paged_attn.backends.triton.portable.mask import (
    full_range,
    key_range,
    load_tail,
    visible,
)
from torch_paged_attn.backends.triton.portable.named import named
from torch_paged_attn.backends.triton.portable.products import add_chunk_products, chunk_scores
from torch_paged_attn.backends.triton.portable.transposed_lists import listing_rows
from torch_paged_attn.backends.triton.runtime.launch import gdc_launch_dependents, gdc_wait
from torch_paged_attn.backends.triton.seqlen_info import (
    find_tile,
    key_span,
    position_of_first,
    query_span,
)


@triton.jit
def _load_keys(row, exists, kv_head, pointers, strides, OPTIONS: tl.constexpr):
    """The tile of keys and values that stays; zeros where there are none."""
    row = row.to(tl.int64)
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    k = load_chunks(
        pointers.k, row * strides.k_slot + kv_head * strides.k_head, exists, OPTIONS.K_LOW,
        OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True, FORMAT, OPTIONS.DTYPE,
    )  # fmt: skip
    v = load_chunks(
        pointers.v, row * strides.v_slot + kv_head * strides.v_head, exists, OPTIONS.V_LOW,
        OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True, FORMAT, OPTIONS.DTYPE,
    )  # fmt: skip
    return k, v


@triton.jit
def _queries_of(span, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """The queries of a sequence, and which of them see some key of the tile's `span`, and all of
    them: what a key is seen by is, the other way around, what a query sees.
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
        # a tile that the sequence has a part of is masked
        full_start = tl.where(span.high - span.low < OPTIONS.BLOCK_N, stop, full_start)
    return named("q_start query_len past start stop full_start full_stop")(
        q_start=q_start,
        query_len=query_len,
        past=past,
        start=start,
        stop=stop,
        full_start=full_start,
        full_stop=full_stop,
    )


@triton.jit
def _add_query_tile(
    dk, dv, first_token, memory, keys, queries, pointers, strides, scalars,
    OPTIONS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """What the queries from `first_token` on add to dK (without the scale) and dV."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    DTYPE: tl.constexpr = OPTIONS.DTYPE
    FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    IS_PRECISE: tl.constexpr = OPTIONS.IS_PRECISE
    # with a layout, tiles begin at positions
    IS_ALIGNED: tl.constexpr = BLOCK_M <= 64 and not OPTIONS.HAS_LAYOUT
    token = first_token + tl.arange(0, BLOCK_M)
    exists = token < queries.query_len
    # what stands for a query outside the range is one inside: no load needs a mask
    near = tl.minimum(token, queries.stop - 1)
    if IS_MASKED:
        exists = exists & (token >= 0)
        near = tl.maximum(near, queries.start)
    near = near.to(tl.int64)
    q = load_chunks(
        memory.q, near * strides.q_token, None, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM,
        False, FORMAT, DTYPE,
    )  # fmt: skip
    s = chunk_scores(keys.k, q, OPTIONS.K_HIGH, OPTIONS.CHAIN)
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
    if OPTIONS.BIAS != "" or pointers.tail_mask is not None:
        # a mask may hide all keys from a query among others
        has_seen = tl.max(seen.to(tl.int32), 0) > 0
        q = zero_chunks_unless(has_seen, q, OPTIONS.K_HIGH)
        dout = zero_chunks_unless(has_seen, dout, OPTIONS.V_HIGH)
    kept = dropped(p, survives, pointers, scalars).to(DTYPE)
    dv = add_chunk_products(dv, kept, dout, OPTIONS.V_HIGH, IS_PRECISE)
    if IS_ALIGNED:
        delta = load_statistics_of_tile(memory.statistics, first_token, BLOCK_M, True)
    else:
        delta = far_delta
    dp = chunk_scores(keys.v, dout, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    dp = dropped(dp, survives, pointers, scalars)
    _, dx = gradient_of_scores(
        p, dp, delta[None, :], seen, capped, scalars.softcap, OPTIONS, IS_MASKED
    )
    dk = add_chunk_products(dk, dx.to(DTYPE), q, OPTIONS.K_HIGH, IS_PRECISE)
    return dk, dv


@triton.jit
def _query_memory(head, b, queries, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """A head's number; where its queries, the gradients of their results, their statistics, and
    rows of a bias and of a tail mask are; its slope.
    """
    number = head
    q_start, head = tl.cast(queries.q_start, tl.int64), tl.cast(head, tl.int64)
    # what is not there is 0: a function returns no None
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
def _add_sequence(
    dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr
):  # fmt: skip
    """What a sequence's queries add to dK, without the scale, and dV of a tile of keys."""
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
        # phases: 0 from the causal edge, 1 tiles that see all keys, 2 up to a window's left edge
        i_full = i_start
        if FIRST_PHASE == 0:
            i_full = tl.minimum(tl.maximum(tl.cdiv(queries.full_start, BLOCK_M), i_start), i_stop)
        i_tail = i_full
        if LAST_PHASE == 1:
            i_tail = i_stop
        elif FIRST_PHASE < 2:
            i_tail = tl.minimum(tl.maximum(queries.full_stop // BLOCK_M, i_full), i_stop)
        for phase in tl.static_range(FIRST_PHASE, LAST_PHASE + 1):
            if phase == 0:
                i_first = i_start
                i_last = i_full
            elif phase == 1:
                i_first = i_full
                i_last = i_tail
            else:
                i_first = i_tail
                i_last = i_stop
            for i in tl.range(i_first, i_last):
                first_token = i * BLOCK_M
                if OPTIONS.HAS_LAYOUT:
                    row = tl.load(rows_ptr + i // PER_BLOCK)
                    first_token = row * OPTIONS.Q_BLOCK + i % PER_BLOCK * BLOCK_M - queries.past
                dk, dv = _add_query_tile(
                    dk, dv, first_token, memory, keys, queries, pointers, strides, scalars,
                    OPTIONS, phase != 1,
                )  # fmt: skip
    return dk, dv


@triton.jit
def _store_sums(dk, dv, row, exists, kv_head, pointers, scalars, OPTIONS: tl.constexpr):
    """Write the gradients of these rows of keys and values."""
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
    """One program, a tile of keys of one sequence."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    batch = sizes.batch
    # the first keys of a causal sequence are seen by the most queries: they start first
    number, kv_head = tl.program_id(0), tl.program_id(1)
    bounds = pointers.cu_seqlens_k
    if bounds is None:
        bounds = pointers.cu_seqlens_q
    # the rows past the last sequence are one more, without queries
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
        span = named("b first low high key_len tail_start")(
            b=b,
            first=first_key,
            low=first_key,
            high=high,
            key_len=key_len,
            tail_start=_tail_start(b, key_len, pointers, sizes),
        )
        row = row_start + j
        k, v = _load_keys(row, j < key_len, head, pointers, strides, OPTIONS)
        keys = named("span j k v")(span=span, j=j, k=k, v=v)
        dk = zero_chunks(BLOCK_N, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        dv = zero_chunks(BLOCK_N, OPTIONS.V_LOW, OPTIONS.V_HIGH)
        dk, dv = _add_sequence(
            dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS
        )  # fmt: skip

        # what stands past the last key has no gradient, whatever it holds
        exists = (j < row_stop - row_start) & (row >= 0) & (row < total_k)
        is_key = (j < key_len)[:, None]
        scale = scalars.scale
        dk = tl.where(is_key, dk[0] * scale, 0.0), tl.where(is_key, dk[1] * scale, 0.0)
        dv = tl.where(is_key, dv[0], 0.0), tl.where(is_key, dv[1], 0.0)
        _store_sums(dk, dv, row, exists, head, pointers, scalars, OPTIONS)


@triton.jit
def _shared_tile(pointers, strides, sizes, total_k, scalars, OPTIONS: tl.constexpr):
    """One program, a tile of rows of k, and every sequence that has some of them."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    kv_head = tl.program_id(1)
    head = kv_head.to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    exists = row < total_k
    k, v = _load_keys(row, exists, head, pointers, strides, OPTIONS)
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
                span = named("b first low high key_len tail_start")(
                    b=b,
                    first=first_key,
                    low=low_of_block,
                    high=high_of_block,
                    key_len=key_len,
                    tail_start=_tail_start(b, key_len, pointers, sizes),
                )
                keys = named("span j k v")(span=span, j=j, k=k, v=v)
                dk, dv = _add_sequence(
                    dk, dv, keys, kv_head, pointers, strides, sizes, scalars, OPTIONS
                )  # fmt: skip
    dk = dk[0] * scalars.scale, dk[1] * scalars.scale
    _store_sums(dk, dv, row, exists, head, pointers, scalars, OPTIONS)


@triton.jit
def _tail_start(b, key_len, pointers, sizes):
    """The first of the keys that a tail mask is about."""
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    return key_len - tl.maximum(q_stop - q_start, 0)


@triton.jit(do_not_specialize=[*Sizes._fields, "total_k"])
def _attention_dkdv_kernel(
    pointers,
    strides,
    stride_table,
    stride_crow_batch,
    stride_crow_head,
    stride_col_batch,
    stride_col_head,
    total_q,
    max_keys,
    num_pages,
    batch,
    layout_rows,
    nnz,
    total_k,
    scalars,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    gdc_wait(IS_DEPENDENT)
    gdc_launch_dependents(IS_DEPENDENT)
    sizes = Sizes(
        stride_table=stride_table,
        stride_crow_batch=stride_crow_batch,
        stride_crow_head=stride_crow_head,
        stride_col_batch=stride_col_batch,
        stride_col_head=stride_col_head,
        total_q=total_q,
        max_keys=max_keys,
        num_pages=num_pages,
        batch=batch,
        layout_rows=layout_rows,
        nnz=nnz,
    )
    if OPTIONS.IS_SHARED:
        _shared_tile(pointers, strides, sizes, total_k, scalars, OPTIONS)
    else:
        _own_tile(pointers, strides, sizes, total_k, scalars, OPTIONS)
