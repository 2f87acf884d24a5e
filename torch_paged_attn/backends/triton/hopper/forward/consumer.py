"""A consumer of the Hopper kernel: four warps that own 64 rows of a tile of queries.

FlashAttention-3's loop (arXiv 2407.08608, algorithm 2): the scores of the next keys are asked for
before the values of these are multiplied, and both products run while the softmax is computed. With
PINGPONG, consumers ask for their products one after the other: those of one run while the others'
softmax is computed.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.common.clear import clear_before, clear_from
from torch_paged_attn.backends.triton.hopper.common.results import (
    of_heads,
    place_of_result,
    store_float32,
    store_lse,
    store_result,
)
from torch_paged_attn.backends.triton.hopper.common.scores import ask_for_scores, finish_scores
from torch_paged_attn.backends.triton.hopper.common.softmax import (
    partial_sum,
    rescale,
    scale_rows,
    update_softmax,
)
from torch_paged_attn.backends.triton.hopper.common.tma import as_matrix, is_in_atoms
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.scales import (
    OF_KEYS,
    OF_VALUES,
    columns_at_once,
    descales_of,
    factor_of_scores,
    scale_columns,
    take_queries,
)
from torch_paged_attn.backends.triton.hopper.schedule.block_runs import load_entries, row_mask_of
from torch_paged_attn.backends.triton.hopper.schedule.pieces import merge_pieces, pieces_in
from torch_paged_attn.backends.triton.hopper.schedule.shared_pieces import merge_shared
from torch_paged_attn.backends.triton.hopper.schedule.stretches import (
    FIRST,
    NONE_LEFT,
    factors,
    first_key_with,
    fold,
    leave_or_rescale,
    next_reference,
    with_left,
)

# the named barrier of consumer 0, then those of the others: Triton uses the first few for its own
PINGPONG_BARRIER = gl.constexpr(8)


class Rows(NamedTuple):
    """The rows of a consumer in a tile of queries, as values of the kernel."""

    first_key: Any
    kv_start: Any  # of the last tile of keys, which comes first
    key_len: Any
    q_start: Any  # of the sequence
    stop_token: Any
    first_token: Any
    head: Any
    box: Any  # in shared memory: the queries, and later the result
    is_sequence: Any  # by row: whether a sequence has it; other rows have no slope and no sink
    context_len: Any
    position: Any  # by row
    slope: Any  # by row
    # tiles of keys within [full_start, full_stop) need no mask
    full_start: Any
    full_stop: Any
    # with a layout: a list of blocks, how long it is, and the rows of the list that are here
    list_ptr: Any
    num_entries: Any
    row_mask: Any
    # of 8-bit operands: whether the factor of scores is negative, its size, the factor of values
    is_turned: Any
    descale: Any
    v_descale: Any


@gluon.jit
def _pingpong_wait(INDEX: gl.constexpr):
    """Wait until the consumer before this one has asked for its products."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [PINGPONG_BARRIER + INDEX], gl.int32, False, 1
    )


