"""dQ: tiles of queries stay, keys pass by.

A program works on 64 queries of one head for each of its consumers. For every tile of keys:

    S = Q K^T, dP = dO V^T
    P = exp2(S - lse), dS = P (dP - D)
    dQ += dS K

The scores of the next keys are asked for before this product, as in the forward, so that it runs
while the next probabilities are computed. The first tile of keys begins at the first key that the
window of the program's first query shows: no key before that is read, which may hold NaN.

Of the warps beside the consumers, one claims tiles, and loads queries and the keys that pass by;
one loads gradients of the result, and values.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.backward.column_parts import (
    as_operand,
    ask_for_sums,
    new_sums,
    store_sums,
    wait_for_sums,
)
from torch_paged_attn.backends.triton.hopper.backward.work import (
    FIELD,
    Passing,
    claim_tiles,
    pass_by,
    slope_of,
    steps_of,
)
from torch_paged_attn.backends.triton.hopper.common.scores import ask_for_scores, probabilities
from torch_paged_attn.backends.triton.hopper.common.tma import load_fill, load_rows, store_rows


class QueryPipelines(NamedTuple):
    """What is on its way between the warps of a program."""

    q: Any  # a fill is a box for each consumer
    dout: Any  # the same
    k: Any
    v: Any
    dq: Any  # a box of results for each consumer; None if IN_PLACE
    info: Any
    claims: Any


class QueryRows(NamedTuple):
    """A consumer's queries of a tile and the keys that pass by them, as values of the kernel."""

    q: Any  # operands, in shared memory or in registers
    dout: Any
    lse: Any  # by row, in base two
    start: Any  # (STAY, PASS), -D of each row: the product that gives dP is added to it
    slope: Any
    first_key: Any  # of the first tile of keys that the rows see
    position: Any  # of the first query
    key_len: Any


