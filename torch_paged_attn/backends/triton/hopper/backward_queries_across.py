"""dQ where the last product of a tile of queries runs with the first ones of the next.

A tile of queries in a window has few tiles of keys. So what a consumer does between two tiles
counts: it would wait for a last product alone, and then for scores alone. Here the loop over tiles
has the same step at a tile's border as within a tile; the result is stored behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torch_paged_attn.backends.triton.hopper.backward_queries import (
    QueryRows,
    go_on,
    pass_by,
    seen_tiles,
    step,
)
from torch_paged_attn.backends.triton.hopper.backward_work import (
    BATCH,
    CONTEXT_LEN,
    FIRST_PASS,
    FIRST_STAY,
    HEAD,
    KEY_LEN,
    Q_START,
    STATISTICS_TILE,
    STEPS,
    STOP_STAY,
    slope_of,
)
from torch_paged_attn.backends.triton.hopper.column_parts import as_operand, new_sums, store_sums
from torch_paged_attn.backends.triton.hopper.tma import store_rows


@gluon.jit
def _store_tile(dq, lse_row, tile, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Store a tile's dQ. Its numbers are read again: registers are wanted for the products."""
    STAY: gl.constexpr = OPTIONS.STAY
    info, queries, scalars = pipelines.info, pipelines.q, params.scalars
    first_token = info.get(tile, FIRST_STAY) + INDEX * STAY
    q_start, stop_token = info.get(tile, Q_START), info.get(tile, STOP_STAY)
    head = info.get(tile, HEAD)
    # a row that has seen no key may hold NaN, and with a sink a finite lse
    if OPTIONS.HAS_RIGHT:
        position = info.get(tile, CONTEXT_LEN) + first_token
        r = gl.arange(0, STAY, lse_row.type.layout)
        lse_row = gl.where(position + r + scalars.window_right < 0, float("inf"), lse_row)
    pipelines.claims.consumer_release(tile)
    if OPTIONS.IN_PLACE:
        out = queries.tiles.index(tile % OPTIONS.STAY_STAGES * OPTIONS.CONSUMERS + INDEX)
    else:
        out = pipelines.dq.index(INDEX)
        tma.store_wait(0)
    store_sums(
        dq, out.reshape([STAY, OPTIONS.WIDTH]), lse_row < float("inf"), scalars.scale, OPTIONS
    )
    fence_async_shared()
    store_rows(params.first_desc, q_start, stop_token, first_token, head, out)
    if OPTIONS.IN_PLACE:
        tma.store_wait(0)
        queries.consumer_release(tile)


@gluon.jit
def consume_queries_across(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Rows [INDEX * STAY, ...) of every tile. Each round of the loop ends one tile and begins the
    next: before the first there is none to end, after the last none to begin."""
    gl.static_assert(not OPTIONS.IS_APART)
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    stays: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    queries, douts = pipelines.q, pipelines.dout
    info, claims, pointers = pipelines.info, pipelines.claims, params.pointers
    dtype: gl.constexpr = pipelines.k.tiles.dtype
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    r = gl.arange(0, STAY, score_rows)
    dq = new_sums(STAY, OPTIONS)
    ds = as_operand(zeros.to(dtype), OPTIONS)
    lse_before = gl.full([STAY], float("inf"), gl.float32, score_rows)
    n = 0  # the first fill that no tile has had
    last = 0  # the fill that ds is of, if the tile before has seen one
    seen_before = 0
    tile = 0
    steps = 0
    while steps >= 0:
        claims.consumer_wait(tile)
        steps = info.get(tile, STEPS)
        exists = steps >= 0
        first_key, key_len = info.get(tile, FIRST_PASS), info.get(tile, KEY_LEN)
        first_token = info.get(tile, FIRST_STAY) + INDEX * STAY
        position = info.get(tile, CONTEXT_LEN) + first_token
        head, stop_token = info.get(tile, HEAD), info.get(tile, STOP_STAY)
        skipped, seen = seen_tiles(info, tile, first_token, params, OPTIONS)
        skipped, seen = gl.where(exists, skipped, 0), gl.where(exists, seen, 0)
        number = head * params.sizes.statistics_tiles + info.get(tile, STATISTICS_TILE)
        b = 0
        if pointers.alibi_slopes is not None:
            b = gl.where(exists, info.get(tile, BATCH), params.sizes.batch)
        slope = slope_of(b, head, params)
        token = first_token + r
        is_row = exists & (token < stop_token)
        at = pointers.statistics + number.to(gl.int64) * 128 + token // 64 * 128 + token % 64
        lse_row = gl.load(at, mask=is_row, other=float("inf"))
        start = zeros - gl.expand_dims(gl.load(at + 64, mask=is_row, other=0.0), 1)
        box = tile % OPTIONS.STAY_STAGES * OPTIONS.CONSUMERS + INDEX
        q = queries.tiles.index(box).reshape([STAY, WIDTH])
        dout = douts.tiles.index(box).reshape([STAY, WIDTH_V])
        if exists:
            queries.consumer_wait(tile)
            douts.consumer_wait(tile)
        q_operand = q
        dout_operand = dout
        if OPTIONS.OPERANDS > 0:
            dout_operand = dout.load(stays)
            if exists:
                douts.consumer_release(tile)
        if OPTIONS.OPERANDS > 1:
            q_operand = q.load(stays)
            if exists:
                queries.consumer_release(tile)
        n = pass_by(pipelines, n, skipped)
        first_key += skipped * PASS
        lse = gl.expand_dims(lse_row, 1)
        rows = QueryRows(q_operand, dout_operand, lse, start, slope, first_key, position, key_len)
        sums = dq, ds
        fills = last, n
        if seen_before > 0:
            if seen > 0:
                dq, ds = step(
                    sums, fills, first_key, rows, params, pipelines, OPTIONS, True, True, True
                )
            else:
                dq, ds = step(
                    sums, fills, first_key, rows, params, pipelines, OPTIONS, True, True, False
                )
        elif seen > 0:
            dq, ds = step(
                sums, fills, first_key, rows, params, pipelines, OPTIONS, True, False, True
            )
        if tile > 0:
            _store_tile(dq, lse_before, tile - 1, params, pipelines, OPTIONS, INDEX)
        dq = new_sums(STAY, OPTIONS)
        if seen > 0:
            tiles = 1, seen
            dq, ds, last = go_on(dq, ds, n, tiles, rows, params, pipelines, OPTIONS, True)
            n = last + 1
        if exists:
            if OPTIONS.OPERANDS < 1:
                douts.consumer_release(tile)
            if OPTIONS.OPERANDS < 2 and not OPTIONS.IN_PLACE:
                queries.consumer_release(tile)
            n = pass_by(pipelines, n, steps - skipped - seen)
        lse_before = lse_row
        seen_before = seen
        tile += 1
    tma.store_wait(0)