@gluon.jit
def _pingpong_arrive(INDEX: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next consumer ask for its products."""
    barrier: gl.constexpr = PINGPONG_BARRIER + (INDEX + 1) % CONSUMERS
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [barrier], gl.int32, False, 1
    )


@gluon.jit
def read_rows(r, params, pipelines, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Rows `r` of consumer number INDEX of a tile whose queries have arrived."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    pointers, scalars, work_info = params.pointers, params.scalars, pipelines.work_info
    first_key = work_info.get(tile, WORD.FIRST_KEY)
    kv_start = work_info.get(tile, WORD.KV_STOP) - OPTIONS.KV_STEP
    key_len = work_info.get(tile, WORD.KEY_LEN)
    q_start = work_info.get(tile, WORD.Q_START)
    stop_token = work_info.get(tile, WORD.STOP_TOKEN)
    first_token = work_info.get(tile, WORD.FIRST_TOKEN) + INDEX * OPTIONS.TOKENS
    head = work_info.get(tile, WORD.HEAD)
    box = pipelines.q.tiles.index(tile % pipelines.q.STAGES * OPTIONS.ROW_GROUPS + INDEX)
    context_len = work_info.get(tile, WORD.CONTEXT_LEN)
    position = context_len + first_token + r // HEADS
    b = work_info.get(tile, WORD.BATCH)
    is_sequence = of_heads((r >= 0) & (b < params.sizes.batch), r, OPTIONS)
    slope = 0.0
    if pointers.alibi_slopes is not None:
        slope_ptr = pointers.alibi_slopes + b * scalars.stride_alibi_batch
        slope_ptr += (head + r % HEADS) * scalars.stride_alibi_head
        slope = gl.load(slope_ptr, mask=is_sequence, other=0.0) * scalars.alibi_scale
    full_start = 0
    full_stop = key_len
    if OPTIONS.HAS_LEFT:
        full_start = context_len + first_token + OPTIONS.TOKENS - 1 - scalars.window_left
    if OPTIONS.HAS_RIGHT:
        full_stop = gl.minimum(key_len, context_len + first_token + scalars.window_right + 1)
    list_ptr = 0
    is_turned = False
    descale = 1.0
    v_descale = 1.0
    if OPTIONS.CONVERTS_V:
        is_turned, descale, v_descale = descales_of(b, head, params, OPTIONS)
    num_entries = 0
    row_mask = 0
    if OPTIONS.HAS_LAYOUT:
        num_entries = work_info.get(tile, WORD.NUM_ENTRIES)
        list_ptr = pointers.entries + work_info.get(tile, WORD.FIRST_ENTRY)
        stop = gl.minimum(first_token + OPTIONS.TOKENS, stop_token)
        row_mask = row_mask_of(context_len + first_token, context_len + stop, OPTIONS)
    return Rows(
        first_key, kv_start, key_len, q_start, stop_token, first_token, head, box, is_sequence,
        context_len, position, slope, full_start, full_stop, list_ptr, num_entries, row_mask,
        is_turned, descale, v_descale,
    )  # fmt: skip


@gluon.jit
def _runs_of(rows, kv_start, OPTIONS: gl.constexpr):
    """The keys of a tile: the number of the first, or the entries of a list."""
    runs = (kv_start,)
    if OPTIONS.HAS_LAYOUT:
        runs = load_entries(rows.list_ptr, kv_start, rows.num_entries, OPTIONS.KV_STEP)
    return runs


@gluon.jit
def leave_result(
    sums, place, at, rows, params, pipelines, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Leave the result of a tile, or of a piece of one, in `place`, in shared memory, or write it.
    Returns the token before which `store_result` has rows to write: 0 if there are none.

    `sums` are weighted sums of values (rows, width), the rows' references in base two, and their
    sums of weights; `at` is as for `results.store_lse`."""
    acc, m_i, total = sums
    work_info = pipelines.work_info
    stop_token = rows.stop_token
    if OPTIONS.MOST_PARTS > 0 and pieces_in(work_info.get(tile, WORD.PIECES), OPTIONS) > 1:
        if OPTIONS.MERGED_COLUMNS > 0:
            stop_token = merge_shared(sums, rows, params, work_info, tile, OPTIONS, INDEX)
        else:
            stop_token = merge_pieces(
                sums, place, at, rows, params, work_info, tile, OPTIONS, INDEX
            )
    else:
        share = store_lse(m_i, total, at, rows, params, OPTIONS)
        if OPTIONS.FLOAT32_COLUMNS > 0:
            store_float32(scale_rows(acc, share), rows, stop_token, params, OPTIONS)
        else:
            place.store(scale_rows(acc, share).to(place.dtype))
    return stop_token


@gluon.jit
def sum_values(
    q, zeros, scale_log2, rows, n, num_kv_tiles, tile, params, pipelines, OPTIONS: gl.constexpr,
    INDEX: gl.constexpr, STEP: gl.constexpr = 1, PLACE: gl.constexpr = 0,
):  # fmt: skip
    """Of a tile's rows and each STEP-th of its tiles of keys from number PLACE on, which there is
    and whose first fill is n: weighted sums of values, which the last product still adds to,
    references, sums of weights, and the last fill. With stretches of keys, also how far the last
    one's reference is above the others', and what was left of those."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    CONVERTS: gl.constexpr = OPTIONS.CONVERTS_V
    IS_FLOAT8: gl.constexpr = CONVERTS and not OPTIONS.CONVERTS_K
    STRETCH: gl.constexpr = OPTIONS.STRETCH
    PINGPONG: gl.constexpr = OPTIONS.PINGPONG and STEP == 1
    scores: gl.constexpr = zeros.type.layout
    across: gl.constexpr = columns_at_once(WIDTH_V, CONVERTS)
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, across, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    queries, keys, values = pipelines.q, pipelines.k, pipelines.v
    dtype: gl.constexpr = values.tiles.dtype
    kv_start = rows.kv_start - PLACE * OPTIONS.KV_STEP
    m_i = gl.full([BLOCK_M], -float("inf"), gl.float32, score_rows)
    l_i = partial_sum(zeros)
    acc = gl.zeros([BLOCK_M, WIDTH_V], gl.float32, result)
    if STRETCH > 0:
        # how far the last stretch's reference was above that of those before
        apart = gl.zeros_like(m_i)
        state = gl.full([], NONE_LEFT, gl.int32)
        stretch_start = first_key_with(kv_start, STRETCH)
    keys.consumer_wait_for(n, OPTIONS.GATHERS)
    k = as_matrix(keys.tile(n), BLOCK_N, WIDTH).permute((1, 0))
    s = ask_for_scores(q, k, zeros, OPTIONS)
    s = warpgroup_mma_wait(0, deps=[s])
    if OPTIONS.BY_TOKEN:
        s = scale_columns(s, n, pipelines.scales, OF_KEYS)
    keys.consumer_release(n)
    if is_in_atoms(values.tiles.shape) and kv_start + BLOCK_N > rows.key_len:
        values.consumer_wait_for(n, OPTIONS.GATHERS)
        clear_from(values.tile(n), rows.key_len - kv_start)
    if PLACE == 0 and queries.STAGES > 1 and not IS_FLOAT8 and tile > 0:
        # the last tile's result has left shared memory long since
        tma.store_wait(0)
        queries.consumer_release(tile - 1)
    s = finish_scores(s, _runs_of(rows, kv_start, OPTIONS), rows, params, OPTIONS, True)
    p, m_i, l_i, shrink = update_softmax(s, m_i, l_i, scale_log2, STRETCH == 0)
    if OPTIONS.BY_TOKEN:
        p = scale_columns(p, n, pipelines.scales, OF_VALUES)
    p = gl.convert_layout(p.to(dtype), operand)

    for _ in range(STEP + PLACE, num_kv_tiles, STEP):
        kv_start -= STEP * OPTIONS.KV_STEP
        runs = _runs_of(rows, kv_start, OPTIONS)
        keys.consumer_wait_for(n + STEP, OPTIONS.GATHERS)
        if PINGPONG:
            _pingpong_wait(INDEX)
        k = as_matrix(keys.tile(n + STEP), BLOCK_N, WIDTH).permute((1, 0))
        s = ask_for_scores(q, k, zeros, OPTIONS)
        values.consumer_wait_for(n, OPTIONS.GATHERS)
        v = as_matrix(values.tile(n), BLOCK_N, WIDTH_V)
        # the tensor cores are busy with the scores meanwhile
        if STRETCH > 0:
            acc, state = leave_or_rescale(acc, shrink, apart, state, params, OPTIONS, INDEX)
        else:
            acc = rescale(acc, shrink)
        pending = warpgroup_mma(p, v, acc, is_async=True)
        if PINGPONG:
            _pingpong_arrive(INDEX, OPTIONS.CONSUMERS)
        if STRETCH > 0 and kv_start < stretch_start:
            # what was asked for ends a stretch: its sums are left after the next scores
            stretch_start = first_key_with(kv_start, STRETCH)
            ended = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
            m_left, total_left = pipelines.left.rows(INDEX, state, score_rows)
            m_left, apart = next_reference(m_left, m_i)
            old, weight = factors(apart)
            pipelines.left.keep(INDEX, m_left, fold(total_left, ended, old, weight))
            state = state | FIRST
            m_i = gl.full_like(m_i, -float("inf"))
        s = warpgroup_mma_wait(1, deps=[s])
        if OPTIONS.BY_TOKEN:
            s = scale_columns(s, n + STEP, pipelines.scales, OF_KEYS)
        keys.consumer_release(n + STEP)
        s = finish_scores(s, runs, rows, params, OPTIONS, False)
        p, m_i, l_i, shrink = update_softmax(s, m_i, l_i, scale_log2, STRETCH == 0)
        if OPTIONS.BY_TOKEN:
            p = scale_columns(p, n + STEP, pipelines.scales, OF_VALUES)
        acc, p, shrink = warpgroup_mma_wait(0, deps=[pending, p, shrink])
        values.consumer_release(n)
        p = gl.convert_layout(p.to(dtype), operand)
        n += STEP

    values.consumer_wait_for(n, OPTIONS.GATHERS)
    v = as_matrix(values.tile(n), BLOCK_N, WIDTH_V)
    if OPTIONS.HAS_LEFT and not CONVERTS and kv_start < rows.first_key:
        clear_before(v, rows.first_key - kv_start)
    if STRETCH > 0 and OPTIONS.HAS_LEFT:
        # a window may begin with a stretch's last keys
        acc, state = leave_or_rescale(acc, shrink, apart, state, params, OPTIONS, INDEX)
    else:
        acc = scale_rows(acc, shrink)
    pending = warpgroup_mma(p, v, acc, is_async=True)
    total = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    if STRETCH > 0:
        return pending, m_i, total, n, apart, state
    else:
        return pending, m_i, total, n


@gluon.jit
def consume(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Rows [INDEX * BLOCK_M, ...) of every tile of queries."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    CONVERTS: gl.constexpr = OPTIONS.CONVERTS_V
    IS_FLOAT8: gl.constexpr = CONVERTS and not OPTIONS.CONVERTS_K
    STRETCH: gl.constexpr = OPTIONS.STRETCH
    depth: gl.constexpr = 32 if IS_FLOAT8 else 16
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, depth])
    q_operand: gl.constexpr = gl.DotOperandLayout(0, scores, depth // 8)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    queries, values = pipelines.q, pipelines.v
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    r = gl.arange(0, BLOCK_M, score_rows)
    n = 0
    tile = 0
    if OPTIONS.PINGPONG and INDEX == OPTIONS.CONSUMERS - 1:
        _pingpong_arrive(INDEX, OPTIONS.CONSUMERS)
    queries.consumer_wait(0)
    num_kv_tiles = pipelines.work_info.get(0, WORD.NUM_KV_TILES)
    while num_kv_tiles > 0:
        rows = read_rows(r, params, pipelines, tile, OPTIONS, INDEX)
        out = rows.box
        scale_log2 = params.scalars.scale_log2
        if IS_FLOAT8:
            out = pipelines.out.index(INDEX)
        if CONVERTS:
            q = take_queries(rows.box, rows.is_turned, q_operand, BLOCK_M, WIDTH)
            if not OPTIONS.HAS_SOFTCAP:
                scale_log2 = factor_of_scores(scale_log2, rows.descale)
        else:
            q = rows.box.reshape([BLOCK_M, WIDTH])
        found = sum_values(
            q, zeros, scale_log2, rows, n, num_kv_tiles, tile, params, pipelines, OPTIONS, INDEX
        )
        pending, m_i, total, n = found[0], found[1], found[2], found[3]
        if STRETCH > 0:
            apart, state = found[4], found[5]
        stop_token = rows.stop_token
        token = rows.position - rows.context_len
        at = (r, token, of_heads(token < stop_token, r, OPTIONS), rows.is_sequence)
        place = place_of_result(out, params.out_desc)
        if IS_FLOAT8:
            # the last tile's result has left shared memory long since
            tma.store_wait(0)
            thread_barrier()
        if STRETCH > 0:
            m_left, total_left = pipelines.left.rows(INDEX, state, score_rows)
            m_i, apart = next_reference(m_left, m_i)
            old, weight = factors(apart)
            total = fold(total_left, total, old, weight)
        if OPTIONS.MOST_PARTS > 0:
            acc = warpgroup_mma_wait(0, deps=[pending])
            values.consumer_release(n)
            if STRETCH > 0:
                acc = with_left(acc, apart, state, params, OPTIONS, INDEX)
            sums = (acc, m_i, total)
            stop_token = leave_result(
                sums, place, at, rows, params, pipelines, tile, OPTIONS, INDEX
            )
        else:
            share = store_lse(m_i, total, at, rows, params, OPTIONS)
            acc = warpgroup_mma_wait(0, deps=[pending])
            values.consumer_release(n)
            if STRETCH > 0:
                acc = with_left(acc, apart, state, params, OPTIONS, INDEX)
            acc = scale_rows(acc, share)
            if OPTIONS.FLOAT32_COLUMNS > 0:
                store_float32(acc, rows, stop_token, params, OPTIONS)
            else:
                place.store(acc.to(place.dtype))
        n += 1
        if OPTIONS.FLOAT32_COLUMNS == 0:
            store_result(out, rows, stop_token, params, OPTIONS)
        if IS_FLOAT8:
            queries.consumer_release(tile)
        elif queries.STAGES == 1:
            tma.store_wait(0)
            queries.consumer_release(tile)
        tile += 1
        queries.consumer_wait(tile)
        num_kv_tiles = pipelines.work_info.get(tile, WORD.NUM_KV_TILES)
    tma.store_wait(0)