@gluon.jit
def _seen_tiles(info, tile, first_token, params, OPTIONS: gl.constexpr):
    """Which tiles of the keys that pass by the STAY queries from `first_token` on see: how many
    come before the first one, and how many they see."""
    scalars = params.scalars
    first, key_len = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.KEY_LEN)
    context_len, stop_token = info.get(tile, FIELD.CONTEXT_LEN), info.get(tile, FIELD.STOP_STAY)
    last = gl.minimum(first_token + OPTIONS.STAY, stop_token)
    skipped = 0
    stop = key_len
    if OPTIONS.HAS_LEFT:
        skipped = (
            gl.maximum(context_len + first_token - scalars.window_left - first, 0) // OPTIONS.PASS
        )
    if OPTIONS.HAS_RIGHT:
        stop = gl.minimum(stop, context_len + last + scalars.window_right)
    steps = gl.maximum((stop - first + OPTIONS.PASS - 1) // OPTIONS.PASS - skipped, 0)
    steps = gl.where(first_token < stop_token, steps, 0)
    return gl.minimum(skipped, info.get(tile, FIELD.STEPS) - steps), steps


@gluon.jit
def _let_go(queries, douts, tile, OPTIONS: gl.constexpr):
    """Release a tile's queries and gradients after its last scores. Those in registers have been
    released already, and queries whose place dQ takes are released later."""
    if OPTIONS.OPERANDS < 1:
        douts.consumer_release(tile)
    if OPTIONS.OPERANDS < 2 and not OPTIONS.IN_PLACE:
        queries.consumer_release(tile)


@gluon.jit
def _go_on(
    dq, ds, n, tiles, rows, params, pipelines, OPTIONS: gl.constexpr, MAY_HIDE: gl.constexpr
):
    """Go on through the keys after fill n, whose dS is `ds`. `tiles`: the range of their numbers
    among the tiles that the rows see. Returns dQ with the parts of all fills but the last one, dS
    of that one, and its number. Without MAY_HIDE each of the rows sees each of the keys."""
    q, dout, lse, start, slope, first_key, position, key_len = rows
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    keys, values = pipelines.k, pipelines.v
    dtype: gl.constexpr = keys.tiles.dtype
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    for i in range(tiles[0], tiles[1]):
        keys.consumer_wait(n + 1)
        k_next = keys.tile(n + 1).reshape([PASS, OPTIONS.WIDTH])
        s_pending = ask_for_scores(q, k_next.permute((1, 0)), zeros, OPTIONS)
        values.consumer_wait(n + 1)
        v = values.tile(n + 1).reshape([PASS, OPTIONS.WIDTH_V])
        dp_pending = warpgroup_mma(dout, v.permute((1, 0)), start, is_async=True)
        k = keys.tile(n).reshape([PASS, OPTIONS.WIDTH])
        dq_pending = ask_for_sums(ds, k, dq, OPTIONS)
        s = warpgroup_mma_wait(1 + len(dq_pending), deps=[s_pending])
        _, weight = probabilities(
            s, lse, first_key + i * PASS, position, key_len, slope, params, OPTIONS, False, MAY_HIDE
        )
        dp = warpgroup_mma_wait(len(dq_pending), deps=[dp_pending])
        values.consumer_release(n + 1)
        ds_next = (weight * dp).to(dtype)
        dq, ds = wait_for_sums(dq_pending, ds)
        keys.consumer_release(n)
        ds = as_operand(ds_next, OPTIONS)
        n += 1
    return dq, ds, n


@gluon.jit
def consume_queries(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """As consumer INDEX, compute dQ of every tile's queries from number INDEX * STAY on."""
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    stays: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    # whether a tile's queries, whose place dQ takes, are released during the next tile's products
    LEAVES_LATE: gl.constexpr = OPTIONS.IN_PLACE and OPTIONS.STAY_STAGES > 1
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    queries, douts, keys, values = pipelines.q, pipelines.dout, pipelines.k, pipelines.v
    info, claims, scalars, pointers = (
        pipelines.info, pipelines.claims, params.scalars, params.pointers,
    )  # fmt: skip
    dtype: gl.constexpr = keys.tiles.dtype
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    r = gl.arange(0, STAY, score_rows)
    n = 0
    tile = 0
    steps = steps_of(pipelines, 0)
    while steps >= 0:
        first_key, key_len = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.KEY_LEN)
        first_token = info.get(tile, FIELD.FIRST_STAY) + INDEX * STAY
        position = info.get(tile, FIELD.CONTEXT_LEN) + first_token
        head, stop_token = info.get(tile, FIELD.HEAD), info.get(tile, FIELD.STOP_STAY)
        skipped, seen_steps = _seen_tiles(info, tile, first_token, params, OPTIONS)
        unseen = steps - skipped - seen_steps
        number = head * params.sizes.statistics_tiles + info.get(tile, FIELD.STATISTICS_TILE)
        b = 0
        if pointers.alibi_slopes is not None:
            b = info.get(tile, FIELD.BATCH)
        slope = slope_of(b, head, params)
        token = first_token + r
        exists = token < stop_token
        at = pointers.statistics + number.to(gl.int64) * 128 + token // 64 * 128 + token % 64
        lse_row = gl.load(at, mask=exists, other=float("inf"))
        lse = gl.expand_dims(lse_row, 1)
        delta = gl.expand_dims(gl.load(at + 64, mask=exists, other=0.0), 1)
        box = tile % OPTIONS.STAY_STAGES * OPTIONS.CONSUMERS + INDEX
        q = queries.tiles.index(box).reshape([STAY, WIDTH])
        dout = douts.tiles.index(box).reshape([STAY, OPTIONS.WIDTH_V])
        queries.consumer_wait(tile)
        douts.consumer_wait(tile)
        q_operand = q
        dout_operand = dout
        if OPTIONS.OPERANDS > 0:
            dout_operand = dout.load(stays)
            douts.consumer_release(tile)
        if OPTIONS.OPERANDS > 1:
            q_operand = q.load(stays)
            queries.consumer_release(tile)
        dq = new_sums(STAY, OPTIONS)
        n = pass_by(keys, values, n, skipped)
        first_key += skipped * PASS
        if seen_steps > 0:
            keys.consumer_wait(n)
            k = keys.tile(n).reshape([PASS, WIDTH])
            s_pending = ask_for_scores(q_operand, k.permute((1, 0)), zeros, OPTIONS)
            start = zeros - delta  # delta arrives from memory while scores are computed
            rows = QueryRows(
                q_operand, dout_operand, lse, start, slope, first_key, position, key_len
            )
            values.consumer_wait(n)
            v = values.tile(n).reshape([PASS, OPTIONS.WIDTH_V])
            dp_pending = warpgroup_mma(dout_operand, v.permute((1, 0)), start, is_async=True)
            if LEAVES_LATE and tile > 0:
                tma.store_wait(0)
                queries.consumer_release(tile - 1)
            s = warpgroup_mma_wait(1, deps=[s_pending])
            _, weight = probabilities(
                s, lse, first_key, position, key_len, slope, params, OPTIONS, False
            )
            dp = warpgroup_mma_wait(0, deps=[dp_pending])
            values.consumer_release(n)
            ds = weight * dp
            ds = as_operand(ds.to(dtype), OPTIONS)
            whole = 1
            if OPTIONS.IS_APART:
                whole = gl.minimum(gl.maximum((key_len - first_key) // PASS, 1), seen_steps)
                tiles = 1, whole
                dq, ds, n = _go_on(dq, ds, n, tiles, rows, params, pipelines, OPTIONS, False)
            tiles = whole, seen_steps
            dq, ds, n = _go_on(dq, ds, n, tiles, rows, params, pipelines, OPTIONS, True)
            k = keys.tile(n).reshape([PASS, WIDTH])
            dq_pending = ask_for_sums(ds, k, dq, OPTIONS)
            _let_go(queries, douts, tile, OPTIONS)
            dq, ds = wait_for_sums(dq_pending, ds)
            keys.consumer_release(n)
            n += 1
        else:
            if LEAVES_LATE and tile > 0:
                tma.store_wait(0)
                queries.consumer_release(tile - 1)
            _let_go(queries, douts, tile, OPTIONS)
        n = pass_by(keys, values, n, unseen)
        # read again and not kept: the loop needs the registers
        first_token = info.get(tile, FIELD.FIRST_STAY) + INDEX * STAY
        q_start, stop_token = info.get(tile, FIELD.Q_START), info.get(tile, FIELD.STOP_STAY)
        position, head = info.get(tile, FIELD.CONTEXT_LEN) + first_token, info.get(tile, FIELD.HEAD)
        claims.consumer_release(tile)
        # dQ of a row that sees no key is 0. Its sums may be NaN, and with a sink its lse is finite
        if OPTIONS.HAS_RIGHT:
            lse_row = gl.where(position + r + scalars.window_right < 0, float("inf"), lse_row)
        if OPTIONS.IN_PLACE:
            out = queries.tiles.index(box)
        else:
            out = pipelines.dq.index(INDEX)
            tma.store_wait(0)
        seen = lse_row < float("inf")
        store_sums(dq, out.reshape([STAY, WIDTH]), seen, scalars.scale, OPTIONS)
        fence_async_shared()
        store_rows(params.first_desc, q_start, stop_token, first_token, head, out)
        if OPTIONS.IN_PLACE and not LEAVES_LATE:
            tma.store_wait(0)
            queries.consumer_release(tile)
        tile += 1
        steps = steps_of(pipelines, tile)
    tma.store_wait(0)


@gluon.jit
def _load_stay(desc, pipeline, tile, start, size, first, head, OPTIONS: gl.constexpr):
    """Load the rows of all consumers, from row `first` on, of a sequence that begins at row `start`
    and has `size` rows."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    pipeline.producer_acquire(tile)
    barrier = pipeline.full_barrier(tile)
    mbarrier.expect(barrier, desc.block_type.nbytes * CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        box = pipeline.tiles.index(tile % OPTIONS.STAY_STAGES * CONSUMERS + i)
        load_rows(desc, start, size, first + i * OPTIONS.STAY, head, barrier, box)


@gluon.jit
def _find_keys(at, params, OPTIONS: gl.constexpr):
    """The keys that pass by a tile of queries."""
    scalars, context_len = params.scalars, at.context_len
    first = 0
    stop = at.key_len
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(context_len + at.first - scalars.window_left, 0)
    if OPTIONS.HAS_RIGHT:
        stop = gl.minimum(stop, context_len + at.stop + scalars.window_right)
    steps = gl.maximum((stop - first + OPTIONS.PASS - 1) // OPTIONS.PASS, 0)
    statistics_tile = gl.load(params.pointers.cu_seqlens_q + at.b) // 64 + at.b
    return Passing(steps, first, statistics_tile, 0)


@gluon.jit
def _load_queries_and_keys(n, tile, at, passing, params, pipelines, OPTIONS: gl.constexpr):
    """Load a tile of queries and the keys that pass by."""
    _load_stay(params.q_desc, pipelines.q, tile, at.q_start, at.stop, at.first, at.head, OPTIONS)
    kv_head = at.head // OPTIONS.GROUP_SIZE
    for m in range(passing.steps):
        key = passing.first + m * OPTIONS.PASS
        load_fill(params.k_desc, pipelines.k, n, at.k_start, at.key_len, key, kv_head)
        n += 1
    return n


@gluon.jit
def produce_queries_and_keys(params, pipelines, OPTIONS: gl.constexpr):
    """Claim tiles of queries, and load them and the keys that pass by."""
    claim_tiles(params, pipelines, _find_keys, _load_queries_and_keys, False, OPTIONS)


@gluon.jit
def load_gradients_and_values(
    n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Load the gradients of a tile's result, and the values that pass by."""
    info = pipelines.info
    q_start, stop_token = info.get(tile, FIELD.Q_START), info.get(tile, FIELD.STOP_STAY)
    k_start, key_len = info.get(tile, FIELD.K_START), info.get(tile, FIELD.KEY_LEN)
    first, first_token = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.FIRST_STAY)
    head = info.get(tile, FIELD.HEAD)
    pipelines.claims.consumer_release(tile)
    _load_stay(
        params.dout_desc, pipelines.dout, tile, q_start, stop_token, first_token, head, OPTIONS
    )
    kv_head = head // OPTIONS.GROUP_SIZE
    for m in range(steps):
        key = first + m * OPTIONS.PASS
        load_fill(params.v_desc, pipelines.v, n, k_start, key_len, key, kv_head)
        n += 1
    return n
