"""The warps beside the consumers of tiles of keys.

One claims tiles and loads queries; one loads gradients of the result; one loads keys and values,
and stores dK and dV. BY_BOX (`sums.py`), a fourth has the parts of dQ added up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from torch_paged_attn.backends.triton.hopper.backward.sums import add_part
from torch_paged_attn.backends.triton.hopper.backward.work import (
    FIELD,
    STATISTICS_ROWS,
    Passing,
    claim_tiles,
    steps_of,
)
from torch_paged_attn.backends.triton.hopper.common.tma import async_load, load_rows, store_rows


@gluon.jit
def _find_queries(at, params, OPTIONS: gl.constexpr):
    """The queries that pass by a tile of keys."""
    PASS: gl.constexpr = OPTIONS.PASS
    ROWS: gl.constexpr = STATISTICS_ROWS
    scalars, context_len = params.scalars, at.context_len
    first_live = 0
    first = 0
    stop = at.query_len
    if OPTIONS.HAS_RIGHT:
        first_live = gl.maximum(-context_len - scalars.window_right, 0)
        first = gl.maximum(at.first - context_len - scalars.window_right, 0)
        first = first // ROWS * ROWS
    if OPTIONS.HAS_LEFT:
        last_key = gl.minimum(at.first + OPTIONS.TILE, at.key_len) - 1
        stop = gl.minimum(stop, last_key - context_len + scalars.window_left + 1)
    steps = gl.maximum((stop - first + PASS - 1) // PASS, 0)
    steps = gl.where(at.first < at.key_len, steps, 0)
    statistics_tile = gl.load(params.pointers.cu_seqlens_q + at.b) // ROWS + at.b + first // ROWS
    return Passing(steps, first, statistics_tile, first_live)


@gluon.jit
def _load_queries(n, tile, at, passing, params, pipelines, OPTIONS: gl.constexpr):
    """Load these queries and their statistics."""
    PASS: gl.constexpr = OPTIONS.PASS
    PARTS: gl.constexpr = STATISTICS_ROWS // PASS  # fills that share a tile of statistics
    for g in range(OPTIONS.GROUP_SIZE):
        head = at.head * OPTIONS.GROUP_SIZE + g
        of_head = head * params.sizes.statistics_tiles + passing.statistics_tile
        for m in range(passing.steps):
            pipelines.q.producer_acquire(n)
            barrier = pipelines.q.full_barrier(n)
            mbarrier.expect(
                barrier, params.q_desc.block_type.nbytes + params.statistics_desc.block_type.nbytes
            )
            box = pipelines.q.tile(n)
            row = passing.first + m * PASS
            load_rows(params.q_desc, at.q_start, at.query_len, row, head, barrier, box)
            box = pipelines.statistics.index(n % OPTIONS.FIRST_STAGES)
            async_load(params.statistics_desc, [of_head + m // PARTS, 0], barrier, box)
            n += 1
    return n


@gluon.jit
def produce_queries(params, pipelines, OPTIONS: gl.constexpr):
    """Claim tiles of keys, and load the queries that pass by and their statistics."""
    claim_tiles(params, pipelines, _find_queries, _load_queries, True, OPTIONS)


@gluon.jit
def load_gradients(n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Load the gradients of the result, of the queries that pass by a tile."""
    info = pipelines.info
    q_start, query_len = info.get(tile, FIELD.Q_START), info.get(tile, FIELD.QUERY_LEN)
    first, kv_head = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.HEAD)
    pipelines.claims.consumer_release(tile)
    for g in range(OPTIONS.GROUP_SIZE):
        head = kv_head * OPTIONS.GROUP_SIZE + g
        for m in range(steps):
            pipelines.dout.producer_acquire(n)
            barrier = pipelines.dout.full_barrier(n)
            mbarrier.expect(barrier, params.dout_desc.block_type.nbytes)
            box = pipelines.dout.tile(n)
            row = first + m * OPTIONS.PASS
            load_rows(params.dout_desc, q_start, query_len, row, head, barrier, box)
            n += 1
    return n


@gluon.jit
def _load_keys(params, pipelines, tile):
    """Load keys and values of a tile."""
    info, keys, values = pipelines.info, pipelines.k, pipelines.v
    k_start, key_len = info.get(tile, FIELD.K_START), info.get(tile, FIELD.KEY_LEN)
    first_key, head = info.get(tile, FIELD.FIRST_STAY), info.get(tile, FIELD.HEAD)
    barrier = keys.full_barrier(tile)
    mbarrier.expect(barrier, params.k_desc.block_type.nbytes)
    load_rows(params.k_desc, k_start, key_len, first_key, head, barrier, keys.tile(tile))
    barrier = values.full_barrier(tile)
    mbarrier.expect(barrier, params.v_desc.block_type.nbytes)
    load_rows(params.v_desc, k_start, key_len, first_key, head, barrier, values.tile(tile))


@gluon.jit
def _store_keys(params, pipelines, tile, start, stop, first, head, OPTIONS: gl.constexpr):
    """Wait until consumers have put dK and dV of a tile where its keys and values lay, store them
    as rows `first` to `stop` of the sequence whose row 0 is `start`, and wait until that room is
    free."""
    STAGES: gl.constexpr = OPTIONS.STAY_STAGES
    mbarrier.wait(pipelines.done.index(tile % STAGES), (tile // STAGES) & 1)
    store_rows(params.first_desc, start, stop, first, head, pipelines.k.tile(tile))
    store_rows(params.second_desc, start, stop, first, head, pipelines.v.tile(tile))
    tma.store_wait(0)


@gluon.jit
def keep_keys(params, pipelines, OPTIONS: gl.constexpr):
    """Load keys and values of every tile, and store its results: with two stages, after the next
    tile's loads have been started."""
    AHEAD: gl.constexpr = OPTIONS.STAY_STAGES - 1
    info, claims = pipelines.info, pipelines.claims
    tile = 0
    start, stop, first, head = 0, 0, 0, 0
    steps = steps_of(pipelines, 0)
    while steps >= 0:
        _load_keys(params, pipelines, tile)
        if AHEAD > 0 and tile > 0:
            _store_keys(params, pipelines, tile - 1, start, stop, first, head, OPTIONS)
        start, stop = info.get(tile, FIELD.K_START), info.get(tile, FIELD.STOP_STAY)
        first, head = info.get(tile, FIELD.FIRST_STAY), info.get(tile, FIELD.HEAD)
        claims.consumer_release(tile)
        if AHEAD == 0:
            _store_keys(params, pipelines, tile, start, stop, first, head, OPTIONS)
        tile += 1
        steps = steps_of(pipelines, tile)
    if AHEAD > 0 and tile > 0:
        _store_keys(params, pipelines, tile - 1, start, stop, first, head, OPTIONS)


@gluon.jit
def add_parts(n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Have the accelerator add to the sums of dQ each part that the consumers leave of a tile,
    BY_BOX."""
    info = pipelines.info
    first, head = (
        info.get(tile, FIELD.STATISTICS_TILE),
        info.get(tile, FIELD.HEAD) * OPTIONS.GROUP_SIZE,
    )
    pipelines.claims.consumer_release(tile)
    for g in range(OPTIONS.GROUP_SIZE):
        of_head = (head + g) * params.sizes.statistics_tiles + first
        for m in range(steps):
            add_part(params, pipelines.sums, n, of_head + m, OPTIONS)
            n += 1
    return n
